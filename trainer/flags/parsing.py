"""Parses a command line: the flags and the fields of the config; explains what was mistyped.

FLAGS(parse(sys.argv))              # prints a mistake, and exits with 2
parse_words(["trainer", "--strategy=ps"])
message = unknown_flag("log_every_steps", known_flags, config)
message = wrong_value(str(error), values, parsers)
"""

import difflib
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import absl.flags

from data.system.errors import UsageError
from data.system.flags import check_utf8, show_help, with_home
from trainer import flags
from trainer.exit_codes import EXIT_USAGE
from trainer.flags import FLAGS
from trainer.flags.config_help import completion_script, describe_fields, describe_flags

if TYPE_CHECKING:
    from trainer.config import Config

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


def parse(argv: Sequence[str]) -> list[str]:
    """Parses the command line, or ends with one message and exit code 2."""
    synopsis = sys.modules["__main__"].__doc__ or ""
    show_help(argv, _describe_fields, short=lambda: describe_flags(synopsis))
    try:
        return parse_words(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def parse_words(argv: Sequence[str], given: Mapping[str, object] | None = None) -> list[str]:
    """Parses the words of a command line. Raises a UsageError for the first mistake.

    `given` has fields of the config that are given as objects.
    """
    from trainer.config import ConfigError, load_recipe
    from trainer.flags.continued import settings_of_run

    check_utf8(argv)
    try:
        argv = [argv[0], *FLAGS.read_flags_from_files(argv[1:], force_gnu=False)]  # --flagfile.
    except absl.flags.Error as error:
        raise ConfigError(f"--flagfile cannot be read: {error}") from None
    argv = with_home(argv)
    paths, others = _split_config(argv)
    if len(paths) > 1:
        raise ConfigError(f"--config is given {len(paths)} times: {', '.join(paths)}. Leave one.")
    path, fields = paths[0] if paths else flags.DEFAULT_CONFIG, {}
    if not paths and (settings := settings_of_run(argv)):
        path, fields = settings.config, settings.fields
        others = [*settings.flags, *others]
    FLAGS["config"].parser.fields = {**fields, **(given or {})}
    # The tasks of a cluster on this machine get the command line of their launcher, and read the
    # settings of the run as it does. ml_collections needs --config before its fields.
    sys.argv[1:] = [*(f"--config={path}" for path in paths), *others]
    argv = [argv[0], f"--config={path}", *others]
    config = load_recipe(path).config
    try:
        rest: list[str] = FLAGS(argv)
        if flags.COMPLETION.value is not None:
            print(completion_script(flags.COMPLETION.value, config))
            sys.exit(0)
        _check_finite()
        return rest
    except (AttributeError, LookupError, TypeError, ValueError, absl.flags.Error) as error:
        message = "" if isinstance(error, UsageError) else _explained(argv, config, error)
        if not message:
            raise
    raise ConfigError(message)


def _check_finite() -> None:
    """Raises ConfigError for a flag that is infinite or not a number: no bound excludes NaN."""
    from trainer.config import ConfigError

    for flag in FLAGS.get_flags_for_module(flags):
        if isinstance(flag.value, float) and not math.isfinite(flag.value):
            advice = f"Type --{flag.name}={flag.default:g}" if flag.default else "Leave it out"
            raise ConfigError(f"--{flag.name}={flag.value} must be a finite number. {advice}.")


def _describe_fields() -> str:
    from trainer.config import Config

    return describe_fields(Config())


def _split_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of --config in a command line, and its other words."""
    paths, others = [], []
    words = iter(argv[1:])
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("--config", "-config"):
            paths.append(value if equals else next(words, ""))
        else:
            others.append(word)
    return paths, others


def _explained(argv: Sequence[str], config: "Config", error: Exception) -> str:
    """Returns what is wrong with a command line that raised `error`; "" if that is not known."""
    from trainer.config import explain_unknown_field, flatten

    if isinstance(error, absl.flags.UnrecognizedFlagError):
        return unknown_flag(error.flagname, [flag.name for flag in flags.own_flags()], config)
    known = flatten(config)
    for argument in argv:
        override = argument.lstrip("-").partition("=")[0]
        if override.startswith("config.") and override.removeprefix("config.") not in known:
            return explain_unknown_field(override.removeprefix("config."), config)
    # ml_collections raises other errors for a part of a field that has no parts.
    if not isinstance(error, (AttributeError, KeyError, absl.flags.Error)):
        return ""
    values = {name: FLAGS[name].default for name in FLAGS}
    values |= {name: known[name] for name in flags.SHORTCUTS} | {"epochs": 10.0}
    values |= {f"config.{name}": value for name, value in known.items()}
    return wrong_value(str(error), values, {name: FLAGS[name].parser for name in FLAGS})


def unknown_flag(name: str, known: Iterable[str], config: "Config") -> str:
    """Returns the message about a flag that does not exist, with the nearest flag or field."""
    from trainer.config import flatten

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
    message: str, values: Mapping[str, object], parsers: Mapping[str, absl.flags.ArgumentParser]
) -> str:
    """Rewrites absl's message about a value of a wrong type or out of range in plain words.

    Returns other messages as they are. `values` has an example of a right value for each flag.
    """
    matched = _ILLEGAL.fullmatch(message)
    if matched is None:
        return message
    name, came, parser = matched["name"], matched["value"], parsers.get(matched["name"])
    if isinstance(parser, absl.flags.EnumParser):
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


def _out_of_range(
    name: str, came: str, parser: absl.flags.IntegerParser | absl.flags.FloatParser
) -> str:
    kind = _NEEDED[int if isinstance(parser, absl.flags.IntegerParser) else float]
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
