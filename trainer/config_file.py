"""Config files as modules, and errors in their functions explained by the user's own lines.

    module, files = load_module("my_model.py")          # or "my_package.my_config"
    with errors_explained("build_model(config) of my_model.py"):
        model = module.build_model(config)

A config file may import its neighbours, be part of a package, and use any other feature of a
module. It is executed once in a process.
"""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import linecache
import os
import re
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from data.system.compat.first_tensor import has_tensors
from data.system.compat.generated_files import is_generated
from data.system.compat.metrics_without_variables import metrics_without_variables
from data.system.errors import UsageError
from trainer import tf_setup
from trainer.exit_codes import first_line
from trainer.step.options import ConfigError

_PROGRAM = Path(__file__).resolve().parents[1]
_PACKAGES = ("data", "strategies", "trainer")
_LIBRARIES = tuple(
    Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "purelib", "platlib")
)
# A line of a traceback, also of AutoGraph's, which is a part of the error's message.
_PLACE = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
_REASON = re.compile(r"\b(?:Error|Exception) encountered:\s+")
_LOADED: set[str] = set()  # The files of config files, and their neighbours.
_SHIPPED = _PROGRAM / "configs"


def split_target(target: str) -> tuple[str, str]:
    """The file or module that `--config` names, and the function that returns the config."""
    place, colon, function = target.partition(":")
    return place, function if colon else "get_config"


def absolute(target: str) -> str:
    """`target` for a process with another current directory."""
    place, function = split_target(target)
    found = getattr(load_module(place)[0], "__file__", None)
    if found is None:  # Made of a Config object.
        return target
    file = str(Path(found).resolve())
    return f"{file}:{function}" if ":" in target else file


@functools.cache
def load_module(place: str) -> tuple[ModuleType, tuple[str, ...]]:
    """The module of a file or of a dotted name; its file, and the neighbours that it imports.

    Raises ConfigError if it does not exist, cannot be executed, creates a tensor, or switches eager
    execution off.
    """
    modules_before, had_tensors, was_eager = set(sys.modules), has_tensors(), _is_eager()
    place = _shipped_file(place) or place
    try:
        # Each run makes its own metrics from those of the file (trainer/step/keras_metrics.py).
        with metrics_without_variables(_import_keras):
            module = _import_file(place) if _is_file_name(place) else _import_name(place)
    except UsageError:
        raise
    except Exception as error:  # A user's code, which may fail in any way.
        raise ConfigError(f"--config={place} cannot be run: {explained(error)}") from error
    if has_tensors() and not had_tensors:
        raise ConfigError(
            f"--config={place} creates a tensor when it is imported{_tensors_of(module)}: devices "
            "and other tasks must be set up before the first tensor. Create it inside the function "
            "that uses it, or write it as a NumPy array."
        )
    check_eager(f"--config={place}" if was_eager else "This process")
    loaded = [sys.modules[name] for name in set(sys.modules) - modules_before]
    own = getattr(module, "__file__", None)
    if own is None:  # Made of a Config object.
        return module, ()
    files = {str(getattr(each, "__file__", None) or "") for each in loaded} - {own}
    loaded_files = (own, *sorted(file for file in files if _is_users(file)))
    _LOADED.update(loaded_files)
    return module, loaded_files


def check_eager(who: str) -> None:
    """Raises ConfigError if eager execution is off; `who` has done it."""
    if not _is_eager():
        raise ConfigError(
            f"{who} switches eager execution off, which Keras 3 needs. Delete "
            "tf.compat.v1.disable_eager_execution() or tf.compat.v1.disable_v2_behavior()."
        )


def _is_eager() -> bool:
    return "tensorflow" not in sys.modules or sys.modules["tensorflow"].executing_eagerly()


def forget_modules() -> None:
    """Has `load_module` execute files again, with their neighbours: they may have changed.

    For a process that lives longer than a run, such as a notebook.
    """
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) in _LOADED and name != "__main__":
            del sys.modules[name]
    _LOADED.clear()
    load_module.cache_clear()


def _import_keras() -> None:
    # As tasks do, and not as the file would: in less time, without TensorFlow's own messages.
    tf_setup.set_environment()
    tf_setup.import_tensorflow()


@contextlib.contextmanager
def errors_explained(what: str, hint: str = "") -> Iterator[None]:
    """Turns an error of a user's code into a ConfigError that shows the reason and the line.

    Errors that this program raises for users' mistakes, and lost tasks, pass.
    """
    try:
        yield
    except Exception as error:  # A user's code, which may fail in any way.
        if type(error).__module__.partition(".")[0] in _PACKAGES or _is_loss(error):
            raise
        said = explained(error)
        own = f"{ConfigError.__name__}: "
        if said.startswith(own):  # Wrapped by AutoGraph.
            raise ConfigError(said.removeprefix(own)) from error
        raise ConfigError(f"{what} fails: {said}{hint}") from error


def _is_loss(error: Exception) -> bool:
    """Returns True for errors of other tasks, which a user's code did not cause."""
    if not type(error).__module__.startswith("tensorflow."):
        return False
    from strategies.lost_peers import loss_of  # Loads TensorFlow, which this module must not.

    return type(error).__name__ == "CancelledError" or loss_of(error) is not None


def explained(error: BaseException) -> str:
    """The type and reason of `error`, and the last line of a user's file that led to it.

    If AutoGraph or Keras wrapped the error, its reason is at the end of a long message.
    """
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"
    # Keras says after these words why it could not find the shape of outputs, or make an object.
    text, kind = _REASON.split(str(error))[-1], type(error).__name__
    places = list(_PLACE.finditer(text))
    if places and "in user code:" in text:
        # The line of code, then the error.
        last = text[places[-1].end() :].partition("\n")[2].partition("\n")[2].strip()
        named = re.match(r"(\w+): ", last)
        if named:
            kind, last = named[1], last[named.end() :]
        reason = first_line(Exception(last))
    else:
        reason = first_line(Exception(text) if text else error)
    frames = [(found[1], int(found[2]), found[3]) for found in places]
    raised = traceback.extract_tb(error.__traceback__)
    frames = [(f.filename, f.lineno or 0, f.name) for f in raised] + frames
    hint = _collision(error)
    if "Could not locate class 'ShardedEmbedding'" in text:
        hint = "\n  It is a class of this program: write `import trainer.embeddings` in the file."
    for file, number, name in reversed(frames):
        if _is_users(file):
            code = linecache.getline(file, number).strip()
            return f"{kind}: {reason}\n  {file}, line {number}, in {name}: {code}{hint}"
    return f"{kind}: {reason}{hint}"


def _is_users(file: str) -> bool:
    """Returns True if `file` is neither of a library, nor of this program, nor generated."""
    if not file.endswith(".py") or is_generated(file):
        return False
    path = Path(file).resolve()
    # By name too: an environment may use the packages of another.
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    if any(path.is_relative_to(library) for library in _LIBRARIES):
        return False
    return not any(path.is_relative_to(_PROGRAM / package) for package in _PACKAGES)


def _is_file_name(place: str) -> bool:
    return place.endswith(".py") or "/" in place or Path(place).exists()


def _import_name(name: str) -> ModuleType:
    top, *others = name.split(".")
    file = Path.cwd().joinpath(top, *others).with_suffix(".py")
    packages = file.parents[: len(others)]
    is_in_packages = others and all((each / "__init__.py").is_file() for each in packages)
    if file.is_file() and (top in _PACKAGES or is_in_packages):
        return _import_file(str(file))
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # It exists, and imports something that does not.
        raise _not_found(name, "file and no such module") from None


def _import_file(place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        raise _not_found(place, "file")
    path = path.resolve()
    root, names = path.parent, [path.stem]
    while (root / "__init__.py").is_file():  # A part of a package, with relative imports.
        root, names = root.parent, [root.name, *names]
    if path.parent != _SHIPPED:
        _make_importable(root)
    if len(names) > 1:
        name = ".".join([_package(root / names[0]), *names[1:]])
        found = importlib.util.find_spec(name)
        # A user's directory `configs` may hide a shipped config of the same name.
        if found is not None and Path(found.origin or "").resolve() == path:
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None:
        raise ConfigError(f"--config={place} is no Python file. See configs/digits.py.")
    return _executed(spec)


def _make_importable(root: Path) -> None:
    """Makes the neighbours in `root`, and what is in the current directory, importable.

    `import configs.NAME` finds a user's files and the shipped ones.
    """
    directories = [root]
    with contextlib.suppress(OSError):  # The current directory was deleted.
        directories.append(Path.cwd())
    for directory in directories:
        # Last: a neighbour must not replace a module of this program or of a library.
        if str(directory) not in sys.path and (directory is root or "" not in sys.path):
            sys.path.append(str(directory))
    places = [root, *(directory / _SHIPPED.name for directory in directories)]
    users = [p for p in places if p.name == _SHIPPED.name and p.is_dir() and p != _SHIPPED]
    if not users:
        return
    if (users[0] / "__init__.py").is_file():
        _package(users[0])
    configs = importlib.import_module(_SHIPPED.name)
    merged = dict.fromkeys([*map(str, users), *configs.__path__, str(_SHIPPED)])
    configs.__path__ = list(merged)


def _package(directory: Path) -> str:
    """The name of the package in `directory`: its own, unless another module has this name."""
    name = directory.name
    known = sys.modules.get(name)
    if known is not None:
        if str(directory) in getattr(known, "__path__", ()):
            return name
        name = f"recipe_{zlib.crc32(os.fsencode(directory)):08x}_{name}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, directory / "__init__.py", submodule_search_locations=[str(directory)]
        )
        assert spec is not None
        _executed(spec)
    return name


def _executed(spec: ModuleSpec) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look up their annotations there.
    assert spec.loader is not None
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]  # A notebook may try again.
        raise
    return module


def _collision(error: BaseException) -> str:
    """What to do if a user's code got a package of this program in place of its own; else ""."""
    named = getattr(error, "name", None) or ""
    if isinstance(error, AttributeError):
        named = error.obj.__name__ if isinstance(error.obj, ModuleType) else ""
    elif not isinstance(error, ImportError):
        return ""
    top = named.partition(".")[0]
    if top not in (*_PACKAGES, _SHIPPED.name):
        return ""
    for directory in dict.fromkeys(Path(path or ".").resolve() for path in sys.path):
        for found in (directory / top, directory / f"{top}.py"):
            if found.exists() and directory != _PROGRAM:
                return (
                    f"\n  {top!r} is also a package of this program, which hides {found}. Rename "
                    f"{found}, and the imports of it."
                )
    return ""


def _shipped_file(place: str) -> str:
    """The file of a shipped config that `digits`, `digits.py` or `configs/digits.py` names, or "".

    A file or module of the current directory takes precedence.
    """
    path = Path(place)
    is_name = path.parent in (Path(), Path("configs")) and path.suffix in ("", ".py")
    if not is_name or path.is_file() or path.with_suffix(".py").is_file():
        return ""
    shipped = _SHIPPED / f"{path.stem}.py"
    return str(shipped) if shipped.is_file() else ""


def shipped_configs() -> list[str]:
    """The names of the configs that come with the program, such as "digits"."""
    return [path.stem for path in sorted(_SHIPPED.glob("*.py")) if path.stem != "__init__"]


def _not_found(place: str, what: str) -> ConfigError:
    names = [f"{name}.py" for name in shipped_configs()]
    names += [path.name for path in sorted(Path.cwd().glob("*.py")) if path.stem != "__init__"]
    near = difflib.get_close_matches(Path(place).with_suffix(".py").name, names, n=1)
    return ConfigError(
        f"--config={place}: there is no such {what} (looked in {Path.cwd()}). "
        + (f"Did you mean --config={near[0]}? " if near else "")
        + f"Shipped: {', '.join(shipped_configs())}. They are in {_SHIPPED}; --config=digits is "
        "digits.py there."
    )


def _tensors_of(module: ModuleType) -> str:
    import keras
    import tensorflow as tf

    kinds = (tf.Tensor, tf.Variable, keras.Variable, keras.Layer, keras.Optimizer)
    names = [name for name, value in vars(module).items() if isinstance(value, kinds)]
    return f" ({', '.join(names)})" if names else ""
