"""Supervises the tasks of a cluster: starts one process for each, restarts and ends them.

    policy = FixedPolicy(cluster, cluster.tasks())
    starter = TaskStarter([*sys.argv[1:], f"--model_dir={model_dir}"])
    report = Supervisor(policy, starter, model_dir, restarts).run()
    sys.exit(report.exit_code)

The chief's lines appear on the launcher's standard output. The log of each task is
`<model_dir>/tasks/<job>-<index>.log`; if `model_dir` is a URL, it is in runs/<name>/tasks.

Servers are ps tasks and ps workers; trainers are the chief and the workers of multiworker. The
table in deaths.py says what follows when a task ends. Before a restart of all tasks the others are
killed at once; after an exit with 75 they first have 15 s to end by themselves. Workers of
multiworker get SIGUSR1 before SIGKILL: each has the complete state, and saves it within
`grace_secs`.

Each process is in a session of its own: Ctrl-C in a terminal reaches only the launcher, which has
the tasks save and end.

With `host` the cluster has several hosts, each with a launcher for one task, which it restarts
alone. The tasks see that others are gone, end, and wait for each other at the next start. So
launchers need not agree. They only tell each other of failures, in failures.jsonl.

No process is left when `run` returns: process groups are killed by their id. If the launcher itself
is killed, a socket that it held closes, and the tasks end (trainer/guards/parent_watch.py).
"""

import queue
import sched
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path

from strategies.cluster.tf_config import Task
from trainer.exit_codes import EXIT_BUG, EXIT_RESTART
from trainer.guards.signals import SignalThread, stop_signals
from trainer.local import deaths, launch_report
from trainer.local.deaths import Action, Restarts, TaskEnd
from trainer.local.launch_report import LaunchReport
from trainer.local.policy import Activity, FixedPolicy, Step
from trainer.local.task_logs import TaskLogs, now, say
from trainer.local.task_process import TaskProcess, TaskStarter
from trainer.run_files import directory_of_logs

_PEER_LOST_SECS = 15.0  # TensorFlow's coordination service reports a dead peer within 10 s.
_SHUTDOWN_GRACE_SECS = 10.0  # From the chief's exit with 0 to SIGTERM for tasks that still run.
_SERVERS_ALONE_SECS = 2.0  # From the failure of the last trainer to SIGTERM for servers.
_CHIEF_FOLLOWS_SECS = 1.0  # From a ps worker's 75 to the chief's, if the chief ended the worker.
_LATE_SECS = 2.0  # From the time when a task should have ended by itself to SIGKILL.
_POLL_SECS = 1.0  # Between two looks at heartbeats, and at what others have written.
_STATELESS_GRACE_SECS = 5.0  # From SIGTERM to SIGKILL for tasks without state to save.
_DONE_SECS = 10.0  # From Step.DONE to SIGTERM for a task that waits for others.


@dataclass(eq=False)
class Supervisor:
    """Starts, supervises and ends the tasks of one launcher."""

    policy: FixedPolicy
    starter: TaskStarter
    model_dir: str | Path  # A path or a URL.
    restarts: Restarts
    _: KW_ONLY
    grace_secs: float = 25.0  # Trainers may save for this long when they are asked to stop.
    stall_timeout_secs: float = 0.0  # A task without a heartbeat for this long is killed; 0: never.
    host: str = ""  # The host of the launcher's only task, if the cluster has several hosts.

    def __post_init__(self) -> None:
        self._logs = TaskLogs(directory_of_logs(self.model_dir))
        cluster = next(iter(self.policy.clusters.values()))
        self._chief = cluster.chief
        self._has_ps = cluster.num("ps") > 0
        run_dir = self._logs.directory.parent
        self._failures = launch_report.FailureLog(run_dir, self.host) if self.host else None
        self._exit_of_others = 0
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._running: dict[Task, TaskProcess] = {}
        self._plans = sched.scheduler(time.monotonic)
        self._num_starts: Counter[Task] = Counter()
        self._ends: list[TaskEnd] = []
        self._restarts: list[launch_report.Restart] = []
        # While tasks are being ended for a restart of all: its cause, and its earliest time.
        self._restart_of_all: tuple[TaskEnd, float] | None = None
        self._keeps_servers = False  # In that restart.
        self._is_ending = False
        self._num_stops = 0

    def run(self) -> LaunchReport:
        """Runs the cluster to its end. Called once, in the main thread.

        Raises OSError if a process could not be made.
        """
        with SignalThread(stop_signals(), self._on_signal):
            try:
                self._do(Step.START)
                self._poll()
                while (
                    self._running
                    or self._planned(self._start_again, self._on_loss)
                    or not (self._is_ending or self.policy.is_over())
                ):
                    self._handle_next_event()
            finally:
                for process in self._running.values():
                    process.send(signal.SIGKILL)
                    process.reap()
                self._logs.close()
        is_stopped = self._num_stops > 0
        report = LaunchReport(self._ends, self._restarts, is_stopped, self._exit_of_others)
        launch_report.print_summary(report, self._logs)
        return report

    def ask(self, decide: Callable[[Activity], Step]) -> None:
        """Has the main thread call `decide` and do its step. Any thread may call this."""
        self._events.put(lambda: self._do(decide(self._activity())))

    def _activity(self) -> Activity:
        if self._is_ending:
            return Activity.ENDING
        if self._running:
            return Activity.RUNNING
        return Activity.DELAYING if self._planned(self._start_again) else Activity.IDLE

    def _do(self, step: Step) -> None:
        match step:
            case Step.START:
                self._forget_plans()
                self._start(self.policy.to_start(self.policy.clusters))
            case Step.STOP_TOGETHER | Step.SAVE_AND_END:
                is_together = step is Step.STOP_TOGETHER
                # The chief of ps ends its servers itself.
                asked = self._running if self.host else self._trainers()
                self._end(asked, 0, signal.SIGTERM if is_together else signal.SIGUSR1)
                overdue = (
                    f"did not save and end within {self.grace_secs:g} s when the tasks of the "
                    "cluster changed"
                )
                self._end(self._running, self.grace_secs + _LATE_SECS, signal.SIGKILL, overdue)
            case Step.DONE:
                self._forget_plans()
                self._end_stateless(self._running, _DONE_SECS)

    def _start(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self._num_starts[task] += 1
            self._running[task] = TaskProcess(
                self.starter,
                self.policy.clusters[task],
                self._logs,
                lambda process: self._events.put(partial(self._on_exit, process)),
                is_shown=task == self._chief or bool(self.host),
                host=self.host,
                start=self._num_starts[task],
            )

    def _on_signal(self, signum: int) -> None:
        self._events.put(partial(self._on_stop, signal.Signals(signum)))

    def _handle_next_event(self) -> None:
        planned = self._plans.queue
        timeout_secs = max(0.0, planned[0].time - time.monotonic()) if planned else None
        try:
            handle = self._events.get(timeout=timeout_secs)
        except queue.Empty:
            handle = partial(self._plans.run, blocking=False)
        handle()

    def _poll(self) -> None:
        """Looks, from now on regularly, at what no event reports."""
        self._kill_unresponsive()
        self._follow_failures()
        self._do(self.policy.look(self._activity()))
        self._plans.enter(_POLL_SECS, 0, self._poll)

    def _follow_failures(self) -> None:
        """Prints why tasks of other hosts ended; ends the run if one of these failures says so."""
        for failure in self._failures.new_of_others() if self._failures else ():
            if self._chief in self.policy.clusters or failure.ends_run:
                launch_report.print_failure(failure)
            if failure.ends_run and not self._is_ending:
                (own,) = self.policy.clusters
                say(f"It is not restarted. So this host ends {own}, too.")
                self._exit_of_others = failure.exit_of_others
                self._end_run()

    def _kill_unresponsive(self) -> None:
        for process in self._running.values():
            silent_secs = process.watch.silent_secs()
            if 0 < self.stall_timeout_secs < silent_secs and not process.unresponsive:
                process.unresponsive = (
                    f"unresponsive for {silent_secs:.0f} s (--stall_timeout_secs)"
                )
                process.send(signal.SIGKILL)

    def _on_stop(self, signum: signal.Signals) -> None:
        self._num_stops += 1
        self._start_nothing_more()
        if self._num_stops > 1:
            self._end(self._running, 0, signal.SIGKILL)
            return
        say(
            f"{signum.name}: the tasks are asked to save and end within {self.grace_secs:g} s. "
            "Send the signal again to kill them at once."
        )
        overdue = f"did not save and end within {self.grace_secs:g} s after SIGTERM"
        # On a host of its own a server asks its chief to stop.
        # Not a task that was asked already, because the tasks of the cluster change: a second
        # SIGTERM ends it at once.
        tasks = self._running if self.host else self._trainers()
        asked = [task for task in tasks if self._running[task].end_reason is None]
        self._end(asked, 0, signal.SIGTERM)
        patience = self.grace_secs + _LATE_SECS
        self._end(self._trainers(), patience, signal.SIGKILL, overdue)
        self._end_stateless(self._servers(), patience)

    def _on_exit(self, process: TaskProcess) -> None:
        task = process.task
        del self._running[task]
        code = process.reap()
        if forks := self.starter.fork_server:
            forks.reap_orphans({other.pid for other in self._running.values()})
        step = self.policy.on_exit(task, code, self._activity())
        if step is not None:
            self._do(step)
            return
        is_stopped = self._num_stops > 0
        end = TaskEnd(
            task,
            is_chief=task == self._chief,
            is_ps_worker=self.policy.clusters[task].is_server and task.job == "worker",
            pid=process.pid,
            exit_code=code,
            seconds=process.seconds(),
            failure=deaths.failure_of(
                code, process.unresponsive, process.end_reason, is_stopped=is_stopped
            ),
            was_overdue=bool(process.end_reason),
            last_lines=tuple(process.tail),
        )
        self._ends.append(end)
        match deaths.decide(end, self._state(end)):
            case Action.FINISH:
                self._finish()
            case Action.ABORT:
                self._write_failure(end, ends_run=True)
                self._start_nothing_more()
                self._end_stateless(self._running, 0)
            case Action.GO_DOWN:
                self._go_down()
            case Action.NONE:
                pass
            case Action.IGNORE:
                deaths.mark_survived([end])
            case Action.WAIT:
                self._plans.enter(_CHIEF_FOLLOWS_SECS, 0, self._on_loss, (end,))
            case _:
                self._on_loss(end)

    def _on_loss(self, end: TaskEnd) -> None:
        state = self._state(end)
        action = deaths.decide_loss(end, state)
        if action in (Action.RESTART_TASK, Action.RESTART_ALL):
            delay_secs = self.restarts.next_delay_secs(end, counts=self.policy.counts(end))
            if delay_secs is not None:
                self._write_failure(end, ends_run=False)
                self._restart(end, delay_secs, is_alone=action is Action.RESTART_TASK)
                return
            say(
                f"{end.death}. It is not restarted: {self.restarts.max_restarts} restarts within "
                "10 minutes (--max_restarts) brought neither a new checkpoint nor a later step."
            )
            action = deaths.decide_loss(end, state._replace(may_restart=False))
        if action is Action.CONTINUE:
            deaths.mark_survived([end])
            say(f"{end.death}. The other workers continue without it.")
        else:
            self._write_failure(end, ends_run=True)
            self._end_run()

    def _write_failure(self, end: TaskEnd, *, ends_run: bool) -> None:
        if self._failures and end.failure and not self._is_ending:
            self._failures.write(end, ends_run=ends_run and self.policy.ends_all_hosts(end))

    def _state(self, end: TaskEnd) -> deaths.RunState:
        return deaths.RunState(
            is_chief_done=deaths.is_chief_done(self._ends),
            is_ending=self._is_ending,
            restart_cause=self._restart_of_all[0].exit_code if self._restart_of_all else None,
            has_other_workers=any(other.job == end.task.job for other in self._running),
            may_restart=self.restarts.max_restarts > 0,
        )

    def _finish(self) -> None:
        self._start_nothing_more()
        # The run did without these tasks, or they died when it did not need them any more.
        deaths.mark_survived(end for end in self._ends if end.exit_code != EXIT_BUG)
        overdue = f"was still running {_SHUTDOWN_GRACE_SECS:g} s after {self._chief} was done"
        self._end_stateless(self._running, _SHUTDOWN_GRACE_SECS, overdue)

    def _end_run(self) -> None:
        """Has the remaining tasks save and end, after a failure that no restart repairs."""
        self._start_nothing_more()
        patience = _PEER_LOST_SECS + self.grace_secs
        if not self._num_stops:  # A second SIGTERM would keep tasks from saving.
            self._end(self._trainers(), _PEER_LOST_SECS, signal.SIGTERM)
            self._end(self._trainers(), patience, signal.SIGKILL)
        # Servers run as long as a trainer may save what they hold. Without one they never end.
        self._end_stateless(self._servers(), patience if self._trainers() else _SERVERS_ALONE_SECS)

    def _restart(self, cause: TaskEnd, delay_secs: float, *, is_alone: bool) -> None:
        # The next chief may continue from the variables on the servers. Not after an exit with 75,
        # or again without progress: then perhaps a server does not answer.
        was_killed, is_first = cause.exit_code < 0, self.restarts.num_without_progress == 1
        keeps_servers = not is_alone and self._has_ps and was_killed and is_first
        what: object = cause.task if is_alone or self.host else "all tasks"
        if keeps_servers and not self.host:
            what = " and ".join(dict.fromkeys([str(cause.task), str(self._chief)]))
        when = f"in {delay_secs:g} s" if delay_secs else "now"
        say(f"{cause.death}. Restarting {what} {when}.")
        if is_alone:
            deaths.mark_survived([cause])
            self._plans.enter(delay_secs, 0, self._start_again, (cause, [cause.task]))
            return
        self._forget_plans()
        self._restart_of_all = (cause, time.monotonic() + delay_secs)
        self._keeps_servers = keeps_servers
        # After an exit with 75 the other tasks may be about to end by themselves, with state saved.
        patience = _PEER_LOST_SECS if cause.exit_code == EXIT_RESTART else 0.0
        if not self._has_ps:
            # Each worker has the complete state: it saves, if it is training, and ends.
            self._end(self._running, patience, signal.SIGUSR1)
            patience += self.grace_secs
        ended = self._trainers() if keeps_servers else self._running
        self._end(ended, patience, signal.SIGKILL)
        self._go_down()

    def _go_down(self) -> None:
        """Continues a restart of all: ends the servers, unless they stay, then plans the starts."""
        assert self._restart_of_all is not None
        if self._trainers():
            return
        if not self._keeps_servers:
            self._end(self._servers(), 0, signal.SIGKILL)
            if self._running:
                return
        cause, when = self._restart_of_all
        self._forget_plans()
        deaths.mark_survived(self._ends)
        ended = [task for task in self.policy.clusters if task not in self._running]
        self._plans.enterabs(when, 0, self._start_again, (cause, ended))

    def _start_again(self, cause: TaskEnd, tasks: Collection[Task]) -> None:
        if tasks := self.policy.to_start(tasks):
            self._restarts.append(launch_report.Restart(cause, tuple(tasks), now()))
            launch_report.write_restart(self._restarts[-1], self._logs)
            self._start(tasks)

    def _forget_plans(self) -> None:
        """Drops all plans before a restart of all tasks: they were for the old processes."""
        for plan in self._plans.queue:
            if plan.action != self._poll:
                self._plans.cancel(plan)
        self._restart_of_all = None

    def _start_nothing_more(self) -> None:
        self._is_ending = True
        for plan in self._planned(self._start_again):
            self._plans.cancel(plan)
        self._restart_of_all = None

    def _planned(self, *actions: Callable[..., None]) -> list[sched.Event]:
        return [plan for plan in self._plans.queue if plan.action in actions]

    def _servers(self) -> list[Task]:
        return [task for task in self._running if self.policy.clusters[task].is_server]

    def _trainers(self) -> list[Task]:
        return [task for task in self._running if not self.policy.clusters[task].is_server]

    def _end_stateless(self, tasks: Iterable[Task], after_secs: float, overdue: str = "") -> None:
        """Plans the end of tasks that have nothing to save; see `_end`."""
        self._end(tasks, after_secs, signal.SIGTERM, overdue)
        self._end(tasks, after_secs + _STATELESS_GRACE_SECS, signal.SIGKILL)

    def _end(
        self, tasks: Iterable[Task], after_secs: float, signum: signal.Signals, overdue: str = ""
    ) -> None:
        """Plans a signal to those `tasks` that still run after `after_secs`.

        `overdue` says why this is a failure; empty if it is none.
        """
        for task in tasks:
            self._plans.enter(after_secs, 0, self._send, (self._running[task], signum, overdue))

    def _send(self, process: TaskProcess, signum: signal.Signals, overdue: str) -> None:
        if self._running.get(process.task) is process:
            process.end_reason = process.end_reason or overdue
            process.send(signum)
