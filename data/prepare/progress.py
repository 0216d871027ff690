"""Shows how far a long read or write has come.

with progress("people.csv, types", None) as report:
    for count, row in enumerate(rows, 1):
        report(count)
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_LINE_ROWS = 100_000
_REFRESH_SECS = 0.1


@contextlib.contextmanager
def progress(what: str, total: int | None, unit: str = "rows") -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the rows so far; `total` is None if it is not known.

    On a terminal it moves a bar; elsewhere it prints a line for each 100,000 rows.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress

        shown_at, latest = 0.0, 0
        # auto_refresh would start a thread, and the processes that write are forked later.
        with Progress(console=Console(stderr=True), auto_refresh=False) as bars:
            task = bars.add_task(escape(what), total=total)

            def show(total: int | None) -> None:
                said = escape(f"{what}: {latest:,} {unit}")
                bars.update(task, completed=latest, total=total, description=said, refresh=True)

            def advance(count: int) -> None:
                nonlocal shown_at, latest
                latest = count
                if time.monotonic() >= shown_at + _REFRESH_SECS:
                    shown_at = time.monotonic()
                    show(total)

            yield advance
            show(latest)
        return
    last_said = 0

    def say(count: int) -> None:
        nonlocal last_said
        if count >= last_said + _LINE_ROWS:
            last_said = count
            of_total = "" if total is None else f" of {total:,}"
            print(f"{what}: {count:,}{of_total} {unit}", file=sys.stderr, flush=True)

    yield say
