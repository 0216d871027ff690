"""MODEL_DIR/failures.jsonl: why tasks of several hosts ended, and each new number of workers.

    failures = FailureLog(Path("/shared/run"), host="host-b")
    failures.write(end, ends_run=False)         # a task of this host has ended
    for failure in failures.new_of_others():    # what other hosts have written since the last call
        print_failure(failure)
    write_resize(Path("/shared/run"), Resize(4, 1, "membership/workers says 4"))

A task usually ends with 75 because another task was lost, which is the cause. So an exit with 75 is
written only if it ends the run or is the chief's. A line with `ends_run` ends all launchers.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trainer.exit_codes import EXIT_RESTART, EXIT_USAGE
from trainer.local.deaths import TaskEnd
from trainer.local.task_logs import now, say
from trainer.run_files import FAILURES, Document


@dataclass(frozen=True)
class Failure:
    """A line of failures.jsonl. `exit_code` is that of the task."""

    time: str
    host: str
    task: str
    process: int
    seconds: float
    exit_code: int
    why: str
    ends_run: bool
    last_lines: list[str]

    @property
    def exit_of_others(self) -> int:
        """The exit code of the launchers of other hosts, if this failure ends the run."""
        return EXIT_USAGE if self.exit_code == EXIT_USAGE else EXIT_RESTART


class Resize(NamedTuple):
    """Another line of failures.jsonl: from now on another number of workers trains."""

    workers: int
    workers_before: int
    why: str


def write_resize(model_dir: Path, resize: Resize) -> None:
    """Appends `resize`. Raises no OSError."""
    _append(model_dir / FAILURES, {"time": now(), **resize._asdict()})


class FailureLog:
    """Appends to the file, and reads what others append. No method raises OSError."""

    def __init__(self, model_dir: Path, host: str) -> None:
        """Ignores the lines that the file has now: they are of earlier launchers."""
        self._path = model_dir / FAILURES
        self._host = host
        self._read_bytes = self._path.stat().st_size if self._path.exists() else 0

    def write(self, end: TaskEnd, *, ends_run: bool) -> None:
        """Appends how a task of this host ended, in one operation."""
        if end.exit_code == EXIT_RESTART and not (end.is_chief or ends_run):
            return
        failure = Failure(time=now(), host=self._host, ends_run=ends_run, **end.document())
        _append(self._path, vars(failure))

    def new_of_others(self) -> Iterator[Failure]:
        """The lines that launchers of other hosts have appended since the last call."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read_bytes:
                    self._read_bytes = 0  # It was deleted meanwhile.
                file.seek(self._read_bytes)
                lines = file.read().splitlines(keepends=True)
        except OSError:  # Nothing has failed yet, or the storage does not answer.
            return
        for line in lines:
            if not line.endswith(b"\n"):  # Not complete yet.
                return
            self._read_bytes += len(line)
            with contextlib.suppress(ValueError, TypeError):  # Damaged.
                failure = Failure(**json.loads(line))
                if failure.host != self._host:
                    yield failure


def _append(path: Path, document: Document) -> None:
    """Appends a line in one operation. Raises no OSError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(json.dumps(document).encode() + b"\n")
            os.fsync(file.fileno())
    except OSError as error:
        say(f"{path} could not be written: {error}")


def print_failure(failure: Failure) -> None:
    """Prints the last lines of the task, and why it ended, to standard error."""
    for line in failure.last_lines:
        say(f"[{failure.task} on {failure.host}] {line}")
    say(
        f"{failure.task} on {failure.host} (process {failure.process}) ended after "
        f"{failure.seconds:.1f} s: {failure.why}."
    )
