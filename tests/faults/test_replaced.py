"""Two processes for one MODEL_DIR: the second one waits, or it replaces the first."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import Host, hosts, reason_why_not
from strategies.cluster.tf_config import Cluster, Task, local_cluster
from tests.cluster.runs import (
    TOPOLOGIES,
    Process,
    assert_one_error,
    by_hand,
    largest_difference,
    read_metrics,
    start,
    train,
)

MIRRORED_1 = TOPOLOGIES["mirrored-1"]
SLOW = ("--config=tests/cluster/configs/slow.py", "--num_threads=1")
# The processes inside see no other process, like those of another machine.
ELSEWHERE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def pid_namespaces() -> str:
    """Why there are none here, or ""."""
    if shutil.which("unshare") is None:
        return "the `unshare` command is missing (package util-linux)"
    return subprocess.run([*ELSEWHERE, "true"], capture_output=True, text=True).stderr


def steps_of(model_dir: Path) -> list[int]:
    return [line["step"] for line in read_metrics(model_dir) if line["split"] == "train"]


def test_same_command_waits_for_the_first_and_continues_it(digits: Path, tmp_path: Path) -> None:
    flags = (*SLOW, f"--data_dir={digits}")
    with start(MIRRORED_1, tmp_path / "run", *flags) as first:
        first.wait_for_step(20)
        with start(MIRRORED_1, tmp_path / "run", *flags) as second:
            waits = f"process {first.popen.pid} still trains in {tmp_path / 'run'}"
            second.wait_until(lambda: bool(second.warned(waits)), "message that it waits")
            first.send(signal.SIGTERM)
            assert first.wait_alone().exit_code == 75
            run = second.wait()
    assert run.exit_code == 0, run.stderr
    undisturbed = train(MIRRORED_1, tmp_path / "undisturbed", *flags)
    assert largest_difference(run.variables(), undisturbed.variables()) == 0


@pytest.mark.skipif(bool(pid_namespaces()), reason=pid_namespaces())
def test_newer_process_of_another_machine_replaces_the_first(digits: Path, tmp_path: Path) -> None:
    model_dir = tmp_path / "run"
    flags = (*SLOW, f"--data_dir={digits}", "--config.checkpoint_every_steps=20")
    argv = (*MIRRORED_1.argv, f"--model_dir={model_dir}", *flags)
    with Process(argv, model_dir) as first:
        first.wait_for_step(40)
        with Process(argv, model_dir, under=ELSEWHERE) as second:
            ended = first.wait_alone()
            run = second.wait_alone()
    assert_one_error(ended, "process ", "trains in", "now, so this process ends")
    assert run.exit_code == 0, run.stderr
    assert "resuming from step" in run.stdout
    assert run.result["exit_code"] == 0
    assert steps_of(model_dir) == list(range(20, 301, 20)), "the first one has written later"
    undisturbed = train(MIRRORED_1, tmp_path / "undisturbed", *flags)
    assert largest_difference(run.variables(), undisturbed.variables()) == 0


def record(model_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    return found


def test_servers_outlive_a_replaced_chief(digits: Path, tmp_path: Path) -> None:
    flags = (*SLOW, "--sync_replicas", f"--data_dir={digits}")
    chief = Task("chief", 0)
    with by_hand(local_cluster("ps", 2, 1), tmp_path, *flags) as tasks:
        tasks.start_all()
        tasks["chief 0"].wait_for_step(40)
        # As the chief of another machine does.
        document = record(tmp_path)
        document["process"] = {**document["process"], "machine": "another", "host": "another"}
        partial = tmp_path / "partial"
        partial.write_text(json.dumps(document))
        partial.rename(tmp_path / "config.json")
        assert_one_error(tasks["chief 0"].wait_alone(), "of host another trains in")
        assert not (tmp_path / "result.json").exists(), "it has spoiled the other run"
        tasks.start(chief)
        runs = tasks.wait()
    assert "resuming from step" in runs["chief 0"].stdout
    assert runs["chief 0"].result["step"] == 300


def give_address(host: Host, old: Host, others: tuple[Host, ...]) -> None:
    """`host` gets the address of `old`, whose link is down."""
    inside = ("ip", "-n", host.name, "address", "add", f"{old.address}/24", "dev", "eth0")
    subprocess.run(inside, check=True, capture_output=True)
    for other in others:  # They know the hardware that had this address.
        flush = ("ip", "-n", other.name, "neigh", "flush", "all")
        subprocess.run(flush, check=True, capture_output=True)


@pytest.mark.skipif(
    bool(reason_why_not() or pid_namespaces()), reason=reason_why_not() or pid_namespaces()
)
@pytest.mark.timeout(240)
def test_chief_that_was_frozen_disturbs_nothing_when_another_host_has_replaced_it(
    digits: Path, tmp_path: Path
) -> None:
    flags = (*SLOW, "--sync_replicas", f"--data_dir={digits}", "--stall_timeout_secs=20")
    model_dir = tmp_path / "run"
    with hosts(3) as (old, servers, new):
        jobs = {
            "chief": {0: f"{old.address}:2222"},
            "ps": {0: f"{servers.address}:2222"},
            "worker": {i: f"{servers.address}:{2223 + i}" for i in range(2)},
        }
        cluster, chief = Cluster(jobs, Task("chief", 0)), Task("chief", 0)
        under = {task: (old if task == chief else servers).command for task in cluster.tasks()}
        with by_hand(cluster, model_dir, *flags, under=under) as tasks:
            tasks.start_all()
            frozen = tasks["chief 0"]
            frozen.wait_for_step(100)
            frozen.send(signal.SIGSTOP)
            reached = steps_of(model_dir)[-1]
            with old.link_down():
                give_address(new, old, (servers,))
                under[chief] = (*new.command, *ELSEWHERE)
                tasks.start(chief)
                tasks["chief 0"].wait_for_step(reached + 20)
                frozen.send(signal.SIGCONT)
                assert frozen.wait_alone().exit_code in (2, 75), frozen.output()
                runs = tasks.wait()
    run = runs["chief 0"]
    assert "Saved step" in run.stderr, "it has not continued from the memory of the servers"
    assert run.result["exit_code"] == 0
    assert steps_of(model_dir) == list(range(20, 301, 20))
    undisturbed = train(MIRRORED_1, tmp_path / "undisturbed", *SLOW, f"--data_dir={digits}")
    assert run.result["examples"] == undisturbed.result["examples"]
