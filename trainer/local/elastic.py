"""The launcher of one host of an elastic cluster: `--hosts=a,b,c --min_workers=2`.

    cluster = ElasticCluster(cluster, argv, model_dir, restarts, host="b", rules=Rules(2, 60.0))
    report = cluster.run()

A LocalCluster for the task of this host, while this host is in the group of hosts that train
together. When the group changes, the task is ended and started again with another TF_CONFIG, in
which the members are the workers. So worker 0, the chief, may be on another host then.

A launcher changes the group in this order: it ends its own task, with the state saved; it proposes
the next group; it starts its task. Without this task the former group cannot make a step. If a
member is lost, the other tasks save the last complete step. If hosts join, all tasks stop at the
same step.
"""

import signal
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import partial

from typing_extensions import override

from strategies.cluster.tf_config import Cluster, ClusterError, Task
from trainer.exit_codes import EXIT_BUG, EXIT_DONE, EXIT_RESTART, EXIT_USAGE
from trainer.local.deaths import TaskEnd
from trainer.local.group_rules import Group, Rules, Sightings, Snapshot, next_members
from trainer.local.launch_report import LaunchReport
from trainer.local.launcher import LATE_SECS, LocalCluster
from trainer.local.membership import Membership, Watcher
from trainer.local.task_logs import say
from trainer.local.task_process import TaskProcess

# From the time when another launcher says that the run is done to SIGTERM for a task that waits.
_DONE_SECS = 10.0
# After this number of snapshots a launcher knows which others were running before it.
_FIRST_SNAPSHOTS = 4
# How a task ends that was asked to end.
_ASKED = (EXIT_RESTART, -signal.SIGTERM, -signal.SIGUSR1, -signal.SIGKILL)


@dataclass(eq=False)
class ElasticCluster(LocalCluster):
    """Starts, restarts and ends the task of this host, `cluster.task`, as the groups change.

    `cluster` has all hosts. `identity` is a hash of the code and the config, which must be equal on
    all hosts. `saves_regularly` is False if the run has no checkpoints to wait for before hosts
    join.
    """

    _: KW_ONLY
    rules: Rules
    identity: str = ""
    saves_regularly: bool = True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        addresses = list(self.cluster.jobs["worker"].values())
        self._own = self.cluster.task.index
        self._membership = Membership(self._logs.directory.parent, addresses, self._own)
        self._sightings = Sightings(
            self._own, identity=self.identity, saves_regularly=self.saves_regularly
        )
        self._num_snapshots = 0
        self._group = Group(-1, frozenset())  # The newest that was read; none yet.
        self._generation = -1  # In which the task was started last.
        self._is_regrouping = False  # The task was asked to end because the group changes.
        self._is_done = False

    @override
    def run(self) -> LaunchReport:
        """As LocalCluster.run.

        Raises:
            ClusterError: the files of the group cannot be used, or launchers that ran before this
                one have another code or config.
        """
        self._membership.check_hard_links()
        with Watcher(self._membership, self._put_snapshot, identity=self.identity) as watcher:
            report = super().run()
            watcher.end(report.exit_code)
        return report

    @override
    def _begin(self) -> None:
        """The first snapshot starts the task."""

    @override
    def _is_over(self) -> bool:
        return super()._is_over() and (self._is_ending or self._is_done)

    def _put_snapshot(self, snapshot: Snapshot) -> None:
        self._events.put(partial(self._on_snapshot, snapshot))

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self._read_group()
        if self._group.generation < 0 or self._is_ending:
            return
        self._sightings.update(snapshot, self._group)
        self._num_snapshots += 1
        if self._num_snapshots <= _FIRST_SNAPSHOTS and self._sightings.others:
            # They ran before. If they had started later, they would end.
            addresses = (self._membership.addresses[h] for h in sorted(self._sightings.others))
            raise ClusterError(
                f"This run already trains on {', '.join(addresses)}, with other code or another "
                "config. Give this host the same command, config file and version of this program, "
                "and start it again."
            )
        if self._num_snapshots < _FIRST_SNAPSHOTS and self._may_meet_others(snapshot):
            return
        if self._sightings.is_done and not self._is_done:
            self._is_done = True
            self._forget_plans()
            # It ends by itself, unless it was started again just now and waits for the others.
            self._end_stateless(self._running, _DONE_SECS)
        if self._is_done:
            return
        if self._running:
            self._end_task_if_group_changes()
        else:
            self._regroup()

    def _may_meet_others(self, snapshot: Snapshot) -> bool:
        """True if launchers with another code or config have records: they may run, or be dead.

        A task that is started now could connect to theirs, and both would end.
        """
        return any(
            record.identity != self.identity and record.ended is None
            for record in snapshot.records.values()
        )

    def _read_group(self) -> None:
        try:
            group = self._membership.group()
        except OSError as error:
            say(f"The group of hosts could not be read: {error}")
            return
        # A group is never left for an earlier one, even if the files are deleted.
        if group.generation <= self._group.generation:
            return
        self._group = group
        members: list[str] = []
        others: list[str] = []
        for host, address in enumerate(self._membership.addresses):
            (members if host in group.members else others).append(address)
        if group.generation:
            away = f"; not {', '.join(others)}" if others else ""
            say(f"Group {group.generation} trains: {', '.join(members)}{away}.")
        if self._own not in group.members:
            say("This host asks to join. Members that reach it take it in at a checkpoint.")

    def _next_members(self) -> frozenset[int] | None:
        return next_members(self._group, self._sightings, self.rules)

    def _end_task_if_group_changes(self) -> None:
        if self._is_regrouping:
            return
        is_outdated = self._group.generation != self._generation
        if not is_outdated and self._next_members() is None:
            return
        self._is_regrouping = True
        # If all are there, they stop at the same step. Otherwise each saves its last complete step.
        is_whole = not is_outdated and self._sightings.core == self._group.members
        self._end(self._running, 0, signal.SIGTERM if is_whole else signal.SIGUSR1)
        self._end(self._running, self.grace_secs + LATE_SECS, signal.SIGKILL)

    def _regroup(self) -> None:
        """Proposes the next group, if there must be one, and starts the task. None runs."""
        members = self._next_members()
        is_outdated = self._group.generation != self._generation
        if self._planned_starts() and members is None and not is_outdated:
            return  # It died, and is started again after a delay.
        self._forget_plans()
        if members is not None:
            try:
                self._membership.propose(self._group, members)
            except OSError as error:
                say(f"The next group of hosts could not be written: {error}")
            self._read_group()
        if self._own in self._group.members:
            self._enter_group()
            self._start(self._clusters)

    def _enter_group(self) -> None:
        hosts = sorted(self._group.members)
        workers = {rank: self._membership.addresses[host] for rank, host in enumerate(hosts)}
        task = Task("worker", hosts.index(self._own))
        self._generation = self._group.generation
        self.cluster = Cluster({"worker": workers}, task, self._generation)
        self._clusters = {task: self.cluster}

    @override
    def _counts(self, end: TaskEnd) -> bool:
        # A task that lost another one is not the cause. The launcher of the cause counts.
        has_lost_another = end.exit_code == EXIT_RESTART and self.cluster.num("worker") > 1
        return not has_lost_another or end.was_overdue

    @override
    def _start_again(self, cause: TaskEnd, tasks: Iterable[Task]) -> None:
        if self._own in self._group.members:
            self._enter_group()
            super()._start_again(cause, self._clusters)

    @override
    def _on_exit(self, process: TaskProcess) -> None:
        code = process.reap()
        # A restart does not repair other exit codes, so that they do not lead to one.
        is_unneeded = self._is_done and (code < 0 or code == EXIT_RESTART)
        is_asked = is_unneeded or (self._is_regrouping and code in _ASKED)
        self._is_regrouping = False
        if not is_asked or self._is_ending:
            super()._on_exit(process)
            self._is_done |= code == EXIT_DONE
            return
        self._reap(process)
        if not self._is_done:
            self._regroup()

    @override
    def _write_failure(self, end: TaskEnd, *, ends_run: bool) -> None:
        """What is wrong with one host does not end the others."""
        is_wrong_everywhere = end.exit_code in (EXIT_BUG, EXIT_USAGE)
        super()._write_failure(end, ends_run=ends_run and is_wrong_everywhere)
