"""Keyword arguments as words of a command line, and a Config object as a config file.

    with recipe_named(Config(), {"build_model": build_model}) as target:
        words, values = words_and_values({"train_steps": 200, "data": {"lanes": 8}}, Config())
        with parsed([f"--config={target}", *words], values):
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


def words_and_values(
    arguments: Mapping[str, object], config: object
) -> tuple[list[str], dict[str, object]]:
    """Returns `arguments` as words of a command line, and values of fields that no text means.

    These values are None, and lists for fields that are lists. None is not given to a flag, a group
    and a field whose type has no None: functions that call train() pass it on. A name that is
    neither a flag nor a field of `config` becomes a flag: the parser says what was meant.
    """
    fields = flatten(config)
    words: list[str] = []
    values: dict[str, object] = {}
    for name, value in _members(arguments, fields):
        field = name.removeprefix("config.")
        is_flag = field == name and name in absl_flags.FLAGS
        is_field = field in fields and not is_flag
        is_list = isinstance(value, list) and isinstance(fields.get(field), list)
        if value is None and (is_flag or _is_group(field, fields)):
            continue
        if value is None and field in fields and not _takes_none(config, field):
            continue
        if is_field and (value is None or is_list):
            values[field] = value
        else:
            words.append(f"--{'config.' + field if is_field else name}={_text(value)}")
    return words, values


def _members(
    arguments: Mapping[str, object], fields: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """Each argument; of a group, such as data={"lanes": 8}, each member: config.data.lanes."""
    for name, value in arguments.items():
        field = name.removeprefix("config.")
        if isinstance(value, Mapping) and _is_group(field, fields):
            members = {f"config.{field}.{key}": item for key, item in value.items()}
            yield from _members(members, fields)
        else:
            yield name, value


def _is_group(name: str, fields: Mapping[str, object]) -> bool:
    return name not in fields and any(field.startswith(f"{name}.") for field in fields)


def _takes_none(config: object, name: str) -> bool:
    """Returns True if None is a value of the field `name`: by its type, or by its value now."""
    *groups, last = name.split(".")
    owner = functools.reduce(getattr, groups, config)
    declared = get_type_hints(type(owner))[last]
    types = (declared, *get_args(declared))
    return getattr(owner, last) is None or any(t in (Any, object, type(None)) for t in types)


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
