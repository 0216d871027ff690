"""Parsing of command-line flags: help ends with exit code 0, a mistake with one message and 2."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from absl import flags

from data.system.errors import UsageError
from data.system.files import expanded

_HOME = re.compile(r"(--?[\w.]+=|)(~/.*)", re.DOTALL)
_HELP = ("help", "h", "?", "helpshort", "helpfull", "helpxml")


def show_help(
    argv: Sequence[str], more: Callable[[], str] = str, short: Callable[[], str] | None = None
) -> None:
    """Prints the help and `more()`, or the version, and exits with 0 if `argv` asks for it.

    If there is a `short` help, only --helpfull and --helpxml print the complete one. absl itself
    would exit with 1 after the help.
    """
    for argument in argv[1:]:
        name = argument.lstrip("-")
        if argument == "--version":
            from data.system.version import describe_version

            print(describe_version())
            sys.exit(0)
        if argument.startswith("-") and name in _HELP:
            if short is not None and name not in ("helpfull", "helpxml"):
                print(short())
                sys.exit(0)
            with contextlib.suppress(SystemExit):
                flags.FLAGS([argv[0], "--help" if name == "h" else argument])
            if name != "helpxml" and (text := more()):
                print(text)
            sys.exit(0)


def check_utf8(argv: Sequence[str]) -> None:
    """Raises UsageError if a word, or the current directory, has bytes that are not UTF-8.

    TensorFlow takes no such path, and Python prints none.
    """
    words = dict.fromkeys(argv, "Write it in UTF-8, or rename the file or directory.")
    with contextlib.suppress(OSError):  # The current directory was deleted.
        words[os.getcwd()] = "It is the current directory: rename it, or start in another one."
    for word, remedy in words.items():
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{os.fsencode(word)!r} is not UTF-8. {remedy}") from None


def with_home(argv: Sequence[str]) -> list[str]:
    """`argv` with the home directory in place of `~` in values that begin with `~/`.

    A shell does not replace it in `--model_dir=~/run`, and other programs start this one without
    a shell. A directory of that name is `./~`.
    """
    found = (_HOME.fullmatch(word) for word in argv)
    return [
        f"{match[1]}{expanded(match[2])}" if match else word
        for word, match in zip(argv, found, strict=True)
    ]


def parse_flags(
    program: str, renamed: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Sequence[str]], list[str]]:
    """A `flags_parser` for absl.app.run. Each message begins with `program`.

    `renamed`: former name of a flag -> its name today, for the message about the former name.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        show_help(argv)
        try:
            check_utf8(argv)
            return flags.FLAGS(with_home(argv))  # type: ignore[no-any-return]
        except flags.Error as error:
            message = f"{error}. --help lists the flags"
            if isinstance(error, flags.UnrecognizedFlagError) and error.flagname in renamed:
                message = f"--{error.flagname} has a new name: write --{renamed[error.flagname]}"
        except UsageError as error:
            message = str(error).rstrip(".")
        print(f"{program}: {message}.", file=sys.stderr)
        sys.exit(2)

    return parse
