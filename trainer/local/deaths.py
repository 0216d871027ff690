"""What the launcher does after a process of a task has ended: decisions, no processes.

    failure = failure_of(code, unresponsive, end_reason, is_stopped=False)
    action = decide(end, run)        # each time a process has ended
    action = decide_loss(end, run)   # a second after Action.WAIT
    restarts = Restarts(3, lambda: progress_of(model_dir))     # trainer/run_files.py
    delay_secs = restarts.next_delay_secs(end)                 # None: too often without progress

`decide` takes the first row that fits. `decide_loss` has the rows from "lost" on.

| exit of | with | state of the run | action |
| --- | --- | --- | --- |
| the chief | 0 | any | FINISH |
| any task | 2 (bad usage) | any | ABORT |
| any task, except for a bug behind a 75 | any | all are being restarted | GO_DOWN |
| any task | 0 | any | NONE |
| a ps worker, or a task that is not overdue | not 1 (a bug) | the chief is done | IGNORE |
| a ps worker | 75 | not ending | WAIT |
| lost: a ps worker | a signal, or 75 | a restart is allowed | RESTART_TASK |
| lost: another task | a signal, or 75 | a restart is allowed | RESTART_ALL |
| lost: a ps worker | a signal that was not to end the run | other workers run | CONTINUE |
| lost: any task | any | any | END_RUN |

An unresponsive task, which the launcher kills, counts as lost. A ps worker is the only task that
can be lost alone: the chief reconnects to it. If the chief of ps or a ps is lost by a signal,
RESTART_ALL leaves the other servers alone: they have the variables. Updates that a dead chief sent
cannot reach the variables of the next chief, which makes new ones. No multiworker step is complete
without all workers. Exits with 1 and 2 would happen again.

A run that makes progress is always restarted. Progress is a checkpoint, or a report, of a later
step than all before. A run that is always killed at the same step makes none.
"""

import enum
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strategies.cluster.tf_config import Task
from trainer.exit_codes import EXIT_BUG, EXIT_RESTART, EXIT_USAGE
from trainer.run_files import Progress

# The exits of a task that the launcher has asked to end.
ENDED_AS_ASKED = (EXIT_RESTART, -signal.SIGTERM, -signal.SIGUSR1, -signal.SIGKILL)

_WINDOW_SECS = 600.0  # A restart without progress counts for this long.
_FIRST_DELAY_SECS = 1.0  # The delay of the second restart. The first has none; later ones double.
_MAX_DELAY_SECS = 30.0
_SHORT_LIFE_SECS = 10.0  # A task that died sooner has not trained.


class Action(enum.Enum):
    """What the launcher does after an exit."""

    FINISH = "The run is complete: end the remaining tasks, which should end by themselves."
    ABORT = "End all tasks at once: a restart would end in the same way."
    GO_DOWN = "Continue to end all tasks, and restart them when the last one has ended."
    NONE = "Nothing: the task is done."
    IGNORE = "Nothing: the chief is done and did not need the task."
    WAIT = "Decide a second later: if the chief ended this worker, the chief itself ends by then."
    RESTART_TASK = "Restart this task alone."
    RESTART_ALL = "End all tasks, but not servers with variables, then restart what has ended."
    CONTINUE = "The other workers continue without this one."
    END_RUN = "Have the remaining tasks save and end."


@dataclass
class TaskEnd:
    """How one process of a task ended, `seconds` after its start."""

    task: Task
    is_chief: bool
    is_ps_worker: bool
    pid: int
    exit_code: int  # As in subprocess: -n is death by signal n.
    seconds: float
    failure: str  # Why the exit is a failure; empty if it is none.
    was_overdue: bool = False  # It did not end in time, so the launcher ended it; see `failure`.
    last_lines: tuple[str, ...] = field(default=(), repr=False)
    survived: bool = False  # The run continued after this failure.

    @property
    def death(self) -> str:
        """The launcher's message about it."""
        return f"{self.task} (process {self.pid}) died: {self.failure}"

    def document(self) -> dict[str, Any]:
        """The keys that a line of restarts.jsonl and one of failures.jsonl have in common."""
        return {
            "task": str(self.task),
            "process": self.pid,
            "seconds": round(self.seconds, 1),
            "exit_code": self.exit_code,
            "why": self.failure,
            "last_lines": [line.rstrip() for line in self.last_lines],
        }


def mark_survived(ends: Iterable[TaskEnd]) -> None:
    """Marks failures after which the run has continued."""
    for end in ends:
        end.survived = bool(end.failure)


class RunState(NamedTuple):
    """The state of the run when a process ended."""

    is_chief_done: bool
    is_ending: bool  # Nothing is started any more.
    restart_cause: int | None  # The exit code because of which all tasks are being restarted.
    has_other_workers: bool
    may_restart: bool


def is_chief_done(ends: Iterable[TaskEnd]) -> bool:
    """Returns True if the chief has ended with 0."""
    return any(end.is_chief and end.exit_code == 0 for end in ends)


def decide(end: TaskEnd, run: RunState) -> Action:
    """Returns the action for a process that has just ended."""
    if end.is_chief and end.exit_code == 0:
        return Action.FINISH
    if end.exit_code == EXIT_USAGE:
        return Action.ABORT
    # A peer that exits with 75 lost a task; a bug in that task is the cause and ends the run.
    is_bug_behind_restart = end.exit_code == EXIT_BUG and run.restart_cause == EXIT_RESTART
    if run.restart_cause is not None and not is_bug_behind_restart:
        return Action.GO_DOWN
    if end.exit_code == 0:
        return Action.NONE
    is_unneeded = end.is_ps_worker or not end.was_overdue
    if run.is_chief_done and is_unneeded and end.exit_code != EXIT_BUG:
        return Action.IGNORE
    if end.exit_code == EXIT_RESTART and end.is_ps_worker and not run.is_ending:
        return Action.WAIT
    return decide_loss(end, run)


def decide_loss(end: TaskEnd, run: RunState) -> Action:
    """Returns the action for a task that the run has lost: it did not end as planned."""
    is_transient = end.exit_code < 0 or end.exit_code == EXIT_RESTART
    if is_transient and run.may_restart and not run.is_ending:
        return Action.RESTART_TASK if end.is_ps_worker else Action.RESTART_ALL
    was_killed = end.exit_code < 0 and end.failure  # Not killed to end the run.
    if was_killed and end.is_ps_worker and run.has_other_workers:
        return Action.CONTINUE
    return Action.END_RUN


def failure_of(code: int, unresponsive: str, end_reason: str | None, *, is_stopped: bool) -> str:
    """Returns why an exit with `code` is a failure; empty if it is none.

    TaskProcess explains `unresponsive` and `end_reason`. `is_stopped` is True if the user or a
    scheduler has asked the run to stop.
    """
    if unresponsive and code == -signal.SIGKILL:
        return unresponsive
    if end_reason:
        return end_reason
    if end_reason is not None and code in ENDED_AS_ASKED:
        return ""
    if is_stopped and code == EXIT_RESTART:  # The chief passes the stop on to its servers.
        return ""
    if code < 0:
        return f"signal {-code} ({signal.strsignal(-code)})"
    return f"exit code {code}" if code else ""


@dataclass
class Restarts:
    """Counts restarts without progress."""

    max_restarts: int  # That are allowed within 10 minutes.
    progress: Callable[[], Progress]  # Called now and before each restart.
    clock: Callable[[], float] = time.monotonic
    num_without_progress: int = 0  # Restarts since the last progress, including the newest.

    def __post_init__(self) -> None:
        self._best = self.progress()
        self._times: deque[tuple[float, bool]] = deque()  # Of restarts, with `counts`.
        self._num_short_lives: Counter[Task] = Counter()  # Consecutive ones.

    def next_delay_secs(self, end: TaskEnd, *, counts: bool = True) -> float | None:
        """Counts the restart after `end`, and returns its delay; None if the limit is reached.

        A task that repeatedly dies soon after its start is delayed even if the run makes progress
        without it. If `counts` is False, the restart lengthens later delays, but has no limit.
        """
        is_short = end.seconds <= _SHORT_LIFE_SECS
        num_short_lives = self._num_short_lives[end.task] if is_short else 0
        # After an exit with 75 the cause is another task. But a ps worker that often ends with 75
        # is the cause itself: the run makes progress without it.
        is_cause = end.exit_code != EXIT_RESTART or end.is_ps_worker
        self._num_short_lives[end.task] = num_short_lives + (is_short and is_cause)
        now, (saved, reported) = self.clock(), self.progress()
        if saved > self._best[0] or reported > self._best[1]:
            self._times.clear()
            self._best = (max(saved, self._best[0]), max(reported, self._best[1]))
        while self._times and now - self._times[0][0] > _WINDOW_SECS:
            self._times.popleft()
        num_before = len(self._times)
        if counts and sum(counted for _, counted in self._times) >= self.max_restarts:
            return None
        self._times.append((now, counts))
        self.num_without_progress = num_before + 1
        num_consecutive = min(10, max(num_before, num_short_lives))
        delay_secs = _FIRST_DELAY_SECS * 2.0 ** (num_consecutive - 1)
        return min(_MAX_DELAY_SECS, delay_secs) if num_consecutive else 0.0
