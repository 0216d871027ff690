"""--help: the flags in groups. --helpfull: also the config, each field with its description.

    print(describe_flags(__doc__))
    print(describe_fields(Config()))

The descriptions of fields are those of the docstrings.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from absl import flags

from trainer.flags import DEFINED, FLAGS, SCOPES, own_flags

MOST_USED = (
    "config",
    "strategy",
    "model_dir",
    "data_dir",
    "batch_size",
    "learning_rate",
    "train_steps",
    "workers",
)
_START = {"check", "completion", "data_cache_bytes", "data_cache_dir", "download_only", "epochs"}
_START |= {"plain", "quiet", "traceback", "verbose"}
_CONFIG = """\
config:
  --config.FIELD=VALUE sets any field, for example --config.clip.global_norm=1.
  --helpfull describes all fields, and all flags in full."""
_ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n[ ]{4,}.*)*)", re.MULTILINE)
_WIDTH, _TEXT_COLUMN = 80, 22


def describe_flags(usage: str) -> str:
    """Returns `usage`, and the first sentence about each flag of the program, in groups."""
    own = [flag.name for flag in own_flags()]
    lines = [usage.strip()]
    for group in ("used most", "start", "run", "cluster", "parameter servers", "this command"):
        names = [name for name in own if _group_of(name) == group]
        lines += ["", f"{group}:"] if names else []
        for name in MOST_USED if group == "used most" else names:
            lines += _described(FLAGS[name])
    return "\n".join([*lines, "", _CONFIG])


def _described(flag: flags.Flag) -> Iterator[str]:
    """The name, the choices if there are some, and the first sentence about the flag."""
    sentence = (flag.help or "").partition(". ")[0].removesuffix(".")
    word = f"  --{flag.name}" + ("" if flag.boolean else "=")
    if isinstance(flag, flags.EnumFlag):
        choices, _, sentence = sentence.partition(": ")
        word += choices.strip("<>")
    if len(word) >= _TEXT_COLUMN:
        yield word
        word = ""
    yield from textwrap.wrap(
        f"{word:{_TEXT_COLUMN}}{sentence}", _WIDTH, subsequent_indent=" " * _TEXT_COLUMN
    )


def _group_of(name: str) -> str:
    if name in MOST_USED:
        return "used most"
    if name not in DEFINED:
        return "this command"
    strategies = SCOPES[name].strategies if name in SCOPES else ()
    if strategies == ("ps",):
        return "parameter servers"
    if "multiworker" in strategies:
        return "cluster"
    return "start" if name in _START else "run"


def describe_fields(config: object) -> str:
    """Returns a line for each field, with its default, and its description below it."""
    lines = ["fields of the config (the defaults are those of trainer/config.py):"]
    for name, default, text in _fields(config, ""):
        shown = "" if default in ("", (), {}) else default
        lines.append(f"  --config.{name}={shown}")
        lines += textwrap.wrap(text, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return "\n".join(lines)


def _fields(group: Any, prefix: str) -> Iterator[tuple[str, object, str]]:  # Any: a dataclass.
    """The name, the default and the description of each field, also of nested groups."""
    texts = {}
    for kind in reversed(type(group).__mro__):
        attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
        for found in _ENTRY.finditer(textwrap.dedent(attributes)):
            text = " ".join(found["text"].split())
            texts.update(dict.fromkeys(found["names"].split(", "), text))
    for item in dataclasses.fields(group):
        value = getattr(group, item.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value, texts.get(item.name, "")
