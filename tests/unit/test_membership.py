"""The files on which launchers agree who trains."""

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strategies.cluster.ports import free_ports, held
from strategies.cluster.tf_config import ClusterError
from strategies.lost_peers import PeerLostError
from strategies.metrics import Metrics
from trainer.hooks.stops import StopIfReplaced
from trainer.local.group_rules import Group, HostRecord, Snapshot
from trainer.local.membership import Membership, Watcher
from trainer.run_files import newest_generation

ADDRESSES = ("a:2222", "b:2222", "c:2222")
ALL = frozenset({0, 1, 2})


def test_first_group_has_all_hosts_and_needs_no_file(tmp_path: Path) -> None:
    assert Membership(tmp_path, ADDRESSES, 0).group() == Group(0, ALL)
    assert newest_generation(tmp_path) == 0


def test_of_many_proposals_for_a_generation_one_holds_for_all(tmp_path: Path) -> None:
    ours = [Membership(tmp_path, ADDRESSES, host) for host in range(3)]
    start = threading.Barrier(3)

    def propose(host: int) -> bool:
        start.wait()
        return ours[host].propose(Group(0, ALL), ALL - {host})

    with ThreadPoolExecutor(3) as pool:
        (first,) = itertools.compress(range(3), pool.map(propose, range(3)))
    assert {one.group() for one in ours} == {Group(1, ALL - {first})}
    assert os.listdir(tmp_path / "membership") == ["group-00000001.json"]
    assert ours[0].propose(ours[0].group(), ALL)
    assert ours[1].group() == Group(2, ALL)


def test_group_of_another_list_of_hosts_is_explained(tmp_path: Path) -> None:
    Membership(tmp_path, ADDRESSES, 0).propose(Group(0, ALL), ALL)
    with pytest.raises(ClusterError, match=r"--hosts=a:2222,b:2222,c:2222.*rm -r "):
        Membership(tmp_path, ADDRESSES[:2], 0).group()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"hosts": ["a:2222"]}', '{"hosts": [], "members": ["b"]}']
)
def test_damaged_group_is_named_with_what_to_do(text: str, tmp_path: Path) -> None:
    (tmp_path / "membership").mkdir()
    (tmp_path / "membership" / "group-00000001.json").write_text(text)
    with pytest.raises(OSError, match=r"group-00000001\.json is damaged: .*rm -r "):
        Membership(tmp_path, ADDRESSES, 0).group()


def test_directory_of_the_group_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    membership = Membership(tmp_path, ADDRESSES, 0)
    membership.check()
    assert os.listdir(tmp_path / "membership") == []
    (tmp_path / "membership").rmdir()
    (tmp_path / "membership").touch()
    with pytest.raises(ClusterError, match="membership, where this host cannot write: "):
        membership.check()


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


def test_slow_connection_keeps_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
