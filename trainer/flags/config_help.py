"""The part of --help about the config: each field with its default and its description.

    print(describe_fields(Config()))

The descriptions are those of the docstrings.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

_ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n[ ]{4,}.*)*)", re.MULTILINE)
_WIDTH = 80


def describe_fields(config: object) -> str:
    """A line for each field, with its default, and its description below it."""
    lines = ["fields of the config (the defaults are those of trainer/config.py):"]
    for name, default, text in _fields(config, ""):
        shown = "" if default in ("", (), {}) else default
        lines.append(f"  --config.{name}={shown}")
        lines += textwrap.wrap(text, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return "\n".join(lines)


def _attributes(kind: type) -> str:
    _, _, attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    return attributes


def _fields(group: Any, prefix: str) -> Iterator[tuple[str, object, str]]:  # Any: a dataclass.
    texts = {
        name: " ".join(found["text"].split())
        for kind in reversed(type(group).__mro__)
        for found in _ENTRY.finditer(textwrap.dedent(_attributes(kind)))
        for name in found["names"].split(", ")
    }
    for item in dataclasses.fields(group):
        value = getattr(group, item.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value, texts.get(item.name, "")
