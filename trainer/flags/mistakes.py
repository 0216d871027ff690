"""Messages about mistyped flags and values: what was received, what is needed, what to type.

message = unknown_flag("log_every_steps", known_flags, config)
message = wrong_value(str(error), values, parsers)
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from absl.flags import ArgumentParser, EnumParser, FloatParser, IntegerParser

from trainer.config import Config, flatten

# A message of absl: "flag --batch_size=abc: invalid literal for int() with base 10: 'abc'".
_ILLEGAL = re.compile(r"flag --(?P<name>[\w.]+)=(?P<value>.*?): (?P<reason>.*)", re.DOTALL)
_NEEDED = {int: "a whole number", float: "a number", bool: "true or false"}
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
# The names of flags in other programs and in former versions, and the flags or fields of today.
_SYNONYMS = {
    "bind_cores": "cpu_affinity",
    "lr": "learning_rate",
    "bs": "batch_size",
    "steps": "train_steps",
    "max_steps": "train_steps",
    "num_epochs": "epochs",
    "gpus": "num_gpus",
    "logdir": "model_dir",
    "output_dir": "model_dir",
    "resume": "model_dir",
    "amp": "config.precision",
    "fp16": "config.precision",
    "wd": "config.weight_decay.rate",
    "local_steps": "config.local_steps.every",
}


def unknown_flag(name: str, known: Iterable[str], config: Config) -> str:
    """Returns the message about a flag that does not exist, with the nearest flag or field."""
    if synonym := _SYNONYMS.get(name):
        return f"There is no flag --{name}. Did you mean --{synonym}?"
    fields = list(flatten(config))
    # A field, or the last part of its name: --log_every_steps, --lanes.
    found = [field for field in fields if name in (field, field.rpartition(".")[2])]
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=0.6)
    if not found and not near:
        found = difflib.get_close_matches(name, fields, n=1, cutoff=0.7)
    meant = f"--config.{found[0]}" if found else f"--{near[0]}" if near else ""
    hint = f"Did you mean {meant}?" if meant else "--help lists all."
    return f"There is no flag --{name}. {hint}"


def wrong_value(
    message: str, values: Mapping[str, object], parsers: Mapping[str, ArgumentParser]
) -> str:
    """Rewrites absl's message about a value of a wrong type or out of range in plain words.

    Returns other messages as they are. `values` has an example of a right value for each flag.
    """
    matched = _ILLEGAL.fullmatch(message)
    if matched is None:
        return message
    name, came, parser = matched["name"], matched["value"], parsers.get(matched["name"])
    if isinstance(parser, EnumParser):
        return _wrong_choice(name, came, parser.enum_values)
    if parser and message.endswith(f" is not {parser.syntactic_help}"):
        return _out_of_range(name, came, parser)
    example = values.get(name)
    needed = _NEEDED.get(type(example))
    if needed is None:
        return message
    meant = _meant(came, type(example))
    hint = f"{example}, for example." if meant is None else f"{meant}."
    return f"--{name} must be {needed}. Received: {came!r}. Type --{name}={hint}"


def _out_of_range(name: str, came: str, parser: IntegerParser | FloatParser) -> str:
    kind = _NEEDED[int if isinstance(parser, IntegerParser) else float]
    low, high = parser.lower_bound, parser.upper_bound
    needed = f"of {low:g} or more" if high is None else f"from {low:g} to {high:g}"
    nearest = low if high is None or parser.convert(came) < high else high
    hint = f"Type --{name}={nearest:g}, for example."
    return f"--{name} must be {kind} {needed}. Received: {came!r}. {hint}"


def _wrong_choice(name: str, came: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(came, names, n=1, cutoff=0.5)
    near = near or [known for known in names if came and known.startswith(came)]
    type_this = f"--{name}={(near or names)[0]}"
    hint = f"Did you mean {type_this}?" if near else f"Type {type_this}, for example."
    return f"--{name} must be {', '.join(names[:-1])} or {names[-1]}. Received: {came!r}. {hint}"


def _meant(came: str, kind: type) -> object:
    """The number that `came` probably means: 10000 for "1e4", 1.5 for "1,5"; None if unclear."""
    text = came.replace(",", "") if _THOUSANDS.fullmatch(came) else came.replace(",", ".")
    try:
        number = float(text)
    except ValueError:
        return None
    if kind is float:
        return number
    return int(number) if kind is int and number.is_integer() else None
