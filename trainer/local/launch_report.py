"""How a local cluster ended: all exits and restarts, the exit code, and the messages about them.

report = LaunchReport(ends, restarts, is_stopped=False)
print_summary(report, TaskLogs(directory_of_logs("runs/a")))
sys.exit(report.exit_code)
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from data.system.files import shown
from strategies.cluster.tf_config import Task
from trainer.exit_codes import EXIT_BUG, EXIT_RESTART, EXIT_USAGE
from trainer.local.deaths import TaskEnd, is_chief_done
from trainer.local.task_logs import TaskLogs, say
from trainer.run_files import RESTARTS

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
    logs.append(RESTARTS, json.dumps(document))


def print_summary(report: LaunchReport, logs: TaskLogs) -> None:
    """Prints the restarts and the failure that ended the run, if any, to standard error."""
    if (num_before := len(report.restarts) - _NUM_SHOWN_RESTARTS) > 0:
        say(f"{num_before} earlier restarts are in {shown(str(logs.directory / RESTARTS))}")
    for restart in report.restarts[-_NUM_SHOWN_RESTARTS:]:
        cause, tasks = restart.cause, restart.tasks
        has_servers = cause.task.job in ("chief", "ps")  # Which were not restarted.
        is_part = len(tasks) == 1 or (has_servers and len(tasks) == 2)
        what = " and ".join(map(str, tasks)) if is_part else "all tasks"
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
