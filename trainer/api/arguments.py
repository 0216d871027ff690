"""Keyword arguments as words of a command line, and a Config object as a config file.

    with recipe_named(Config(), {"build_model": build_model}) as target:
        words = words_of({"train_steps": 200, "data": {"lanes": 8}}, flatten(Config()))
        with parsed([f"--config={target}", *words]):
            recipe = read_recipe()

So the arguments have the checks of the command line, and its messages.
"""

import contextlib
import copy
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, get_args, get_type_hints

from absl import flags as absl_flags
from absl.testing import flagsaver

from data.system.errors import UsageError
from trainer.config import PYTHON_CONFIG, Config, Recipe, flatten

# The functions that a config file may define.
FUNCTIONS = tuple(field.name for field in dataclasses.fields(Recipe)[2:-2])
_INSTEAD = {
    "config": "give the config as the first argument: trainer.train('configs/digits.py')",
    "check": "it checks and ends; type it in a terminal: python -m trainer --check",
    "download_only": "it trains nothing; type it in a terminal: python -m trainer --download_only",
    "keep_serving": "it serves without end; type it in a terminal",
    "traceback": "errors of train() have their traceback",
}


def split_arguments(
    arguments: Mapping[str, object],
) -> tuple[dict[str, object], dict[str, object]]:
    """Returns the functions of a config among `arguments`, and the other arguments.

    Raises UsageError for an argument that is only for the command line.
    """
    for name, instead in _INSTEAD.items():
        if arguments.get(name) is not None:
            raise UsageError(f"train() takes no {name}: {instead}.")
    functions = {n: v for n, v in arguments.items() if n in FUNCTIONS and v is not None}
    return functions, {name: v for name, v in arguments.items() if name not in FUNCTIONS}


def without_none(arguments: Mapping[str, object], config: object) -> dict[str, object]:
    """Returns `arguments` without those that are None, and so not given.

    Functions that call train() pass None on. It is a value for a field of `config` whose type has
    None. Names that are not of `config` stay.
    """
    fields = flatten(config)
    given: dict[str, object] = {}
    for name, value in arguments.items():
        field = name.removeprefix("config.")
        is_group = field not in fields and any(each.startswith(f"{field}.") for each in fields)
        if value is None and (is_group or (field in fields and not _takes_none(config, field))):
            continue
        if is_group and isinstance(value, Mapping):
            value = without_none(value, functools.reduce(getattr, field.split("."), config))
        given[name] = value
    return given


def _takes_none(config: object, name: str) -> bool:
    """Returns True if None is a value of the field `name`: by its type, or by its value now."""
    *groups, last = name.split(".")
    owner = functools.reduce(getattr, groups, config)
    declared = get_type_hints(type(owner))[last]
    types = (declared, *get_args(declared))
    return getattr(owner, last) is None or any(t in (Any, object, type(None)) for t in types)


def words_of(arguments: Mapping[str, object], fields: Mapping[str, object]) -> list[str]:
    """Returns `arguments` as words of a command line; `fields` are those of the config.

    A name that is neither a flag nor a field becomes a flag: the parser says what was meant.
    """
    words = []
    for name, value in arguments.items():
        if value is None and name in absl_flags.FLAGS:  # As a flag that is not typed.
            continue
        is_flag = name in absl_flags.FLAGS or name.startswith("config.")
        is_group = name not in fields and any(field.startswith(f"{name}.") for field in fields)
        if isinstance(value, Mapping) and is_group and not is_flag:
            group = {f"config.{name}.{key}": item for key, item in value.items()}
            words += words_of(group, fields)
        else:
            is_field = name in fields and not is_flag
            words.append(f"--{'config.' if is_field else ''}{name}={_text(value)}")
    return words


def split_fields(
    arguments: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, object]]:
    """Returns the values of fields that no text on a command line means, and the other arguments.

    They are None and lists of fields that are lists. The names are those of `fields`.
    """
    values: dict[str, object] = {}
    others: dict[str, object] = {}
    for name, value in arguments.items():
        is_none = value is None and name in fields and name not in absl_flags.FLAGS
        if is_none or (isinstance(value, list) and isinstance(fields.get(name), list)):
            values[name] = value
        elif isinstance(value, Mapping) and name not in fields:
            group = {f"{name}.{key}": item for key, item in value.items()}
            found, _ = split_fields(group, fields)
            values |= found
            others[name] = {key: v for key, v in value.items() if f"{name}.{key}" not in found}
        else:
            others[name] = value
    return values, others


def _text(value: object) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)


@contextlib.contextmanager
def parsed(words: Sequence[str], fields: Mapping[str, object] | None = None) -> Iterator[None]:
    """Gives the flags the values of `words`, and the config `fields`, while the context is open.

    Raises ConfigError as the command line does.
    """
    from trainer import flags
    from trainer.flags.parsing import parse_words

    argv, was_parsed = sys.argv, flags.FLAGS.is_parsed()
    saved = flagsaver.save_flag_values(flags.FLAGS)
    # The parser of --config reads sys.argv.
    sys.argv = ["trainer", *words]
    try:
        for flag in flags.FLAGS.flags_by_module_dict()[flags.__name__]:
            flag.unparse()
        parse_words(sys.argv, fields)
        yield
    finally:
        sys.argv = argv
        flagsaver.restore_flag_values(saved, flags.FLAGS)
        # Not unparse_flags(), which logs, and sets the flags of the user's program too.
        vars(flags.FLAGS)["__flags_parsed"] = was_parsed


@contextlib.contextmanager
def recipe_named(config: Config, functions: Mapping[str, object]) -> Iterator[str]:
    """Gives the name for `--config` while the context is open: a module without a file."""
    module = ModuleType(PYTHON_CONFIG)
    vars(module).update(functions)
    # A copy each time: the flags set its fields, and the caller's object stays as it is.
    vars(module)["get_config"] = lambda: copy.deepcopy(config)
    sys.modules[PYTHON_CONFIG] = module
    try:
        yield PYTHON_CONFIG
    finally:
        del sys.modules[PYTHON_CONFIG]
