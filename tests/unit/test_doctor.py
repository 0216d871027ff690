"""What the doctor concludes from the reports of the tasks, and what it measures."""

import contextlib
import os
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.system.memory import free_memory_bytes
from strategies.cluster.ports import free_ports, held
from strategies.cluster.tf_config import Cluster, Task
from strategies.ps.placement import Group, place
from tests.unit.stand_ins import wait_for
from trainer.config import load_recipe
from trainer.doctor import __main__ as command
from trainer.doctor.exchange import Exchange, Json
from trainer.doctor.findings import Finding, can_connect, findings
from trainer.doctor.plan import (
    _loads_with_standby,
    mark_in,
    place_fault,
    plan_in_child,
    shared_fault,
)
from trainer.doctor.table import _tasks, text

ADDRESSES = {"worker 0": "a:2222", "worker 1": "b:2222", "worker 2": "c:2222"}
JOBS = {"worker": dict(enumerate(ADDRESSES.values()))}
CLUSTER = Cluster(JOBS, Task("worker", 0))
FREE = 8 << 30


def healthy() -> dict[str, Any]:
    """The reports of three tasks without a fault."""
    met = {"state": "met", "latency_ms": 0.2, "mb_per_sec": 100.0, "clock_secs": 0.001}
    met["rounds_mb_per_sec"] = [90.0, 95.0, 100.0]
    needed = dict.fromkeys(ADDRESSES, 1 << 30)
    return {
        name: {
            "task": name,
            "host": address[0],
            "machine": address[0],
            "address": address,
            "addresses": dict(ADDRESSES),
            "free_memory_bytes": FREE,
            "free_disk_bytes": 1 << 40,
            "cores": 4,
            "outgoing_ports": [32768, 60999],
            "versions": {"tensorflow": "2.21.0", "code of this program": "abc"},
            "fingerprint": {"--config.seed": 1, "config file": 2},
            "meetings": {other: dict(met) for other in ADDRESSES if other != name},
            "plan": {"gpus": 0, "memory_bytes": needed, "disk_bytes": 1000},
            "faults": [],
        }
        for name, address in ADDRESSES.items()
    }


def without_worker_2() -> dict[str, Any]:
    reports = healthy()
    del reports["worker 2"]
    for report in reports.values():
        del report["meetings"]["worker 2"]
    return reports


def found_in(reports: dict[str, Any]) -> list[Finding]:
    return findings(reports, CLUSTER, deadline_secs=30.0)


def only(reports: dict[str, Any]) -> Finding:
    (finding,) = found_in(reports)
    return finding


def assert_only(reports: dict[str, Any], task: str, *words: str) -> None:
    """The only finding is about `task`, and has these words."""
    finding = only(reports)
    assert finding.task == task
    for each in words:
        assert each in finding.text


def test_healthy_cluster_has_no_findings_and_can_connect() -> None:
    assert found_in(healthy()) == []
    assert can_connect(healthy(), CLUSTER)
    table = text(healthy(), CLUSTER, [], {})
    assert "worker 2   c:2222" in table
    assert "nothing wrong was found" in table


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        ({"state": "refused"}, "Start this command there"),
        ({"state": "silent"}, "no firewall"),
        ({"state": "unknown host", "detail": "Name or service not known"}, "getent hosts"),
        ({"state": "stranger", "detail": "it is worker 7"}, "ss -tlnp"),
    ],
)
def test_task_that_did_not_come_is_named_once(state: Json, advice: str) -> None:
    reports = healthy()
    del reports["worker 2"]
    for report in reports.values():
        report["meetings"]["worker 2"] = state
    finding = only(reports)
    assert (finding.level, finding.task, finding.address) == ("error", "worker 2", "c:2222")
    assert "did not come: " in finding.text
    assert advice in finding.text
    assert not can_connect(reports, CLUSTER)
    assert "did not come" in text(reports, CLUSTER, [finding], {})


def test_one_way_that_is_blocked_is_named_with_both_ends() -> None:
    reports = healthy()
    reports["worker 1"]["meetings"]["worker 2"] = {"state": "silent"}
    assert_only(reports, "worker 2", "came, but cannot be reached from worker 1: ")
    assert not can_connect(reports, CLUSTER)


def test_task_with_another_cluster_is_named_and_its_wrong_address_is_not_a_second_fault() -> None:
    reports = healthy()
    reports["worker 1"]["addresses"]["worker 1"] = "b:2223"
    for name in ("worker 0", "worker 2"):
        reports[name]["meetings"]["worker 1"] = {"state": "refused"}
    said = "with worker 1 at b:2223, but other tasks have worker 1 at b:2222"
    assert_only(reports, "worker 1", said)


def test_of_two_tasks_with_different_software_the_chief_is_right() -> None:
    reports = without_worker_2()
    reports["worker 1"]["versions"]["tensorflow"] = "2.20.0"
    said = ("tensorflow is 2.20.0 there, but 2.21.0", "pip install tensorflow==2.21.0")
    assert_only(reports, "worker 1", *said)


def test_other_config_is_named_by_its_field() -> None:
    reports = healthy()
    reports["worker 2"]["fingerprint"]["--config.seed"] = 7
    assert_only(reports, "worker 2", "--config.seed")
    reports["worker 2"]["fingerprint"] = {}  # A server gets its config from the chief.
    assert found_in(reports) == []


def test_slow_link_is_named_by_its_sender_receiver_or_pair() -> None:
    for links, task, words in (
        ([(0, 2), (1, 2)], "worker 2", "it sends 10.0 MB/s, and other tasks 100.0 MB/s"),
        ([(1, 0), (1, 2)], "worker 1", "it receives 10.0 MB/s, and"),
        ([(1, 2)], "worker 1", "it receives 10.0 MB/s from worker 2 (c:2222)"),
    ):
        reports = healthy()
        for receiver, sender in links:
            reports[f"worker {receiver}"]["meetings"][f"worker {sender}"]["mb_per_sec"] = 10.0
        assert_only(reports, task, words)


def test_pair_is_not_named_while_the_rates_of_other_pairs_change_as_much() -> None:
    reports = healthy()
    states = [state for report in reports.values() for state in report["meetings"].values()]
    for state in states:
        state |= {"mb_per_sec": 2161.0, "rounds_mb_per_sec": [900.0, 1000.0, 2161.0]}
    states[0] |= {"mb_per_sec": 411.0, "rounds_mb_per_sec": [411.0, 350.0]}
    assert found_in(reports) == []
    states[0] |= {"mb_per_sec": 200.0, "rounds_mb_per_sec": [200.0]}
    assert "it receives 200.0 MB/s from" in only(reports).text


def test_rates_between_tasks_of_one_host_depend_on_its_load_and_are_no_finding() -> None:
    addresses = {"worker 0": "a:2222", "worker 1": "a:2223", "worker 2": "c:2222"}
    reports = healthy()
    for name, report in reports.items():
        report |= {"address": addresses[name], "addresses": addresses}
    reports["worker 0"]["meetings"]["worker 1"]["mb_per_sec"] = 10.0
    cluster = Cluster({"worker": dict(enumerate(addresses.values()))}, Task("worker", 0))
    assert findings(reports, cluster, deadline_secs=30.0) == []
    reports["worker 0"]["meetings"]["worker 2"]["mb_per_sec"] = 10.0
    (finding,) = findings(reports, cluster, deadline_secs=30.0)
    assert finding.task == "worker 0"


@pytest.mark.parametrize("odd", ADDRESSES)
def test_only_the_clock_that_differs_from_most_is_named(odd: str) -> None:
    clock = healthy()
    for name, report in clock.items():
        for other, state in report["meetings"].items():
            state["clock_secs"] = 90.0 * ((other == odd) - (name == odd)) + 0.001
    assert_only(clock, odd, "differs by +90.0 s")


def test_of_two_clocks_that_of_the_chief_is_taken_as_right() -> None:
    clock = without_worker_2()
    clock["worker 0"]["meetings"]["worker 1"]["clock_secs"] = -61.0
    clock["worker 1"]["meetings"]["worker 0"]["clock_secs"] = 61.0
    named = {finding.task: finding.text for finding in found_in(clock) if "clock" in finding.text}
    assert list(named) == ["worker 1"]
    assert "differs by -61.0 s from that of worker 0" in named["worker 1"]


def test_directory_of_another_host_is_named(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    mark = mark_in(str(tmp_path / "here" / "run"))
    assert mark
    assert mark.parent == tmp_path / "here"
    assert shared_fault(str(tmp_path / "here" / "run"), str(mark)) == ""
    (tmp_path / "there").mkdir()
    said = shared_fault(str(tmp_path / "there" / "run"), str(mark))
    assert f"{tmp_path / 'there'} is not the directory {tmp_path / 'here'} of the chief" in said
    assert shared_fault(str(tmp_path / "there"), "") == "", "the chief could write nothing"
    assert mark_in("s3://bucket/run") is None


def test_memory_disk_gpus_and_ports() -> None:
    memory = healthy()
    for name in ("worker 1", "worker 2"):
        memory[name]["machine"] = "b"
        memory[name]["free_memory_bytes"] = (2 << 30) - 1
    assert "worker 1 and worker 2 need 2,147,483,648 bytes" in only(memory).text
    disk = healthy()
    for report in disk.values():
        report["free_disk_bytes"] = 999
    assert only(disk).task == "worker 0", "only the chief writes"
    gpus = healthy()
    gpus["worker 1"]["plan"]["gpus"] = 4
    assert "4 GPU(s) there, and 0 in other workers" in only(gpus).text
    ports = healthy()
    ports["worker 1"]["address"] = "b:40000"
    assert only(ports).level == "warning"


def test_what_a_task_found_about_itself_is_passed_on() -> None:
    reports = healthy()
    reports["worker 1"]["faults"] = ["port 2222 is in use."]
    reports["worker 0"]["plan"]["error"] = "There is no data. Type python -m data.prepare digits."
    reports["worker 2"]["plan"] = {"is_late": True}
    messages = [str(finding) for finding in found_in(reports)]
    assert messages == [
        "error: worker 0 (a:2222): There is no data. Type python -m data.prepare digits.",
        "error: worker 1 (b:2222): port 2222 is in use.",
        "warning: worker 2 (c:2222): it had no time to build the model. Type --deadline_secs=120.",
    ]


def test_nothing_is_right_if_no_task_has_a_plan_or_a_report_is_missing() -> None:
    reports = healthy()
    for report in reports.values():
        report["plan"] = {"is_late": True}
    assert {(f.level, f.task) for f in found_in(reports)} == {("error", name) for name in ADDRESSES}
    reports = healthy()
    del reports["worker 2"]
    assert only(reports).text.startswith("it came, but its report did not.")


@pytest.mark.parametrize("secs", [None, 0.0])
def test_plan_has_the_time_that_it_needs_unless_there_is_a_limit(
    secs: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpus(_: Cluster) -> Json:
        time.sleep(0.2)
        return {"gpus": 0}

    monkeypatch.setattr("trainer.doctor.plan._gpus", gpus)
    recipe = load_recipe("digits")
    wait_for_plan = plan_in_child(recipe, CLUSTER, "", makes_plan=False, reads_input=False)
    assert wait_for_plan(secs) == ({"gpus": 0} if secs is None else {"is_late": True})


def test_directory_that_cannot_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, int]] = []

    def refuse(path: Path, mode: int) -> bool:  # Root may write everywhere.
        asked.append((path, mode))
        return False

    assert place_fault(str(tmp_path / "a/b")) == ""
    assert place_fault("s3://bucket/run") == ""
    (tmp_path / ".lock").touch()  # Of a run above.
    assert place_fault(str(tmp_path / "a/b")) == ""
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr("os.access", refuse)
    assert f"cannot write to {tmp_path}," in place_fault(str(tmp_path / "a/b"))
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]
    assert not (tmp_path / "a").exists()


VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("own", "group", "names"),
    [
        ("0::/\n", "", VERSION_2),
        ("0::/a/b\n", "a/b", VERSION_2),
        ("0::/a/b/c\n", "a", VERSION_2),
        ("7:cpu:/x\n4:memory:/a/b\n0::/\n", "memory/a", VERSION_1),
    ],
    ids=["version 2, container", "version 2", "version 2, a group above", "version 1"],
)
def test_memory_is_that_of_the_group_that_limits_it(
    own: str, group: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    listed = tmp_path / "own"
    assert free_memory_bytes(tmp_path, listed) > 1 << 20, "no groups"
    listed.write_text(own)
    place = tmp_path / group
    place.mkdir(parents=True, exist_ok=True)
    limit, used, cached = names
    (place / limit).write_text("3000\n")
    (place / used).write_text("1000\n")
    (place / "memory.stat").write_text(f"anon 500\n{cached} 200\n")
    assert free_memory_bytes(tmp_path, listed) == 2200
    (place / limit).write_text("max\n")
    assert free_memory_bytes(tmp_path, listed) > 1 << 20


@contextlib.contextmanager
def exchanges(cluster: Cluster, *tasks: Task) -> Iterator[list[Exchange]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Exchange(cluster.for_task(task))) for task in tasks]


def soon(secs: float = 60.0) -> float:
    return time.monotonic() + secs


def test_tasks_meet_measure_each_other_and_exchange_reports() -> None:
    jobs = {"worker": {i: f"localhost:{port}" for i, port in enumerate(free_ports(2))}}
    cluster = Cluster(jobs, Task("worker", 0))
    with exchanges(cluster, *cluster.tasks()) as pair:
        for exchange in pair:
            exchange.meet(soon())
        measured = [exchange.measure(soon()) for exchange in pair]
        for exchange, task in zip(pair, cluster.tasks(), strict=True):
            exchange.send({"task": str(task)})
        reports = [exchange.wait_for_reports(soon()) for exchange in pair]
    assert [list(meetings) for meetings in measured] == [["worker 1"], ["worker 0"]]
    for (state,) in (meetings.values() for meetings in measured):
        assert state["state"] == "met"
        assert min(state["latency_ms"], state["mb_per_sec"]) > 0
        assert abs(state["clock_secs"]) < 5
    assert reports[0] == reports[1] == {name: {"task": name} for name in ("worker 0", "worker 1")}


def test_what_is_found_instead_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.doctor.exchange._ANSWER_SECS", 1.0)
    own, none, closing, silent, web = free_ports(5)
    ports = enumerate((own, none, closing, silent, web))
    workers = {index: f"localhost:{port}" for index, port in ports}
    jobs = {"worker": workers, "ps": {0: "no-such-host.invalid:2222"}}
    cluster = Cluster(jobs, Task("worker", 0))
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(closing))
        stack.enter_context(held(web, b"HTTP/1.1 400 Bad Request\r\n"))
        listener = stack.enter_context(socket.create_server(("localhost", silent)))
        (exchange,) = stack.enter_context(exchanges(cluster, Task("worker", 0)))

        def states() -> dict[str, str]:
            return {name: state["state"] for name, state in exchange.measure(soon()).items()}

        wait_for(lambda: "unknown" not in states().values(), 60)
        found = states()
        listener.close()
    assert found == {
        "worker 1": "refused",
        "worker 2": "stranger",
        "worker 3": "silent",
        "worker 4": "stranger",
        "ps 0": "unknown host",
    }


def test_memory_of_a_ps_counts_the_copies_of_standby() -> None:
    groups = [
        Group("a", (50,), 600, gradient_bytes=200),
        Group("b", (30,), 300, gradient_bytes=100),
    ]
    placement = place(groups, 2, num_gradient_buffers=2)
    assert placement.num_bytes == [1000, 500]
    assert _loads_with_standby(placement, 2) == [1000 + 1200 + 600, 500 + 600 + 1200]


@pytest.mark.parametrize(
    ("mb_per_sec", "local_steps", "said"),
    [
        (1000.0, "", "the gradients of a step need 0.054 s of this network\n"),
        (12.5, "", "need 4.3 s of this network. If a step computes for less time, try --conf"),
        (12.5, "config.local_steps.every=50", "need 4.3 s of this network; the run has config.lo"),
    ],
)
def test_time_of_a_sum_is_that_of_the_measured_network(
    mb_per_sec: float, local_steps: str, said: str
) -> None:
    reports = healthy()
    counts = "batch_size replica_examples replica_bytes train_examples train_files eval_examples"
    counts += " eval_files variable_bytes first_step last_step"
    plan = dict.fromkeys(counts.split(), 1) | {"gradient_bytes": 54_000_000, "num_replicas": 3}
    texts = {"strategy": "multiworker", "data_dir": "data", "slots": "no slots"}
    reports["worker 0"]["plan"] |= {**plan, **texts, "local_steps": local_steps}
    measured = {"workers": 3, "latency_ms": 0.2, "mb_per_sec": mb_per_sec, "replicas": 3}
    assert said in text(reports, CLUSTER, [], {**measured, "wrong_sums": [], "copies": []})


def test_gpus_of_a_task_are_named_and_those_that_tensorflow_does_not_know() -> None:
    reports = healthy()
    note = "/physical_device:GPU:0 (B200) has compute capability 10.0, which is newer"
    reports["worker 1"]["plan"] |= {"gpus": 2, "gpu_names": ["2", "3"], "gpu_notes": [note]}
    lines = _tasks(reports, CLUSTER)
    assert [line.split()[1] for line in lines if "2 (2,3)" in line] == ["1"], lines
    assert f"worker 1: {note}" in lines


def test_time_of_the_all_reduce_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: queue.Queue[float] = queue.Queue()
    doctor = command._Doctor(CLUSTER, 30.0)
    monkeypatch.setattr(doctor, "end_late", lambda: ended.put(time.monotonic()))
    doctor.end_after(1000.0)
    began = time.monotonic()
    doctor.end_after(0.1)
    assert ended.get(timeout=60) >= began + 0.1
    doctor.end_after(0.1)
    doctor.end_after(1000.0)
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.3)
    doctor.end_after(0.0)
    ended.get(timeout=60)
