"""Parses a command line: the flags and the fields of the config.

FLAGS(parse(sys.argv))              # prints a mistake, and exits with 2
parse_words(["trainer", "--strategy=ps"])
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl.flags import Error, UnrecognizedFlagError

from data.system.errors import UsageError
from data.system.flags import check_utf8, show_help
from trainer import flags
from trainer.exit_codes import EXIT_USAGE
from trainer.flags import FLAGS

if TYPE_CHECKING:
    from trainer.config import Config


def parse(argv: Sequence[str]) -> list[str]:
    """Parses the command line, or ends with one message and exit code 2."""
    show_help(argv, _describe_fields, short=_describe_flags)
    try:
        return parse_words(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def parse_words(argv: Sequence[str]) -> list[str]:
    """Parses the words of a command line. Raises a UsageError for the first mistake."""
    from trainer.config import ConfigError, load_recipe
    from trainer.flags.continued import with_settings_of_run

    check_utf8(argv)
    paths, others = _split_config(argv)
    if len(paths) > 1:
        raise ConfigError(f"--config is given {len(paths)} times: {', '.join(paths)}. Leave one.")
    if not paths:
        local = (flags.LOCAL, flags.LOCAL_OR_HOSTS)
        local_flags = [name for name, scope in flags.SCOPES.items() if scope.where in local]
        argv = with_settings_of_run(argv, local_flags)
        paths, others = _split_config(argv)
    # The tasks of a cluster on this machine get the command line of their launcher. ml_collections
    # reads it, too, and needs --config before its fields.
    sys.argv[1:] = [*(f"--config={path}" for path in paths), *others]
    path = paths[0] if paths else flags.DEFAULT_CONFIG
    argv = [argv[0], f"--config={path}", *others]
    config = load_recipe(path).config
    try:
        rest: list[str] = FLAGS(argv)
        if flags.COMPLETION.value is not None:
            from trainer.flags.completion import completion_script

            print(completion_script(flags.COMPLETION.value, config))
            sys.exit(0)
        return rest
    except UnrecognizedFlagError as error:
        from trainer.flags.mistakes import unknown_flag

        known = [flag.name for flag in flags.own_flags()]
        message = unknown_flag(error.flagname, known, config)
    except (AttributeError, KeyError, Error) as error:
        message = _explain_flag_error(argv, config, error)
    except (LookupError, TypeError, ValueError) as error:
        # ml_collections raises them for a part of a field that has no parts.
        message = _explain_unknown(argv, config)
        if isinstance(error, UsageError) or not message:
            raise
    raise ConfigError(message)


def _describe_flags() -> str:
    from trainer.flags.config_help import describe_flags

    return describe_flags(sys.modules["__main__"].__doc__ or "")


def _describe_fields() -> str:
    from trainer.config import Config
    from trainer.flags.config_help import describe_fields

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


def _explain_unknown(argv: Sequence[str], config: "Config") -> str:
    """Returns a message about the first unknown field in a command line; "" if there is none."""
    from trainer.config import explain_unknown_field, flatten

    known = flatten(config)
    for argument in argv:
        override = argument.lstrip("-").partition("=")[0]
        if override.startswith("config.") and override.removeprefix("config.") not in known:
            return explain_unknown_field(override.removeprefix("config."), config)
    return ""


def _explain_flag_error(argv: Sequence[str], config: "Config", error: Exception) -> str:
    from trainer.config import flatten
    from trainer.flags.mistakes import wrong_value

    if unknown := _explain_unknown(argv, config):
        return unknown
    known = flatten(config)
    values = {name: FLAGS[name].default for name in FLAGS}
    values |= {name: known[name] for name in flags.SHORTCUTS} | {"epochs": 10.0}
    values |= {f"config.{name}": value for name, value in known.items()}
    return wrong_value(str(error), values, {name: FLAGS[name].parser for name in FLAGS})
