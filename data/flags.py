"""Command-line flags of the small programs, whose mistakes end with one message and exit code 2."""

import sys
from collections.abc import Callable, Sequence

from absl import flags


def parse_flags(program: str) -> Callable[[Sequence[str]], list[str]]:
    """A `flags_parser` for absl.app.run; `program` begins its message."""

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return flags.FLAGS(argv)  # type: ignore[no-any-return]
        except flags.Error as error:
            print(f"{program}: {error}. --help lists the flags.", file=sys.stderr)
            sys.exit(2)

    return parse
