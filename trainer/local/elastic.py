"""The launcher of one host of an elastic cluster: `--hosts=a,b,c --min_workers=2`.

    policy = ElasticPolicy(membership, Rules(min_workers=2, rejoin_secs=60.0))
    report = run_elastic(Supervisor(policy, starter, model_dir, restarts, host="b"), policy)

The task of this host runs while this host is in the group of hosts that train together. When the
group changes, the task is ended and started again with another TF_CONFIG, in which the members are
the workers. So worker 0, the chief, may be on another host then.

A launcher changes the group in this order: it ends its own task, with the state saved; it proposes
the next group; it starts its task. Without this task the former group cannot make a step. If a
member is lost, the other tasks save the last complete step. If hosts join, all tasks stop at the
same step.

Under ps only the chief needs the list of workers. When the group changes, the launcher of its host
has it stop after a complete step and save; it ends all servers, and the launchers start them again
in the next group. If the host of the chief is lost, each ps keeps the variables for the next chief.
"""

from collections.abc import Collection, Sequence
from functools import partial

from typing_extensions import override

from strategies.cluster.tf_config import Cluster, ClusterError, Task
from trainer.exit_codes import EXIT_BUG, EXIT_DONE, EXIT_RESTART, EXIT_USAGE
from trainer.local.deaths import ENDED_AS_ASKED, TaskEnd
from trainer.local.group_rules import Group, Rules, Sightings, Snapshot, next_members
from trainer.local.launch_report import LaunchReport, write_resize
from trainer.local.membership import Membership, Watcher
from trainer.local.policy import Activity, FixedPolicy, Step
from trainer.local.supervisor import Supervisor
from trainer.local.task_logs import say

_FIRST_SNAPSHOTS = 4  # After them a launcher knows which others were running before it.


class ElasticPolicy(FixedPolicy):
    """Starts, restarts and ends the task of this host as the groups change."""

    def __init__(
        self, membership: Membership, rules: Rules, identity: str, *, saves_regularly: bool
    ) -> None:
        """`identity` is a hash of the code and the config, which must be equal on all hosts.

        `saves_regularly` is False if the run has no checkpoints to wait for before hosts join.
        """
        self.membership = membership
        self.identity = identity
        self._rules = rules
        self._own = membership.own
        self._num_workers = len(membership.addresses) - len(rules.servers)
        self._sightings = Sightings(self._own, identity=identity, saves_regularly=saves_regularly)
        self._num_snapshots = 0
        self._group = Group(-1, frozenset())  # The newest that was read; none yet.
        self._generation = -1  # In which the task was started last.
        self._is_regrouping = False  # The task was asked to end because the group changes.
        self._is_done = False
        self._failure = ""  # To read the group at the last look; said once.
        cluster = self._cluster_of(range(len(membership.addresses)))
        super().__init__(cluster, [cluster.task])

    @override
    def to_start(self, tasks: Collection[Task]) -> Collection[Task]:
        """Returns the task of this host in the newest group; nothing if it is not a member.

        While the group cannot be read, nothing starts: the task could be one of a former group, and
        would end at once.
        """
        if self._failure or self._own not in self._group.members:
            return ()
        self._generation = self._group.generation
        cluster = self._cluster_of(sorted(self._group.members))
        self.clusters = {cluster.task: cluster}
        return self.clusters.keys()

    @override
    def on_exit(self, task: Task, exit_code: int, activity: Activity) -> Step | None:
        # Other exit codes, such as that of a bug, would come again after a restart.
        is_unneeded = self._is_done and (exit_code < 0 or exit_code == EXIT_RESTART)
        (cluster,) = self.clusters.values()
        is_asked = is_unneeded or (self._is_regrouping and exit_code in ENDED_AS_ASKED)
        # The chief has ended its servers.
        is_asked |= cluster.is_server and not cluster.is_chief and exit_code == EXIT_RESTART
        self._is_regrouping = False
        if not is_asked or activity is Activity.ENDING:
            self._is_done |= exit_code == EXIT_DONE
            return None
        return Step.NONE if self._is_done else self._regroup(activity)

    @override
    def is_over(self) -> bool:
        return self._is_done

    @override
    def counts(self, end: TaskEnd) -> bool:
        # A task that lost another one is not the cause. The launcher of the cause counts.
        (cluster,) = self.clusters.values()
        has_lost_another = end.exit_code == EXIT_RESTART and len(cluster.trainers) > 1
        return not has_lost_another or end.was_overdue

    @override
    def ends_all_hosts(self, end: TaskEnd) -> bool:
        """What is wrong with one host does not end the others."""
        return end.exit_code in (EXIT_BUG, EXIT_USAGE)

    def on_snapshot(self, snapshot: Snapshot, activity: Activity) -> Step:
        """Returns the next step, decided from the records of all hosts.

        Raises ClusterError if the group has other hosts, or if launchers that ran before this one
        have another code or config.
        """
        self._read_group()
        if self._group.generation < 0 or activity is Activity.ENDING:
            return Step.NONE
        self._sightings.update(snapshot, self._group)
        self._num_snapshots += 1
        if self._num_snapshots <= _FIRST_SNAPSHOTS and self._sightings.others:
            # They ran before. If they had started later, they would end.
            addresses = (self.membership.addresses[h] for h in sorted(self._sightings.others))
            raise ClusterError(
                f"This run already trains on {', '.join(addresses)}, with other code or another "
                "config. Start this host with the same command, config file and version of this "
                "program."
            )
        # Launchers with another code or config have records: they may run, or be dead. A task that
        # is started now could connect to theirs, and both would end.
        may_meet_others = any(
            record.identity != self.identity and record.ended is None
            for record in snapshot.records.values()
        )
        if self._is_done or (self._num_snapshots < _FIRST_SNAPSHOTS and may_meet_others):
            return Step.NONE
        if self._sightings.is_done:
            self._is_done = True
            # The task ends by itself, unless it was just started and waits for the others.
            return Step.DONE
        return self._next_for_task() if activity is Activity.RUNNING else self._regroup(activity)

    def _read_group(self) -> None:
        try:
            group = self.membership.group()
        except OSError as error:
            if str(error) != self._failure:
                self._failure = str(error)
                say(f"The group of hosts could not be read: {error}")
            return
        self._failure = ""
        # A group is never left for an earlier one, even if the files are deleted.
        if group.generation <= self._group.generation:
            return
        self._group = group
        if group.generation:
            addresses = self.membership.addresses
            members = [addresses[host] for host in sorted(group.members)]
            others = [address for address in addresses if address not in members]
            away = f"; not {', '.join(others)}" if others else ""
            say(f"Group {group.generation} trains: {', '.join(members)}{away}.")
        if self._own not in group.members:
            say("This host asks to join. Members that reach it take it in at a checkpoint.")

    def _next_for_task(self) -> Step:
        """Ends the running task if the group changes."""
        if self._is_regrouping:
            return Step.NONE
        is_outdated = self._group.generation != self._generation
        if not is_outdated and next_members(self._group, self._sightings, self._rules) is None:
            return Step.NONE
        (cluster,) = self.clusters.values()
        if cluster.is_server:
            is_led = not is_outdated and min(self._group.members) in self._sightings.core
            if cluster.task.job == "ps" or (is_led and not cluster.is_chief):
                return Step.NONE  # The chief ends it, or it keeps the variables for the next chief.
            self._is_regrouping = True
            return Step.STOP_TOGETHER if is_led else Step.SAVE_AND_END
        self._is_regrouping = True
        # If all are there, they stop at the same step. Otherwise each saves its last complete step.
        is_whole = not is_outdated and self._sightings.core == self._group.members
        return Step.STOP_TOGETHER if is_whole else Step.SAVE_AND_END

    def _regroup(self, activity: Activity) -> Step:
        """Proposes the next group, if it must change, and starts the task, which does not run."""
        members = next_members(self._group, self._sightings, self._rules)
        is_outdated = self._group.generation != self._generation
        if activity is Activity.DELAYING and members is None and not is_outdated:
            return Step.NONE
        if members is not None:
            try:
                if self.membership.propose(self._group, members):
                    self._write_resize(members)
            except OSError as error:
                say(f"The next group of hosts could not be written: {error}")
            self._read_group()
        return Step.START

    def _write_resize(self, members: frozenset[int]) -> None:
        """Writes down that `members` follow the present group."""
        addresses, before = self.membership.addresses, self._group.members
        lost, left = before - members, self._sightings.left
        changes = (("joined", members - before), ("left", lost & left), ("away", lost - left))
        why = "; ".join(
            f"{what}: {', '.join(addresses[host] for host in sorted(hosts))}"
            for what, hosts in changes
            if hosts
        )
        workers, workers_before = (len(hosts - self._rules.servers) for hosts in (members, before))
        run_dir = self.membership.model_dir
        write_resize(run_dir, workers=workers, workers_before=workers_before, why=why)

    def _cluster_of(self, hosts: Sequence[int]) -> Cluster:
        """The cluster of the tasks of `hosts`, in ascending order, as that of this host sees it.

        Workers are numbered anew in each group; the hosts of ps tasks come last.
        """
        jobs: dict[str, dict[int, str]] = {"worker": {}, "ps": {}}
        own = Task("worker", 0)
        for host in hosts:
            job = jobs["worker" if host < self._num_workers else "ps"]
            if host == self._own:
                own = Task("worker" if job is jobs["worker"] else "ps", len(job))
            job[len(job)] = self.membership.addresses[host]
        return Cluster(jobs, own, self._generation)


def run_elastic(supervisor: Supervisor, policy: ElasticPolicy) -> LaunchReport:
    """Runs the task of this host, while a thread watches what all hosts write.

    Raises ClusterError as `ElasticPolicy.on_snapshot`, or if the files of the group cannot be used.
    """
    policy.membership.check()

    def on_snapshot(snapshot: Snapshot) -> None:
        supervisor.ask(partial(policy.on_snapshot, snapshot))

    with Watcher(policy.membership, on_snapshot, identity=policy.identity) as watcher:
        report = supervisor.run()
        watcher.end(report.exit_code)
    return report
