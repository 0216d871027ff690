"""Parsing of command-line flags where a mistake ends with one message and exit code 2."""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from absl import flags


def parse_flags(
    program: str, renamed: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Sequence[str]], list[str]]:
    """A `flags_parser` for absl.app.run. Each message begins with `program`.

    `renamed`: former name of a flag -> its name today, for the message about the former name.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return flags.FLAGS(argv)  # type: ignore[no-any-return]
        except flags.Error as error:
            message = f"{error}. --help lists the flags"
            if isinstance(error, flags.UnrecognizedFlagError) and error.flagname in renamed:
                message = f"--{error.flagname} has a new name: write --{renamed[error.flagname]}"
        print(f"{program}: {message}.", file=sys.stderr)
        sys.exit(2)

    return parse
