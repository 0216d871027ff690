"""What the launcher of an elastic host does, as tables; and two with the process of a task."""

import json
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from strategies.cluster.tf_config import ClusterError, Task
from trainer.local.deaths import TaskEnd
from trainer.local.elastic import ElasticPolicy, run_elastic
from trainer.local.group_rules import Group, HostRecord, Rules, Snapshot
from trainer.local.launch_report import LaunchReport
from trainer.local.membership import Membership
from trainer.local.policy import Activity, Step
from trainer.local.restarts import Restarts
from trainer.local.supervisor import Supervisor
from trainer.local.task_process import TaskStarter
from trainer.run_files import newest_generation

ALL = frozenset({0, 1, 2})
HOSTS = tuple(f"host-{index}.invalid:2222" for index in range(3))  # Names without an address.
KILLED = -signal.SIGKILL


class Host:
    """The policy of host 1 of three, and what it reads in snapshots, one a second."""

    def __init__(self, model_dir: Path, *members: int) -> None:
        self.files = Membership(model_dir, HOSTS, 1)
        if members:
            self.files.propose(Group(0, ALL), frozenset(members))
        self.policy = ElasticPolicy(self.files, Rules(1, 4.0), saves_regularly=False)
        self.alive = {1}
        self.identities = dict.fromkeys(ALL, "")
        self.records: dict[int, HostRecord] = {}
        self._beat = 0

    def look(self, activity: Activity = Activity.IDLE) -> Step:
        """The step after the next snapshot."""
        self._beat += 1
        for host in self.alive:
            reaches, identity = ALL - {host}, self.identities[host]
            self.records[host] = HostRecord("start", self._beat, reaches, identity=identity)
        return self.policy.on_snapshot(Snapshot(self._beat, dict(self.records), 0), activity)

    def finish(self, host: int) -> None:
        """The launcher of `host` ends with 0."""
        self.alive -= {host}
        self.records[host] = HostRecord("start", 1000, ALL - {host}, ended=0)

    def start(self) -> list[tuple[str, int | None, int]]:
        """The tasks that start now: each with the generation, and the number of workers."""
        tasks = self.policy.to_start(self.policy.clusters)
        clusters = [self.policy.clusters[task] for task in tasks]
        return [(str(c.task), c.generation, c.num("worker")) for c in clusters]


def test_task_starts_with_the_first_group_that_is_read(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert host.start() == []
    assert host.look() is Step.START
    assert host.start() == [("worker 1", 0, 3)]
    assert host.look(Activity.RUNNING) is Step.NONE


def test_launcher_with_another_config_starts_no_task_that_could_meet_others(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.alive, host.identities[0] = {0, 1}, "another"
    assert host.look() is Step.NONE
    with pytest.raises(ClusterError, match=rf"already trains on {HOSTS[0]}, with other code"):
        host.look()


def test_record_of_a_dead_launcher_with_another_config_delays_the_first_task_only(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path)
    host.records[0] = HostRecord("dead", 7, frozenset(), None, "another")
    assert [host.look() for _ in range(4)] == [Step.NONE] * 3 + [Step.START]


def test_launcher_outside_the_group_starts_no_task_and_ends_when_the_run_is_done(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path, 0)
    host.alive = {0, 1}
    for _ in range(5):
        assert host.look() in (Step.NONE, Step.START)
        assert host.start() == []
    assert not host.policy.is_over()
    host.finish(0)
    assert host.look() is Step.DONE
    assert host.policy.is_over()
    assert host.look() is Step.NONE
    assert newest_generation(tmp_path) == 1


def test_task_ends_before_a_group_without_lost_hosts_is_proposed(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.look()
    host.start()
    steps = [host.look(Activity.RUNNING) for _ in range(6)]
    assert steps == [Step.NONE] * 3 + [Step.SAVE_AND_END] + [Step.NONE] * 2
    assert newest_generation(tmp_path) == 0
    assert host.policy.on_exit(75, Activity.IDLE) is Step.START
    assert host.start() == [("worker 0", 1, 1)]
    assert newest_generation(tmp_path) == 1


def test_tasks_stop_together_when_a_host_joins(tmp_path: Path) -> None:
    host = Host(tmp_path, 1)
    host.look()
    assert host.start() == [("worker 0", 1, 1)]
    host.alive = {0, 1}
    steps = [host.look(Activity.RUNNING) for _ in range(3)]
    assert Step.STOP_TOGETHER in steps
    assert Step.SAVE_AND_END not in steps
    assert host.policy.on_exit(75, Activity.IDLE) is Step.START
    assert host.start() == [("worker 1", 2, 2)]


def test_running_task_of_a_replaced_group_saves_and_ends(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.look()
    host.start()
    host.files.propose(Group(0, ALL), frozenset({0, 1}))
    assert host.look(Activity.RUNNING) is Step.SAVE_AND_END


def test_task_that_died_is_started_after_its_delay_unless_the_group_changes(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.look()
    host.start()
    assert host.policy.on_exit(KILLED, Activity.IDLE) is None
    assert host.look(Activity.DELAYING) is Step.NONE
    host.files.propose(Group(0, ALL), frozenset({0, 1}))
    assert host.look(Activity.DELAYING) is Step.START
    assert host.start() == [("worker 1", 1, 2)]


def test_nothing_follows_from_other_hosts_while_the_run_ends(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert host.look(Activity.ENDING) is Step.NONE


@pytest.mark.parametrize(
    ("is_done", "is_regrouping", "exit_code", "activity", "step"),
    [
        # The run is complete without this task, which had no one to train with.
        (True, False, -signal.SIGSEGV, Activity.IDLE, Step.NONE),
        (True, False, 75, Activity.IDLE, Step.NONE),
        (True, False, 1, Activity.IDLE, None),
        # It was asked to end.
        (False, True, 75, Activity.IDLE, Step.START),
        (False, True, -signal.SIGTERM, Activity.IDLE, Step.START),
        (False, True, -signal.SIGUSR1, Activity.IDLE, Step.START),
        (False, True, KILLED, Activity.IDLE, Step.START),
        (False, True, 1, Activity.IDLE, None),
        (False, True, 75, Activity.ENDING, None),
        # It died.
        (False, False, KILLED, Activity.IDLE, None),
        (False, False, 75, Activity.IDLE, None),
        (False, False, 0, Activity.IDLE, None),
    ],
)
def test_end_of_a_task_that_was_asked_to_end_is_no_failure(
    is_done: bool,
    is_regrouping: bool,
    exit_code: int,
    activity: Activity,
    step: Step | None,
    tmp_path: Path,
) -> None:
    host = Host(tmp_path)
    host.alive = {0, 1}
    for _ in range(2):
        host.look()
    host.start()
    if is_regrouping:
        host.files.propose(Group(0, ALL), frozenset({0, 1}))
        assert host.look(Activity.RUNNING) is Step.SAVE_AND_END
    if is_done:
        host.finish(0)
        assert host.look(Activity.RUNNING) is Step.DONE
    assert host.policy.on_exit(exit_code, activity) is step
    assert host.policy.is_over() == (is_done or exit_code == 0)


def end_of_task(code: int, *, was_overdue: bool = False) -> TaskEnd:
    failure = f"exit code {code}"
    return TaskEnd(Task("worker", 1), False, False, 100, code, 1.0, failure, was_overdue)


@pytest.mark.parametrize(
    ("members", "end", "counts"),
    [
        ((0, 1, 2), end_of_task(KILLED), True),
        # The task has lost another one. The launcher of that task counts.
        ((0, 1, 2), end_of_task(75), False),
        ((0, 1, 2), end_of_task(75, was_overdue=True), True),
        # The only task of a group has lost no other.
        ((1,), end_of_task(75), True),
    ],
)
def test_limit_of_restarts_is_for_the_cause_only(
    members: tuple[int, ...], end: TaskEnd, counts: bool, tmp_path: Path
) -> None:
    host = Host(tmp_path, *members)
    host.look()
    assert host.start()
    assert host.policy.counts(end) == counts


@pytest.mark.parametrize(("code", "ends_all"), [(1, True), (2, True), (75, False), (KILLED, False)])
def test_only_what_is_wrong_everywhere_ends_all_hosts(
    code: int, ends_all: bool, tmp_path: Path
) -> None:
    assert Host(tmp_path).policy.ends_all_hosts(end_of_task(code)) == ends_all


# A stand-in for a task: it notes its cluster, and ends as a task does.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from trainer.guards.parent_watch import watch_parent
watch_parent()
model_dir = Path(sys.argv[-1].removeprefix("--model_dir="))
config = json.loads(os.environ["TF_CONFIG"])
config["ended_by"] = 0
notes = model_dir / "starts.jsonl"
def end(signum, frame):
    with notes.open("a") as file:
        file.write(json.dumps({**config, "ended_by": int(signum)}) + "\\n")
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, end)
"""
RunHost: TypeAlias = Callable[[str, float], LaunchReport]


@pytest.fixture
def run_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunHost:
    """Runs the launcher of host 1 of three; its task has the body after PROGRAM."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr("trainer.local.membership._POLL_SECS", 0.05)
    monkeypatch.setattr("trainer.local.restarts._FIRST_DELAY_SECS", 0.01)

    def run(body: str, rejoin_secs: float) -> LaunchReport:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM + textwrap.dedent(body))
        membership = Membership(tmp_path, HOSTS, 1)
        policy = ElasticPolicy(membership, Rules(1, rejoin_secs), saves_regularly=False)
        starter = TaskStarter([f"--model_dir={tmp_path}"], command=[sys.executable, str(program)])
        restarts = Restarts(3, lambda: (0, 0))
        return run_elastic(
            Supervisor(policy, starter, tmp_path, restarts, host="host-1", grace_secs=5.0), policy
        )

    return run


def starts(model_dir: Path) -> list[tuple[int, int, int, int]]:
    """Of each task: the generation, the number of workers, its index, and the signal it got."""
    lines = map(json.loads, (model_dir / "starts.jsonl").read_text().splitlines())
    return [
        (d["generation"], len(d["cluster"]["worker"]), d["task"]["index"], d["ended_by"])
        for d in lines
    ]


def test_file_system_without_hard_links_is_explained_before_a_task_starts(
    tmp_path: Path, run_host: RunHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(ClusterError, match="hard links"):
        run_host("(model_dir / 'runs').touch()", 100.0)
    assert not (tmp_path / "runs").exists(), "a task was started"
    assert not list((tmp_path / "membership").iterdir())


def test_launcher_ends_its_task_and_starts_it_in_a_group_without_lost_hosts(
    tmp_path: Path, run_host: RunHost
) -> None:
    body = """
    if len(config["cluster"]["worker"]) > 1:
        time.sleep(60)
    with notes.open("a") as file:
        file.write(json.dumps(config) + "\\n")
    """
    report = run_host(body, 4.0)
    assert report.exit_code == 0
    usr1 = 10  # The other workers, if there were any, would save their last complete step.
    assert starts(tmp_path) == [(0, 3, 1, usr1), (1, 1, 0, 0)]
    assert not report.restarts, "a change of the group is no failure"
    assert Membership(tmp_path, HOSTS, 1).records()[1].ended == 0


def test_task_that_waits_for_others_ends_when_the_run_is_done(
    tmp_path: Path, run_host: RunHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_when_the_task_runs() -> None:
        """Writes as the launcher of host 0, which ends with 0 when the task of host 1 runs."""
        other, beat = Membership(tmp_path, HOSTS, 0), 0
        while not (tmp_path / "runs").exists():
            other.write(HostRecord("start", beat := beat + 1, frozenset()))
            time.sleep(0.05)
        other.write(HostRecord("start", beat + 1, frozenset(), ended=0))

    monkeypatch.setattr("trainer.local.supervisor._DONE_SECS", 0.1)
    thread = threading.Thread(target=end_when_the_task_runs)
    thread.start()
    report = run_host("(model_dir / 'runs').touch(); time.sleep(60)", 100.0)
    thread.join()
    assert report.exit_code == 0
    assert starts(tmp_path) == [(0, 3, 1, signal.SIGTERM)]


def test_task_that_dies_too_often_but_not_one_that_loses_others_ends_the_launcher_of_its_host(
    tmp_path: Path, run_host: RunHost
) -> None:
    body = """
    with (model_dir / "count").open("a") as count:
        count.write(".")
    if (model_dir / "count").stat().st_size <= 4:
        sys.exit(75)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    report = run_host(body, 100.0)
    assert [end.exit_code for end in report.tasks] == [75] * 4 + [KILLED] * 4
    assert report.exit_code == 75
    lines = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert not any(line["ends_run"] for line in lines)
