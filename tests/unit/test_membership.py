"""The files on which launchers agree who trains, and a launcher that follows them."""

import json
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from strategies.cluster.ports import free_ports, held
from strategies.cluster.tf_config import ClusterError
from strategies.lost_peers import PeerLostError
from strategies.metrics import Metrics
from trainer.hooks.newest_group import StopIfReplaced
from trainer.local.elastic import ElasticPolicy, run_elastic
from trainer.local.group_rules import Group, HostRecord, Rules, Snapshot
from trainer.local.launch_report import LaunchReport
from trainer.local.membership import Membership, Watcher
from trainer.local.restarts import Restarts
from trainer.local.supervisor import Supervisor
from trainer.local.task_process import TaskStarter
from trainer.run_files import newest_generation

ADDRESSES = ("a:2222", "b:2222", "c:2222")
ALL = frozenset({0, 1, 2})
HOSTS = tuple(f"host-{index}.invalid:2222" for index in range(3))  # Names without an address.


def test_first_group_has_all_hosts_and_needs_no_file(tmp_path: Path) -> None:
    assert Membership(tmp_path, ADDRESSES, 0).group() == Group(0, ALL)
    assert newest_generation(tmp_path) == 0


def test_of_many_proposals_for_a_generation_one_holds_for_all(tmp_path: Path) -> None:
    ours = [Membership(tmp_path, ADDRESSES, host) for host in range(3)]
    start = threading.Barrier(3)
    was_first: list[int] = []

    def propose(host: int) -> None:
        start.wait()
        if ours[host].propose(Group(0, ALL), ALL - {host}):
            was_first.append(host)

    threads = [threading.Thread(target=propose, args=(host,)) for host in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first,) = was_first
    assert {one.group() for one in ours} == {Group(1, ALL - {first})}
    assert os.listdir(tmp_path / "membership") == ["group-00000001.json"]
    assert ours[0].propose(ours[0].group(), ALL)
    assert ours[1].group() == Group(2, ALL)


def test_group_of_another_list_of_hosts_is_explained(tmp_path: Path) -> None:
    Membership(tmp_path, ADDRESSES, 0).propose(Group(0, ALL), ALL)
    with pytest.raises(ClusterError, match=r"--hosts=a:2222,b:2222,c:2222.*rm -r "):
        Membership(tmp_path, ADDRESSES[:2], 0).group()


def test_file_system_without_hard_links_is_explained_before_a_task_starts(
    tmp_path: Path, run_host: Callable[..., LaunchReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ClusterError, match="hard links"):
        Membership(tmp_path, ADDRESSES, 0).propose(Group(0, ALL), ALL)
    assert os.listdir(tmp_path / "membership") == []
    with pytest.raises(ClusterError, match="hard links"):
        run_host("(model_dir / 'runs').touch()", rejoin_secs=100.0)
    assert not (tmp_path / "runs").exists(), "a task was started"
    assert os.listdir(tmp_path / "membership") == []


def test_directory_of_the_group_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    membership = Membership(tmp_path, ADDRESSES, 0)
    membership.check_hard_links()
    assert os.listdir(tmp_path / "membership") == []
    (tmp_path / "membership").rmdir()
    (tmp_path / "membership").touch()
    with pytest.raises(ClusterError, match="membership, where this host cannot write: "):
        membership.check_hard_links()


def test_records_of_hosts_are_read_as_written(tmp_path: Path) -> None:
    ours = [Membership(tmp_path, ADDRESSES, host) for host in range(3)]
    long, short = HostRecord("x" * 2000, 1, ALL), HostRecord("y", 2, frozenset(), ended=75)
    ours[1].write(long)
    assert ours[0].records() == {1: long}
    ours[1].write(short)
    (tmp_path / "membership/host-2.json").write_text('{"start": "half')
    assert ours[0].records() == {1: short}


def test_watcher_tells_which_hosts_are_reached(tmp_path: Path) -> None:
    open_port, closed_port = free_ports(2)
    ports = (1, open_port, closed_port)
    addresses = (*(f"localhost:{port}" for port in ports), "no.invalid:1")
    snapshots: list[Snapshot] = []
    came = threading.Event()

    def on_snapshot(snapshot: Snapshot) -> None:
        snapshots.append(snapshot)
        came.set()

    membership = Membership(tmp_path, addresses, 0)
    with held(open_port), Watcher(membership, on_snapshot) as watcher:
        assert came.wait(20)
        watcher.end(0)
    # A host that refuses connections is there; its task may be about to start.
    assert snapshots[0].records[0].reaches == {1, 2}
    assert membership.records()[0].ended == 0
    assert membership.records()[0].beat > snapshots[-1].records[0].beat


def test_record_of_the_end_stays_if_a_connection_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_tried, may_answer = threading.Event(), threading.Event()

    def answer_late(address: str) -> bool:
        is_tried.set()
        return may_answer.wait(20)

    monkeypatch.setattr("trainer.local.membership.is_reachable", answer_late)
    monkeypatch.setattr("trainer.local.membership._POLL_SECS", 0.05)
    membership = Membership(tmp_path, ADDRESSES, 0)
    with Watcher(membership, lambda snapshot: None) as watcher:
        assert is_tried.wait(20)
        watcher.end(0)
    may_answer.set()
    watcher._thread.join(20)
    assert not watcher._thread.is_alive()
    assert membership.records()[0].ended == 0


def test_chief_of_a_replaced_group_stops_before_it_writes(tmp_path: Path) -> None:
    membership = Membership(tmp_path, ADDRESSES, 0)
    hook = StopIfReplaced(str(tmp_path), 1)
    membership.propose(Group(0, ALL), ALL)
    hook.begin(0)
    hook(10, Metrics())
    membership.propose(Group(1, ALL), ALL)
    with pytest.raises(PeerLostError, match="group 2"):
        hook(20, Metrics())


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


@pytest.fixture
def run_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LaunchReport]:
    """Runs the launcher of host 1 of three; `body` is what its task does after PROGRAM."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr("trainer.local.membership._POLL_SECS", 0.05)

    def run(body: str, rejoin_secs: float) -> LaunchReport:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM + textwrap.dedent(body))
        membership = Membership(tmp_path, HOSTS, 1)
        policy = ElasticPolicy(membership, Rules(1, rejoin_secs), saves_regularly=False)
        command = [sys.executable, str(program)]
        starter = TaskStarter([f"--model_dir={tmp_path}"], command=command)
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


def test_launcher_with_another_config_starts_no_task_that_could_meet_others(
    tmp_path: Path, run_host: Callable[..., LaunchReport]
) -> None:
    body = """
    notes.with_name("started").touch()
    """
    first = Membership(tmp_path, HOSTS, 0)
    with Watcher(first, lambda snapshot: None, identity="another"):
        while not first.records():
            time.sleep(0.01)
        with pytest.raises(ClusterError, match=rf"already trains on {HOSTS[0]}, with other code"):
            run_host(body, rejoin_secs=60.0)
    assert not (tmp_path / "started").exists()


def test_record_of_a_dead_launcher_with_another_config_delays_the_first_task_only(
    tmp_path: Path, run_host: Callable[..., LaunchReport]
) -> None:
    Membership(tmp_path, HOSTS, 0).write(HostRecord("dead", 7, frozenset(), None, "another"))
    report = run_host("""sys.exit(0)""", rejoin_secs=60.0)
    assert report.exit_code == 0


def test_launcher_ends_its_task_before_it_proposes_a_group_without_lost_hosts(
    tmp_path: Path, run_host: Callable[..., LaunchReport]
) -> None:
    body = """
    if len(config["cluster"]["worker"]) > 1:
        time.sleep(60)
    with notes.open("a") as file:
        file.write(json.dumps(config) + "\\n")
    """
    report = run_host(body, rejoin_secs=4.0)
    assert report.exit_code == 0
    usr1 = 10  # The other workers, if there were any, would save their last complete step.
    assert starts(tmp_path) == [(0, 3, 1, usr1), (1, 1, 0, 0)]
    assert not report.restarts, "a change of the group is no failure"
    assert Membership(tmp_path, HOSTS, 1).records()[1].ended == 0


def test_launcher_outside_the_group_starts_no_task_and_ends_when_the_run_is_done(
    tmp_path: Path, run_host: Callable[..., LaunchReport]
) -> None:
    other = Membership(tmp_path, HOSTS, 0)
    other.propose(Group(0, ALL), frozenset({0}))

    def train() -> None:
        for beat in range(20):
            other.write(HostRecord("start", beat, frozenset()))
            is_over.wait(0.1)
        other.write(HostRecord("start", 100, frozenset(), ended=0))

    is_over = threading.Event()
    thread = threading.Thread(target=train)
    thread.start()
    report = run_host("sys.exit(1)", rejoin_secs=100.0)
    is_over.set()
    thread.join()
    assert report.exit_code == 0
    assert report.tasks == ()
    assert newest_generation(tmp_path) == 1


def end_when_the_task_runs(model_dir: Path) -> None:
    """Writes as the launcher of host 0, which ends with 0 when the task of host 1 runs."""
    other, beat = Membership(model_dir, HOSTS, 0), 0
    while not (model_dir / "runs").exists():
        other.write(HostRecord("start", beat := beat + 1, frozenset()))
        time.sleep(0.05)
    other.write(HostRecord("start", beat + 1, frozenset(), ended=0))


def test_task_that_waits_for_others_ends_when_the_run_is_done(
    tmp_path: Path, run_host: Callable[..., LaunchReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._DONE_SECS", 0.1)
    thread = threading.Thread(target=end_when_the_task_runs, args=[tmp_path])
    thread.start()
    report = run_host("(model_dir / 'runs').touch(); time.sleep(60)", rejoin_secs=100.0)
    thread.join()
    assert report.exit_code == 0
    assert starts(tmp_path) == [(0, 3, 1, 15)]


def test_task_that_loses_others_too_often_does_not_end_its_launcher(
    tmp_path: Path, run_host: Callable[..., LaunchReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.restarts._FIRST_DELAY_SECS", 0.01)
    body = """
    with (model_dir / "count").open("a") as count:
        count.write(".")
    sys.exit(75 if (model_dir / "count").stat().st_size <= 6 else 0)
    """
    report = run_host(body, rejoin_secs=100.0)
    assert [end.exit_code for end in report.tasks] == [75] * 6 + [0]
    assert report.exit_code == 0


def test_only_task_of_a_group_has_lost_no_other_when_it_ends_with_75(
    tmp_path: Path, run_host: Callable[..., LaunchReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.restarts._FIRST_DELAY_SECS", 0.01)
    Membership(tmp_path, HOSTS, 1).propose(Group(0, ALL), frozenset({1}))
    report = run_host("sys.exit(75)", rejoin_secs=100.0)
    assert report.exit_code == 75
    assert len(report.tasks) == 4


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGSEGV)", "sys.exit(75)"])
def test_task_that_dies_when_the_run_is_done_is_not_restarted(
    tmp_path: Path, run_host: Callable[..., LaunchReport], end: str
) -> None:
    thread = threading.Thread(target=end_when_the_task_runs, args=[tmp_path])
    thread.start()
    body = f"""
    (model_dir / "runs").touch()
    while '"ended": 0' not in (model_dir / "membership/host-0.json").read_text():
        time.sleep(0.05)
    time.sleep(3)  # The launcher reads it, too.
    {end}
    """
    report = run_host(body, rejoin_secs=100.0)
    thread.join()
    assert report.exit_code == 0
    assert not report.restarts


def test_task_that_dies_too_often_ends_only_the_launcher_of_its_host(
    tmp_path: Path, run_host: Callable[..., LaunchReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.restarts._FIRST_DELAY_SECS", 0.01)
    report = run_host("os.kill(os.getpid(), signal.SIGKILL)", rejoin_secs=100.0)
    assert report.exit_code == 75
    assert len(report.tasks) == 4
    lines = map(json.loads, (tmp_path / "failures.jsonl").read_text().splitlines())
    assert not any(line["ends_run"] for line in lines)
