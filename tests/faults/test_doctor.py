"""`python -m trainer.doctor` in all tasks of a cluster, healthy or with a fault on each host."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import hosts, silent
from strategies.cluster.ports import free_ports
from tests.cluster.hosts import needs_hosts
from tests.cluster.runs import ROOT, Process, assert_refused

TIMEOUT_SECS = 200.0
MULTIWORKER = ("--strategy=multiworker", "--num_threads=1", "--json")


def start(stack: contextlib.ExitStack, *argv: str, **options: Any) -> Process:
    """`options` are of Process."""
    process = Process(argv, Path("none"), module="trainer.doctor", **options)
    return stack.enter_context(process)


def end(process: Process, *exit_codes: int, limit_secs: float = TIMEOUT_SECS) -> str:
    run = process.wait_alone(limit_secs)
    assert run.exit_code in exit_codes, process.output()
    assert "Traceback" not in run.stderr
    return run.stdout


@pytest.mark.nightly
@needs_hosts
def test_each_of_four_faults_is_found_with_its_host(digits: Path, tmp_path: Path) -> None:
    """Worker 0 runs other code, 1 has another port, 2 cannot be reached, 3 has a slow link."""
    code = tmp_path / "code"
    for package in ("trainer", "strategies", "data", "configs"):
        shutil.copytree(ROOT / package, code / package)
    with (code / "trainer" / "loop.py").open("a") as file:
        file.write("# Changed.\n")
    with hosts(4) as places, contextlib.ExitStack() as stack:
        for host in places:
            host.limit_rate("400mbit")
        places[3].limit_rate("20mbit")
        listed = [f"{host.address}:2222" for host in places]
        wrong = [*listed[:1], f"{places[1].address}:2223", *listed[2:]]
        processes = []
        with silent(places[2], places[0], places[1], places[3]):
            for index, host in enumerate(places):
                argv = (
                    *MULTIWORKER,
                    f"--hosts={','.join(wrong if index == 1 else listed)}",
                    f"--model_dir={tmp_path / 'run'}",
                    f"--data_dir={digits}",
                    "--deadline_secs=90",
                )
                cwd = code if index == 0 else ROOT
                processes.append(start(stack, *argv, under=host.command, cwd=cwd))
            printed = [json.loads(end(process, 2)) for process in processes]
        assert not (tmp_path / "run").exists()
    expected = {
        "worker 0": (places[0], "code of this program"),
        "worker 1": (places[1], ":2223"),
        "worker 2": (places[2], "its host does not answer"),
        "worker 3": (places[3], "it sends"),
    }
    for view in (printed[0], printed[3]):
        errors = [finding for finding in view["findings"] if finding["level"] == "error"]
        assert {error["task"] for error in errors} == expected.keys(), errors
        assert len(errors) == 4, errors
        for error in errors:
            host, text = expected[error["task"]]
            assert host.address in error["address"]
            assert text in error["text"]
    assert printed[2]["tasks"].keys() == {"worker 2"}, "it met no other task"
    rates = printed[0]["tasks"]["worker 0"]["meetings"]
    assert rates["worker 3"]["mb_per_sec"] < 15
    assert "why_not" in printed[0]["all_reduce"]


@needs_hosts
def test_link_that_drops_large_packets_and_directory_that_is_not_shared_are_named(
    digits: Path, tmp_path: Path
) -> None:
    with hosts(3) as places, contextlib.ExitStack() as stack:
        places[2].limit_packets(900)
        processes = []
        for index, host in enumerate(places):
            directory = tmp_path / ("own" if index == 1 else "shared")
            directory.mkdir(exist_ok=True)
            argv = (
                *MULTIWORKER,
                f"--hosts={','.join(f'{host.address}:2222' for host in places)}",
                f"--model_dir={directory / 'run'}",
                f"--data_dir={digits}",
                "--deadline_secs=150",
            )
            processes.append(start(stack, *argv, under=host.command))
        (printed, *_) = [json.loads(end(process, 2)) for process in processes]
        assert not list(tmp_path.glob("*/*")), "the file of the doctor was removed"
    found = {
        (finding["task"], finding["text"][:60])
        for finding in printed["findings"]
        if "MB/s" not in finding["text"]  # Hosts of one machine share its cores.
    }
    assert len(found) == 2, found
    ((first, other), (second, dropped)) = sorted(found)
    assert (first, second) == ("worker 1", "worker 2")
    assert other.startswith(f"{tmp_path}/own is not"[:60])
    assert "short messages arrive, and one of 32,768" in dropped


def test_healthy_tasks_measure_an_all_reduce_and_an_absent_task_is_named(
    digits: Path, tmp_path: Path
) -> None:
    ports = free_ports(5)
    pair, ps = ports[:2], ports[2:]
    with contextlib.ExitStack() as stack:
        cluster = f"--hosts=localhost:{pair[0]},localhost:{pair[1]}"
        flags = (f"--model_dir={tmp_path / 'run'}", f"--data_dir={digits}", "--num_threads=1")
        multiworker = [
            start(
                stack,
                "--strategy=multiworker",
                cluster,
                "--job_name=worker",
                f"--task_index={index}",
                "--deadline_secs=180",
                *flags,
                env={"https_proxy": "http://localhost:9"},  # Nothing listens there.
            )
            for index in range(2)
        ]
        tables = [end(process, 0) for process in multiworker]
        hosts_of_ps = f"--ps_hosts=localhost:{ps[0]},localhost:{ps[1]}"
        cluster_of_ps = ("--strategy=ps", hosts_of_ps, f"--worker_hosts=localhost:{ps[2]}")
        first = ("--task_index=0", "--deadline_secs=30")
        tasks = [
            start(stack, *cluster_of_ps, f"--job_name={job}", *first, *flags)
            for job in ("worker", "ps")
        ]
        incomplete = [end(process, 2) for process in tasks]
    for table in tables:
        assert "multiworker: 2 replica(s), batch 64: 32 examples" in table
        assert "all-reduce of TensorFlow over 2 workers" in table
        assert "nothing wrong was found" in table
    for table in incomplete:
        assert f"error: ps 1 (localhost:{ps[1]}): did not come: its host answers" in table


def test_mistakes_end_with_one_message(tmp_path: Path) -> None:
    for flag, message in (
        ("--stratgy=ps", "Did you mean --strategy?"),
        ("--port=7", "--port=7 is for --strategy=multiworker or ps"),
    ):
        assert assert_refused([flag], tmp_path, message, module="trainer.doctor").stdout == ""
