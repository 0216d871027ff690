"""How the tasks of a launcher ended: the exit code, the messages, and two files of JSON lines.

    report = LaunchReport(ends, restarts, is_stopped=False)
    print_summary(report, TaskLogs(directory_of_logs("runs/a")))
    sys.exit(report.exit_code)

    failures = FailureLog(Path("/shared/run"), host="host-b")
    failures.write(end, ends_run=False)         # a task of this host has ended
    for failure in failures.new_of_others():    # what other hosts have written since the last call
        print_failure(failure)

tasks/restarts.jsonl has the restarts of a launcher. MODEL_DIR/failures.jsonl has why tasks of
several hosts ended, and each new number of workers. A task usually ends with 75 because another
task was lost, which is the cause. So an exit with 75 is written there only if it ends the run or is
the chief's. A line with `ends_run` ends all launchers.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.system.files import shown
from strategies.cluster.tf_config import Task
from trainer.exit_codes import EXIT_BUG, EXIT_RESTART, EXIT_USAGE
from trainer.local.deaths import TaskEnd, is_chief_done
from trainer.local.task_logs import TaskLogs, now, say
from trainer.run_files import FAILURES, RESTARTS, Document

_NUM_SHOWN_RESTARTS = 20


@dataclass(frozen=True)
class Restart:
    """The tasks that were restarted because `cause` had ended, and when."""

    cause: TaskEnd
    tasks: Sequence[Task]
    when: str


@dataclass(frozen=True)
class LaunchReport:
    """How the cluster ended: all processes in the order of their ends, and all restarts."""

    tasks: Sequence[TaskEnd]
    restarts: Sequence[Restart]
    is_stopped: bool  # The user or a scheduler has asked the cluster to stop.
    exit_of_others: int = 0  # The exit code to end with if another host has ended the run; else 0.

    @property
    def first_failure(self) -> TaskEnd | None:
        """The failure to look at first. Survived ones come last, and 75s come after other codes."""
        return min(
            (end for end in self.tasks if end.failure),
            key=lambda end: (end.survived, end.exit_code == EXIT_RESTART),
            default=None,
        )

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher: the first row that fits.

        | the run | exit code |
        | --- | --- |
        | was asked to stop; the chief and all needed tasks ended with 0 | 0 |
        | was asked to stop | 75 |
        | was ended by another host | that of the other host |
        | had no failure that ended it | 0 |
        | had bad usage | 2 |
        | failed first with a 75 or a signal, not overdue: the same command resumes | 75 |
        | otherwise | 1 |
        """
        first = self.first_failure
        codes = [end.exit_code for end in self.tasks if not end.survived]
        if self.is_stopped:
            return EXIT_RESTART if any(codes) or not is_chief_done(self.tasks) else 0
        if self.exit_of_others:
            return self.exit_of_others
        if first is None or first.survived:
            return 0
        if EXIT_USAGE in codes:
            return EXIT_USAGE
        was_lost = first.exit_code < 0 or first.exit_code == EXIT_RESTART
        return EXIT_RESTART if was_lost and not first.was_overdue else EXIT_BUG


def write_restart(restart: Restart, logs: TaskLogs) -> None:
    """Appends `restart` to restarts.jsonl."""
    again = [str(task) for task in restart.tasks]
    document = {"time": restart.when, "started_again": again, **restart.cause.document()}
    logs.append(logs.directory / RESTARTS, json.dumps(document).encode() + b"\n")


def print_summary(report: LaunchReport, logs: TaskLogs) -> None:
    """Prints the restarts and the failure that ended the run, if any, to standard error."""
    if (num_before := len(report.restarts) - _NUM_SHOWN_RESTARTS) > 0:
        say(f"{num_before} earlier restarts are in {shown(str(logs.directory / RESTARTS))}")
    for restart in report.restarts[-_NUM_SHOWN_RESTARTS:]:
        cause, tasks = restart.cause, restart.tasks
        what = " and ".join(map(str, tasks)) if len(tasks) <= 2 else f"{len(tasks)} tasks"
        say(f"{restart.when}  {cause.task} died: {cause.failure}; restarted {what}")
    first = report.first_failure
    if first is None or first.survived:
        return
    if not first.is_chief:  # The chief's lines were printed when they came.
        for line in first.last_lines:
            say(f"[{first.task}] {line.rstrip()}")
    say(
        f"{first.task} failed after {first.seconds:.1f} s: {first.failure}. "
        f"Its log: {shown(str(logs.path(first.task)))}"
    )


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


def write_resize(model_dir: Path, *, workers: int, workers_before: int, why: str) -> None:
    """Writes to failures.jsonl that from now on another number of workers trains.

    Raises no OSError.
    """
    document = {"time": now(), "workers": workers, "workers_before": workers_before, "why": why}
    _append(model_dir / FAILURES, document)


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
