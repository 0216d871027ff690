"""What follows from the end of a task, as a table."""

import signal
from dataclasses import replace

import pytest

from strategies.cluster.tf_config import Task
from trainer.local.deaths import Action, RunState, TaskEnd, decide, decide_loss, failure_of

KILLED = -signal.SIGKILL

RUNNING = RunState(False, False, restart_cause=None, has_other_workers=True, may_restart=True)
LAST_WORKER = RUNNING._replace(has_other_workers=False)
NO_RESTART = RUNNING._replace(may_restart=False)
LAST_WORKER_NO_RESTART = NO_RESTART._replace(has_other_workers=False)
ENDING = RUNNING._replace(is_ending=True)
CHIEF_DONE = ENDING._replace(is_chief_done=True)
RESTARTING_KILLED = RUNNING._replace(restart_cause=KILLED)
RESTARTING_75 = RUNNING._replace(restart_cause=75)


def end(code: int, task: Task, *, is_chief: bool = False, is_ps_worker: bool = False) -> TaskEnd:
    failure = f"exit code {code}" if code else ""
    return TaskEnd(task, is_chief, is_ps_worker, 100, code, 1.0, failure)


def chief(code: int) -> TaskEnd:
    """The chief of ps, or worker 0 of multiworker."""
    return end(code, Task("chief", 0), is_chief=True)


def ps_worker(code: int) -> TaskEnd:
    return end(code, Task("worker", 0), is_ps_worker=True)


def other(code: int) -> TaskEnd:
    """A ps task, or another worker of multiworker."""
    return end(code, Task("ps", 0))


def overdue(end: TaskEnd) -> TaskEnd:
    return replace(end, was_overdue=True)


TABLE = [
    (chief(0), RUNNING, Action.FINISH),
    (chief(0), ENDING, Action.FINISH),
    (chief(0), RESTARTING_75, Action.FINISH),
    # A usage error ends the run in every state.
    (chief(2), RUNNING, Action.ABORT),
    (ps_worker(2), RUNNING, Action.ABORT),
    (other(2), RESTARTING_KILLED, Action.ABORT),
    (other(2), CHIEF_DONE, Action.ABORT),
    # While all tasks are being ended for a restart.
    (other(KILLED), RESTARTING_KILLED, Action.GO_DOWN),
    (other(0), RESTARTING_KILLED, Action.GO_DOWN),
    (other(1), RESTARTING_KILLED, Action.GO_DOWN),
    (ps_worker(75), RESTARTING_75, Action.GO_DOWN),
    (other(1), RESTARTING_75, Action.END_RUN),
    # A task other than the chief ends as it should.
    (ps_worker(0), RUNNING, Action.NONE),
    (other(0), CHIEF_DONE, Action.NONE),
    # The chief is done.
    (ps_worker(KILLED), CHIEF_DONE, Action.IGNORE),
    (overdue(ps_worker(-signal.SIGTERM)), CHIEF_DONE, Action.IGNORE),
    (other(KILLED), CHIEF_DONE, Action.IGNORE),
    (other(75), CHIEF_DONE, Action.IGNORE),
    (overdue(other(-signal.SIGTERM)), CHIEF_DONE, Action.END_RUN),
    (other(1), CHIEF_DONE, Action.END_RUN),
    (ps_worker(1), CHIEF_DONE, Action.END_RUN),
    # A ps worker is lost.
    (ps_worker(75), RUNNING, Action.WAIT),
    (ps_worker(75), NO_RESTART, Action.WAIT),
    (ps_worker(75), ENDING, Action.END_RUN),
    (ps_worker(KILLED), RUNNING, Action.RESTART_TASK),
    (ps_worker(KILLED), LAST_WORKER, Action.RESTART_TASK),
    (ps_worker(KILLED), NO_RESTART, Action.CONTINUE),
    (ps_worker(KILLED), ENDING, Action.CONTINUE),
    (replace(ps_worker(KILLED), failure=""), ENDING, Action.END_RUN),  # By the launcher.
    (ps_worker(KILLED), LAST_WORKER_NO_RESTART, Action.END_RUN),
    (ps_worker(1), RUNNING, Action.END_RUN),
    # Another task is lost.
    (chief(KILLED), RUNNING, Action.RESTART_ALL),
    (chief(75), RUNNING, Action.RESTART_ALL),
    (other(KILLED), RUNNING, Action.RESTART_ALL),
    (other(75), RUNNING, Action.RESTART_ALL),
    (other(KILLED), NO_RESTART, Action.END_RUN),
    (other(75), ENDING, Action.END_RUN),
    (chief(75), ENDING, Action.END_RUN),
    (chief(1), RUNNING, Action.END_RUN),
    (other(1), RUNNING, Action.END_RUN),
]


@pytest.mark.parametrize(("end", "run", "action"), TABLE)
def test_exit_has_the_action_of_the_table(end: TaskEnd, run: RunState, action: Action) -> None:
    assert decide(end, run) is action


def test_table_has_every_action() -> None:
    assert {action for _, _, action in TABLE} == set(Action)


@pytest.mark.parametrize(
    ("run", "action"),
    [
        (RUNNING, Action.RESTART_TASK),
        (LAST_WORKER, Action.RESTART_TASK),
        (NO_RESTART, Action.END_RUN),
        (CHIEF_DONE, Action.END_RUN),
    ],
)
def test_ps_worker_that_the_chief_did_not_end_is_lost_after_the_wait(
    run: RunState, action: Action
) -> None:
    assert decide_loss(ps_worker(75), run) is action


@pytest.mark.parametrize(
    ("code", "unresponsive", "end_reason", "is_stopped", "failure"),
    [
        (0, "", None, False, ""),
        (1, "", None, False, "exit code 1"),
        (75, "", None, False, "exit code 75"),
        (KILLED, "", None, False, "signal 9 (Killed)"),
        # Killed because it was unresponsive; or it ended before the signal came.
        (KILLED, "unresponsive for 9 s", None, False, "unresponsive for 9 s"),
        (0, "unresponsive for 9 s", None, False, ""),
        (1, "unresponsive for 9 s", None, False, "exit code 1"),
        # Ended by the launcher, with a failure and without.
        (-signal.SIGTERM, "", "was still running", False, "was still running"),
        (0, "", "was still running", False, "was still running"),
        (KILLED, "", "", False, ""),
        (-signal.SIGTERM, "", "", False, ""),
        (-signal.SIGUSR1, "", "", False, ""),
        (75, "", "", False, ""),
        (1, "", "", False, "exit code 1"),
        (-signal.SIGSEGV, "", "", False, "signal 11 (Segmentation fault)"),
        # The run was asked to stop.
        (75, "", None, True, ""),
        (1, "", None, True, "exit code 1"),
        (KILLED, "", None, True, "signal 9 (Killed)"),
    ],
)
def test_failure_is_what_the_launcher_did_not_ask_for(
    code: int, unresponsive: str, end_reason: str | None, is_stopped: bool, failure: str
) -> None:
    assert failure_of(code, unresponsive, end_reason, is_stopped=is_stopped) == failure
