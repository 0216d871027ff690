"""What the launcher of an elastic host does, as tables, and with the process of a task."""

import signal
import threading
import time
from pathlib import Path

import pytest

from strategies.cluster.tf_config import ClusterError, Task
from tests.unit.stand_ins import KILLED, lines_of, no_progress, notes, starter
from trainer.local.deaths import TaskEnd
from trainer.local.elastic import ElasticPolicy, run_elastic
from trainer.local.group_rules import Group, HostRecord, Rules, Sightings, Snapshot, next_members
from trainer.local.launch_report import LaunchReport
from trainer.local.membership import Membership
from trainer.local.policy import Activity, Step
from trainer.local.supervisor import Supervisor
from trainer.run_files import newest_generation

ALL = frozenset({0, 1, 2})
PS = frozenset({2})
HOSTS = tuple(f"host-{index}.invalid:2222" for index in range(3))  # Names without an address.


class Host:
    """The policy of a host of three, and what it reads in snapshots, one a second.

    Under ps, host 2 has the ps: `servers`.
    """

    def __init__(
        self,
        model_dir: Path,
        *members: int,
        rejoin_secs: float = 4.0,
        own: int = 1,
        servers: frozenset[int] = frozenset(),
    ) -> None:
        self.files = Membership(model_dir, HOSTS, own)
        if members:
            self.files.propose(Group(0, ALL), frozenset(members))
        rules = Rules(1, rejoin_secs, servers)
        self.policy = ElasticPolicy(self.files, rules, "", saves_regularly=False)
        self.alive = {own}
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

    def begin(self, *alive: int) -> list[tuple[str, int | None, int]]:
        """The tasks that start after a snapshot in which the hosts `alive` are there, too."""
        self.alive |= set(alive)
        self.look()
        return self.start()


def test_task_starts_with_the_first_group_that_is_read(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert host.start() == []
    assert host.look(Activity.ENDING) is Step.NONE
    assert host.look() is Step.START
    assert host.start() == [("worker 1", 0, 3)]
    assert host.look(Activity.RUNNING) is Step.NONE


def test_group_that_cannot_be_read_is_said_once_and_starts_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = Host(tmp_path)
    group = tmp_path / "membership" / "group-00000001.json"
    group.parent.mkdir()
    group.write_text("{")
    assert [host.look(), host.look()] == [Step.NONE] * 2
    assert capfd.readouterr().err.count("group-00000001.json is damaged") == 1
    group.unlink()
    assert host.look() is Step.START


def test_task_that_ends_while_the_group_is_damaged_starts_when_it_can_be_read(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path)
    assert host.begin() == [("worker 1", 0, 3)]
    group = tmp_path / "membership" / "group-00000001.json"
    group.parent.mkdir(exist_ok=True)
    group.write_text("{")
    assert host.look(Activity.RUNNING) is Step.NONE
    assert host.policy.on_exit(Task("worker", 1), 75, Activity.IDLE) is None
    assert host.start() == [], "the restart that the supervisor has planned"
    assert host.begin() == []
    group.unlink()
    host.files.propose(Group(0, ALL), frozenset({0, 1}))
    assert host.begin() == [("worker 1", 1, 2)]


def test_outage_that_comes_again_is_said_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = Host(tmp_path)
    group = tmp_path / "membership" / "group-00000001.json"
    for _ in range(2):
        group.mkdir(parents=True)
        # However long storage fails, the launcher waits.
        assert {host.look(Activity.RUNNING) for _ in range(10)} == {Step.NONE}
        group.rmdir()
        host.look(Activity.RUNNING)
    assert capfd.readouterr().err.count("could not be read") == 2


def test_damaged_file_of_the_group_is_explained_before_a_task_starts(tmp_path: Path) -> None:
    group = tmp_path / "membership" / "group-00000001.json"
    group.parent.mkdir()
    group.write_text("{")
    with pytest.raises(ClusterError, match=r"group-00000001\.json is damaged: .*rm -r "):
        run_host(tmp_path, "note('runs')")
    assert not notes(tmp_path, "runs"), "a task was started"


def test_launcher_with_another_config_starts_no_task_that_could_meet_others(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.alive, host.identities[0] = {0, 1}, "another"
    assert host.look() is Step.NONE
    with pytest.raises(ClusterError, match=rf"already trains on {HOSTS[0]}, with other code"):
        host.look()

    host = Host(tmp_path)  # The launcher is dead: its record delays the first task only.
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


def test_tasks_stop_together_when_a_host_joins(tmp_path: Path) -> None:
    host = Host(tmp_path, 1)
    assert host.begin() == [("worker 0", 1, 1)]
    host.alive = {0, 1}
    steps = [host.look(Activity.RUNNING) for _ in range(3)]
    assert Step.STOP_TOGETHER in steps
    assert Step.SAVE_AND_END not in steps
    assert host.policy.on_exit(Task("worker", 1), 75, Activity.IDLE) is Step.START
    assert host.start() == [("worker 1", 2, 2)]


def test_chief_of_ps_stops_when_a_host_joins_and_servers_wait_for_the_chief(tmp_path: Path) -> None:
    chief, ps = (Host(tmp_path, 0, 2, own=own, servers=PS) for own in (0, 2))
    for host, task in ((chief, "worker 0"), (ps, "ps 0")):
        assert host.begin(0, 2) == [(task, 1, 1)]
        assert host.look(Activity.RUNNING) is Step.NONE
        host.alive = {0, 1, 2}
    assert Step.STOP_TOGETHER in [chief.look(Activity.RUNNING) for _ in range(3)]
    assert [ps.look(Activity.RUNNING) for _ in range(3)] == [Step.NONE] * 3
    # The chief has ended it.
    assert ps.policy.on_exit(Task("ps", 0), 75, Activity.IDLE) is Step.START
    assert ps.start() == [("ps 0", 2, 2)]
    assert chief.policy.on_exit(Task("worker", 0), 75, Activity.IDLE) is Step.START
    assert chief.start() == [("worker 0", 2, 2)]
    (line,) = lines_of(tmp_path / "failures.jsonl")
    assert (line["workers_before"], line["workers"]) == (1, 2)
    assert line["why"] == f"joined: {HOSTS[1]}"


def test_worker_of_ps_takes_over_from_a_lost_chief_while_the_ps_serves_on(tmp_path: Path) -> None:
    worker, ps = (Host(tmp_path, own=own, servers=PS) for own in (1, 2))
    for host, task in ((worker, "worker 1"), (ps, "ps 0")):
        assert host.begin(0, 1, 2) == [(task, 0, 2)]
        assert host.look(Activity.RUNNING) is Step.NONE
        host.alive = {1, 2}
    assert Step.SAVE_AND_END in [worker.look(Activity.RUNNING) for _ in range(12)]
    assert worker.policy.on_exit(Task("worker", 1), -signal.SIGUSR1, Activity.IDLE) is Step.START
    assert worker.start() == [("worker 0", 1, 1)]
    assert {ps.look(Activity.RUNNING) for _ in range(12)} == {Step.NONE}


def test_worker_of_ps_whose_launcher_ends_is_left_out_at_once(tmp_path: Path) -> None:
    host = Host(tmp_path, own=0, servers=PS, rejoin_secs=1000.0)
    host.records[1] = HostRecord("former", 9, ALL - {1}, ended=75)
    assert host.begin(2) == [("worker 0", 0, 2)]
    # The record was there before: that host may start a little later than this one.
    assert {host.look(Activity.RUNNING) for _ in range(12)} == {Step.NONE}
    host.alive = {0, 1, 2}
    assert host.look(Activity.RUNNING) is Step.NONE
    host.alive, host.records[1] = {0, 2}, HostRecord("start", 1000, ALL - {1}, ended=75)
    assert host.look(Activity.RUNNING) is Step.STOP_TOGETHER
    assert host.policy.on_exit(Task("worker", 0), 75, Activity.IDLE) is Step.START
    assert host.start() == [("worker 0", 1, 1)]
    (line,) = lines_of(tmp_path / "failures.jsonl")
    assert line["why"] == f"left: {HOSTS[1]}"


def test_group_waits_for_a_lost_ps_and_min_workers_counts_workers(tmp_path: Path) -> None:
    host = Host(tmp_path, own=0, servers=PS)
    host.begin(1, 2)
    host.look(Activity.RUNNING)
    host.alive = {0, 1}
    assert {host.look(Activity.RUNNING) for _ in range(12)} == {Step.NONE}
    assert newest_generation(tmp_path) == 0
    rules = Rules(2, 4.0, PS)
    sightings = Sightings(0)
    for beat in range(12):  # Hosts 0 and 2: one worker.
        records = {h: HostRecord("start", beat, ALL - {h}) for h in (0, 2)}
        sightings.update(Snapshot(beat, records, 0), Group(0, ALL))
    assert next_members(Group(0, ALL), sightings, rules) is None
    one = rules._replace(min_workers=1)
    assert next_members(Group(0, ALL), sightings, one) == frozenset({0, 2})


def test_task_that_died_is_started_after_its_delay_unless_the_group_changes(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.begin()
    assert host.policy.on_exit(Task("worker", 1), KILLED, Activity.IDLE) is None
    assert host.look(Activity.DELAYING) is Step.NONE
    host.files.propose(Group(0, ALL), frozenset({0, 1}))
    assert host.look(Activity.DELAYING) is Step.START
    assert host.start() == [("worker 1", 1, 2)]


@pytest.mark.parametrize(
    ("run", "exit_code", "activity", "step"),
    [
        # The run is complete without this task, which had no one to train with.
        ("done", -signal.SIGSEGV, Activity.IDLE, Step.NONE),
        ("done", 75, Activity.IDLE, Step.NONE),
        ("done", 1, Activity.IDLE, None),
        # It was asked to end.
        ("regrouping", 75, Activity.IDLE, Step.START),
        ("regrouping", -signal.SIGTERM, Activity.IDLE, Step.START),
        ("regrouping", -signal.SIGUSR1, Activity.IDLE, Step.START),
        ("regrouping", KILLED, Activity.IDLE, Step.START),
        ("regrouping", 1, Activity.IDLE, None),
        ("regrouping", 75, Activity.ENDING, None),
        # It died.
        ("training", KILLED, Activity.IDLE, None),
        ("training", 0, Activity.IDLE, None),
    ],
)
def test_end_of_a_task_that_was_asked_to_end_is_no_failure(
    run: str, exit_code: int, activity: Activity, step: Step | None, tmp_path: Path
) -> None:
    host = Host(tmp_path)
    host.begin(0)
    host.look()
    if run == "regrouping":
        host.files.propose(Group(0, ALL), frozenset({0, 1}))
        assert host.look(Activity.RUNNING) is Step.SAVE_AND_END
    if run == "done":
        host.finish(0)
        assert host.look(Activity.RUNNING) is Step.DONE
    assert host.policy.on_exit(Task("worker", 1), exit_code, activity) is step
    assert host.policy.is_over() == (run == "done" or exit_code == 0)


@pytest.mark.parametrize(
    ("is_alone", "exit_code", "was_overdue", "counts", "ends_all"),
    [
        (False, KILLED, False, True, False),
        # The task has lost another one. The launcher of that task counts.
        (False, 75, False, False, False),
        (False, 75, True, True, False),
        # The only task of a group has lost no other.
        (True, 75, False, True, False),
        # Errors that other hosts have, too.
        (False, 1, False, True, True),
        (False, 2, False, True, True),
    ],
)
def test_limit_of_restarts_is_for_the_cause_and_only_errors_everywhere_end_all_hosts(
    is_alone: bool, exit_code: int, was_overdue: bool, counts: bool, ends_all: bool, tmp_path: Path
) -> None:
    members = (1,) if is_alone else (0, 1, 2)
    host = Host(tmp_path, *members)
    assert host.begin()
    task = Task("worker", members.index(1))
    end = TaskEnd(task, False, False, 100, exit_code, 1.0, "failure", was_overdue)
    assert (host.policy.counts(end), host.policy.ends_all_hosts(end)) == (counts, ends_all)


# The head of each program: the task notes in which cluster it ended, and by which signal.
HEAD = """
def end(signum, frame=None):
    note(f"ended-{config['generation']}-{len(config['cluster'][job])}-{int(signum)}")
    sys.exit(75 if signum else 0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, end)
"""


@pytest.fixture(autouse=True)
def is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.local.membership._POLL_SECS", 0.05)
    monkeypatch.setattr("trainer.local.deaths._FIRST_DELAY_SECS", 0.01)


def run_host(model_dir: Path, body: str, rejoin_secs: float = 100.0) -> LaunchReport:
    """Runs the launcher of host 1 of three."""
    policy = Host(model_dir, rejoin_secs=rejoin_secs).policy
    program, restarts = starter(model_dir, HEAD + body), no_progress(3)
    supervisor = Supervisor(policy, program, model_dir, restarts, host="b", grace_secs=5.0)
    return run_elastic(supervisor, policy)


def test_file_system_without_hard_links_is_explained_before_a_task_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(ClusterError, match="hard links"):
        Membership(tmp_path, HOSTS, 1).propose(Group(0, ALL), ALL)
    with pytest.raises(ClusterError, match="hard links"):
        run_host(tmp_path, "note('runs')")
    assert not notes(tmp_path, "runs"), "a task was started"
    assert not list((tmp_path / "membership").iterdir())


def test_launcher_ends_its_task_and_starts_it_in_a_group_without_lost_hosts(tmp_path: Path) -> None:
    report = run_host(tmp_path, "time.sleep(60 * (len(config['cluster'][job]) - 1)); end(0)", 2.0)
    assert report.exit_code == 0
    # SIGUSR1: the other workers, if there were any, would save their last complete step.
    assert set(notes(tmp_path, "ended")) == {"0-3-10-worker-1", "1-1-0-worker-0"}
    assert [path.read_text() for path in tmp_path.glob("starts-*")] == [".", "."]
    assert not report.restarts, "a change of the group is no failure"
    assert Membership(tmp_path, HOSTS, 1).records()[1].ended == 0


def test_task_that_waits_for_others_ends_when_the_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_when_the_task_runs() -> None:
        """Writes as the launcher of host 0, which ends with 0 when the task of host 1 runs."""
        other, beat = Membership(tmp_path, HOSTS, 0), 0
        while not notes(tmp_path, "runs"):
            other.write(HostRecord("start", beat := beat + 1, frozenset()))
            time.sleep(0.05)
        other.write(HostRecord("start", beat + 1, frozenset(), ended=0))

    monkeypatch.setattr("trainer.local.supervisor._DONE_SECS", 0.1)
    thread = threading.Thread(target=end_when_the_task_runs)
    thread.start()
    report = run_host(tmp_path, "note('runs'); time.sleep(60)")
    thread.join()
    assert report.exit_code == 0
    assert set(notes(tmp_path, "ended")) == {"0-3-15-worker-1"}


def test_task_that_dies_too_often_but_not_one_that_loses_others_ends_the_launcher_of_its_host(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = run_host(tmp_path, "end(0) if start > 8 else sys.exit(75) if start < 5 else die()")
    assert [end.exit_code for end in report.tasks] == [75] * 4 + [KILLED] * 4
    assert report.exit_code == 75
    assert report.first_failure
    assert not report.first_failure.survived
    errors = capfd.readouterr().err
    assert errors.count("Restarting worker 1 now.") == 1
    assert "Restarting worker 1 in 0.01 s." in errors
    assert "3 restarts within 10 minutes (--max_restarts)" in errors
    lines = lines_of(tmp_path / "failures.jsonl")
    found = [(line["host"], line["exit_code"], line["ends_run"]) for line in lines]
    assert found == [("b", KILLED, False)] * 4
