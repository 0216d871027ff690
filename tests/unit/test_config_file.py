"""Config files are ordinary modules, and each mistake in them is one message with its line."""

import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from strategies.transfer import AS_COMPUTED
from tests.commands import run_python
from trainer.api.arguments import parsed
from trainer.config import Config, ConfigError, Recipe, load_recipe
from trainer.config_file import absolute
from trainer.flags.checks import read_recipe
from trainer.guards.fingerprint import shared_settings
from trainer.preflight import preflight

COMPLETE = """
    from trainer.config import Config

    def get_config():
        return Config(batch_size=8, train_steps=3)

    def build_model(config):
        import keras

        layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
        return keras.Sequential(layers)
"""


def written(directory: Path, source: str, name: str = "mine.py") -> str:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return str(path)


def with_source(source: str) -> str:
    """A complete config file with `source`, which may use Keras, TensorFlow and Learner."""
    imports = "import keras\nimport tensorflow as tf\nfrom trainer.learner import Learner\n"
    return textwrap.dedent(COMPLETE) + imports + textwrap.dedent(source)


# For the sources of MISTAKES.
FUNCTIONS = """
def images(serialized, height=8):
    return tf.zeros([tf.size(serialized), height, 8, 1])

def labels(serialized):
    return tf.zeros([tf.size(serialized)], tf.int64)

def feature(serialized, spec):
    return tf.io.parse_example(serialized, {"label": spec})["label"]
"""


def checked(path: str, digits: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    recipe.config.data_dir = str(digits)
    preflight(recipe, str(tmp_path / "run"))


@dataclasses.dataclass(frozen=True)
class Mistake:
    """What is added to a complete config file, and what the message must say."""

    source: str
    said: tuple[str, ...]


MISTAKES = {
    "parse of one example": Mistake(
        """
        def parse(serialized):
            spec = {"label": tf.io.FixedLenFeature([], tf.int64)}
            example = tf.io.parse_single_example(serialized, spec)
            return example["label"], example["label"]
        """,
        ("parse(serialized)", "in parse: example = tf.io.parse_single", "use tf.io.parse_example,"),
    ),
    "parse that returns one thing": Mistake(
        "def parse(serialized): return images(serialized)",
        ("parse(serialized)", "must return", "(inputs, labels)", "float32(None, 8, 8, 1)"),
    ),
    "parse that returns a scalar": Mistake(
        "def parse(serialized): return images(serialized), tf.constant(1)",
        ("parse(serialized)", "must return labels", "int32()"),
    ),
    "parse that returns a sparse tensor": Mistake(
        """
        def parse(serialized):
            return {"a": feature(serialized, tf.io.VarLenFeature(tf.int64))}, labels(serialized)
        """,
        ("parse(serialized)", "inputs['a'] are a SparseTensor", "from_sparse(x).to_tensor(shape="),
    ),
    "parse that returns a ragged tensor": Mistake(
        """
        def parse(serialized):
            return images(serialized), feature(serialized, tf.io.RaggedFeature(tf.int64))
        """,
        ("parse(serialized)", "labels are a RaggedTensor", "x.to_tensor(shape=[None, 20])"),
    ),
    "parse without labels": Mistake(
        "def parse(serialized): return images(serialized), None",
        ("parse(serialized)", "labels are None"),
    ),
    "parse with a type that the records do not have": Mistake(
        """
        def parse(serialized):
            return images(serialized), feature(serialized, tf.io.FixedLenFeature([], tf.float32))
        """,
        ("'label'", "int64", "FixedLenFeature([], tf.int64)"),
    ),
    "error in build_model": Mistake(
        "def build_model(config): return keras.Sequential([keras.layers.Dense(config.width)])",
        ("build_model(config)", "no attribute 'width'", "mine.py, line 24, in build_model"),
    ),
    "model that is not returned": Mistake(
        "def build_model(config): pass", ("must return a keras.Model", "NoneType")
    ),
    "model without weights": Mistake(
        "def build_model(config): return keras.Sequential([keras.layers.Flatten()])",
        ("build_model(config)", "with weights to train"),
    ),
    "train_step of the model": Mistake(
        """
        class Own(keras.Model):
            def train_step(self, data): return {}
        def build_model(config): return Own()
        """,
        ("overrides train_step()", "loss(labels, outputs)", "build_learner"),
    ),
    "swapped arguments of the loss": Mistake(
        """
        def loss(outputs, labels):
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=outputs)
        """,
        (
            *("loss(labels, outputs) of", "ValueError", "in loss: return tf.nn.sparse"),
            *("labels: int64(8,)", "outputs: float32(8, 10)"),
        ),
    ),
    "other types without seeds": Mistake(
        """
        def parse(serialized, seeds):
            return images(serialized, 8 if seeds is None else 6), labels(serialized)
        """,
        ("same types with seeds", "float32(None, 6, 8, 1)", "float32(None, 8, 8, 1)"),
    ),
    "error with seeds": Mistake(
        """
        def parse(serialized, seeds):
            numbers = labels(serialized)
            return images(serialized), numbers if seeds is None else numbers + seeds
        """,
        ("parse(serialized, seeds)", "in parse: return images"),
    ),
    "error in augment": Mistake(
        "def augment(inputs, labels, seeds): return inputs + labels, labels",
        ("augment(inputs, labels, seeds)", "in augment: def augment(inputs, labels, seeds)"),
    ),
    "error in build_optimizer": Mistake(
        "def build_optimizer(config): return keras.optimizers.SGD(rate=1)",
        ("build_optimizer(config)", "rate", "in build_optimizer: "),
    ),
    "error in build_learner": Mistake(
        "def build_learner(config, **parts): return parts['nothing']",
        ("build_learner(config, **parts)", "KeyError: 'nothing'", "in build_learner"),
    ),
    "callback that is none": Mistake(
        "def build_callbacks(config): return ['stop']",
        ("build_callbacks(config)", "list of keras.callbacks.Callback", "'stop'"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_one_message_with_its_reason(
    mistake: Mistake, digits: Path, tmp_path: Path
) -> None:
    path = written(tmp_path, with_source(FUNCTIONS) + textwrap.dedent(mistake.source))
    with pytest.raises((ConfigError, ValueError)) as raised:
        checked(path, digits, tmp_path)
    assert type(raised.value).__module__.startswith(("trainer.", "data.")), raised.value
    for part in mistake.said:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def get_config(): ...", r"mine\.py defines no build_model\(\)"),
        ("def build_model(config): ...", r"mine\.py defines no get_config\(\)"),
        ("def build_model(config): ...\ndef get_config(): return {}", "returned dict, but must"),
        (
            "def get_config():\n    return 1 / 0\ndef build_model(config): ...",
            r"(?s)get_config\(\) of .*line 2, in get_config: return 1",
        ),
        ("import os\n\nSIZE = int('many')", r"ValueError: .*'many'\n.*line 3, .*: SIZE = int"),
        ("import no_such_thing", r"no_such_thing'\n.*line 1, .*: import no_such_thing"),
        ("def f(:", "line 1"),
    ],
)
def test_file_that_cannot_be_used_is_named_with_the_line(
    source: str, said: str, tmp_path: Path
) -> None:
    path = written(tmp_path, source)
    with pytest.raises(ConfigError, match=said) as error:
        load_recipe(path)
    assert path in str(error.value)


def test_line_of_a_library_of_another_environment_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "base/lib/python3/site-packages"
    written(library, "def size():\n    raise ValueError('too many')", "library_of_mine.py")
    monkeypatch.syspath_prepend(str(library))
    path = written(tmp_path, "import library_of_mine\n\nSIZE = library_of_mine.size()\n")
    with pytest.raises(ConfigError, match=r"too many\n.*mine.py, line 3, .*: SIZE = library"):
        load_recipe(path)


def test_tensor_at_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This process has tensors already: pretend that it has none before the import.
    answers = iter([False, True])
    monkeypatch.setattr("trainer.config_file.has_tensors", lambda: next(answers))
    path = written(tmp_path, COMPLETE + "\n    import tensorflow as tf\n    MEAN = tf.zeros([3])\n")
    with pytest.raises(ConfigError, match=r"creates a tensor when it is imported \(MEAN\)"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("place", "call"),
    [("at its top", "disable_v2_behavior"), ("in build_model", "disable_eager_execution")],
)
def test_config_file_that_switches_eager_execution_off_is_refused(
    place: str, call: str, tmp_path: Path
) -> None:
    off = f"import tensorflow as tf\n    tf.compat.v1.{call}()\n"
    content = f"{COMPLETE}\n    {off}"
    if place == "in build_model":
        content = "from configs.digits import build_model as shipped, get_config\n"
        content += f"def build_model(config):\n    model = shipped(config)\n    {off}"
        content += "    return model\n"
    path = written(tmp_path, content)
    # A process of its own: what this changes cannot be taken back.
    ended = run_python("-m", "trainer", "--strategy=mirrored", f"--config={path}", cwd=tmp_path)
    assert ended.returncode == 2
    assert "Delete tf.compat.v1.disable_eager_execution() or" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


FUTURE = """
    from __future__ import annotations
    import dataclasses
    from trainer.config import Config
    from {parent}neighbour_of_mine import WIDTH

    @dataclasses.dataclass
    class Mine(Config):
        width: int = WIDTH
        either: str | int = "x"
        several: tuple[int, ...] | float | None = None

    def get_config() -> Mine:
        return Mine()

    def wide() -> Mine:
        return Mine(width=99)

    def build_model(config: Mine):
        pass
"""


def test_file_may_import_its_neighbour_and_postpone_annotations(tmp_path: Path) -> None:
    written(tmp_path, "WIDTH = 7", "neighbour_of_mine.py")
    path = written(tmp_path, FUTURE.format(parent=""))
    recipe = load_recipe(path)
    assert recipe.config.width == 7  # type: ignore[attr-defined]
    types = {item.name: item.type for item in dataclasses.fields(recipe.config)}
    assert types["width"] is int
    with parsed([f"--config={path}", "--config.either=5", "--config.several=(1, 2)"]):
        config = read_recipe().config
        assert (config.either, config.several) == (5, (1, 2))  # type: ignore[attr-defined]
    assert load_recipe(f"{path}:wide").config.width == 99  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"mine.py:large defines no large\(\)"):
        load_recipe(f"{path}:large")
    assert [Path(file).name for file in recipe.files] == ["mine.py", "neighbour_of_mine.py"]


@pytest.mark.slow
def test_neighbour_may_describe_metrics_of_keras(tmp_path: Path) -> None:
    written(tmp_path, "import keras\nmetrics = [keras.metrics.AUC()]", "neighbour_of_mine.py")
    path = written(tmp_path, COMPLETE + "\n    from neighbour_of_mine import metrics\n")
    # A launcher that has not imported Keras yet.
    program = f"from trainer.config import load_recipe; print(load_recipe({path!r}).metrics)"
    assert "AUC" in run_python("-c", program, check=True).stdout


def hash_of_files(recipe: Recipe) -> str:
    return shared_settings(recipe, AS_COMPUTED)["config file"]


def test_equal_config_files_at_two_paths_are_the_same_to_other_tasks(tmp_path: Path) -> None:
    names = ("a.py", "deeper/b.py")
    one, same = (load_recipe(written(tmp_path, COMPLETE, name)) for name in names)
    other = load_recipe(written(tmp_path, f"{COMPLETE}\n    # Other.", "c.py"))
    assert hash_of_files(one) == hash_of_files(same) != hash_of_files(other)


@pytest.mark.parametrize(
    ("name", "value"),
    [("communication", "ring"), ("wire_dtype", "half"), ("read_dtype", "half"), ("bucket_mb", 1.0)],
)
def test_tasks_compare_how_tensors_are_sent(name: str, value: Any, tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, COMPLETE))
    ours = shared_settings(recipe, AS_COMPUTED)
    theirs = shared_settings(recipe, dataclasses.replace(AS_COMPUTED, **{name: value}))
    assert [each for each in ours if ours[each] != theirs[each]] == [f"--{name}"]


def test_tasks_compare_the_neighbours_too(tmp_path: Path) -> None:
    def recipe_with(width: int) -> Recipe:
        directory = tmp_path / str(width)
        written(directory, f"WIDTH = {width}", f"neighbour_{width}.py")
        source = f"from neighbour_{width} import WIDTH\n{textwrap.dedent(COMPLETE)}"
        return load_recipe(written(directory, source))

    def hash_with(*files: str) -> str:
        return hash_of_files(dataclasses.replace(recipe, files=files))

    recipe = recipe_with(7)
    own, neighbour = recipe.files
    ours = hash_of_files(recipe)
    assert ours not in (hash_of_files(recipe_with(8)), hash_with(own))
    package = written(tmp_path, '"""A package."""\n', "package/__init__.py")
    assert hash_with(own, neighbour, package) == ours
    written(tmp_path, "rate = 1\n", "package/__init__.py")
    assert hash_with(own, neighbour, package) != ours


def test_file_in_a_package_may_import_relatively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "", "package_of_mine/__init__.py")
    written(tmp_path, "WIDTH = 5", "package_of_mine/neighbour_of_mine.py")
    path = written(tmp_path, FUTURE.format(parent="."), "package_of_mine/mine.py")
    assert load_recipe(path).config.width == 5  # type: ignore[attr-defined]
    monkeypatch.chdir(tmp_path)
    assert load_recipe("package_of_mine.mine:wide").config.width == 99  # type: ignore[attr-defined]
    # For `trainer.predict`, which may run in another directory.
    assert absolute("package_of_mine.mine:wide") == f"{path}:wide"


# The files of a project, what --config names, and what a message must say.
PROJECTS = {
    "package configs": (
        {"configs/__init__.py": "", "configs/base.py": "A = 1"},
        "configs/mine.py",
        "from .base import A; import configs.base; from configs.digits import build_model as b",
    ),
    "package configs by name": (
        {"configs/__init__.py": "", "configs/base.py": "A = 1"},
        "configs.mine",
        "from .base import A; import configs.base",
    ),
    "directory in a package by name": (
        {"pkg_of_mine/__init__.py": "", "pkg_of_mine/sub/other.py": "A = 1"},
        "pkg_of_mine.sub.mine",
        "from .other import A",
    ),
    "beside package configs": (
        {"configs/__init__.py": "A = 1", "configs/base.py": ""},
        "mine.py",
        "from configs import A; import configs.base",
    ),
    "directory configs": (
        {"configs/base.py": "A = 1"},
        "configs/mine.py",
        "from base import A; from configs.base import A; from configs.digits import build_model",
    ),
    "shipped config": (
        {"configs/__init__.py": "", "configs/dlrm.py": "raise ValueError"},
        "configs/criteo_x1.py",
        "",
    ),
    "package data": (
        {"data/__init__.py": "", "strategies/__init__.py": "", "data/loader.py": "A = 1"},
        "data/mine.py",
        "from .loader import A; import data.order",
    ),
    "package data by name": (
        {"data/__init__.py": "", "data/loader.py": "A = 1"},
        "data.mine",
        "from .loader import A",
    ),
    "beside package data": ({"data/__init__.py": "", "strategies.py": ""}, "mine.py", ""),
}
COMMANDS = {
    "module": (sys.executable, "-m", "trainer"),
    "script": (str(Path(sys.executable).with_name("tf-distribution-trainer")),),
}


def loaded(
    command: str, files: dict[str, str], config: str, imports: str, directory: Path
) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        written(directory, text, name)
    if "criteo" not in config:
        name = config.removesuffix(".py").replace(".", "/")
        written(directory, f"{imports}\n{textwrap.dedent(COMPLETE)}", f"{name}.py")
    return subprocess.run(
        # It loads the config, and needs no TensorFlow.
        [*COMMANDS[command], "--completion=bash", f"--config={config}"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("project", PROJECTS.values(), ids=PROJECTS)
def test_packages_of_a_user_may_have_the_names_of_ours(
    project: tuple[dict[str, str], str, str], command: str, tmp_path: Path
) -> None:
    done = loaded(command, *project, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--config.batch_size" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "imports", ["from data.loader import A", "from data import A", "import data; data.A"]
)
def test_package_that_ours_hides_is_named(imports: str, command: str, tmp_path: Path) -> None:
    files = {"data/__init__.py": "A = 1", "data/loader.py": "A = 1"}
    done = loaded(command, files, "mine.py", imports, tmp_path)
    assert done.returncode == 2, done.stdout
    assert f"hides {tmp_path}/data. Rename {tmp_path}/data" in done.stderr
    assert "Traceback" not in done.stderr


def test_package_trainer_of_a_user_does_not_hide_ours_from_the_script(tmp_path: Path) -> None:
    done = loaded("script", {"trainer/__init__.py": "raise ValueError"}, "mine.py", "", tmp_path)
    assert done.returncode == 0, done.stderr


def test_file_is_executed_once(tmp_path: Path) -> None:
    # The second execution would fail.
    log = str(tmp_path / "log")
    path = written(tmp_path, COMPLETE + f"\n    import os\n    os.mkdir({log!r})\n")
    for _ in range(2):
        assert isinstance(load_recipe(path).config, Config)


@pytest.mark.parametrize("name", ["no_such_module", "no_such.module", "no_such.py"])
def test_missing_module_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--config={name}: there is no such .*Shipped: .*digits"):
        load_recipe(name)
