"""--bind_cores through the launcher: who runs where."""

import contextlib
import dataclasses
import os
from pathlib import Path

import psutil
import pytest

from data.cores import cores
from tests.cluster.runs import TOPOLOGIES, assert_one_error, start, train

SLOW = "--config=tests/cluster/configs/slow.py"


def cores_of(process: psutil.Process) -> set[int]:
    """Those that any thread of `process` may run on."""
    found: set[int] = set()
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):  # It has ended.
            found |= os.sched_getaffinity(thread.id)
    return found


@pytest.fixture(autouse=True)
def two_cores() -> None:
    if not hasattr(os, "sched_getaffinity") or len(cores()) < 2:
        pytest.skip("two workers need two cores, and Linux, to keep to one each")


@pytest.mark.parametrize("bind_cores", ["auto", "off"])
def test_workers_keep_to_cores_of_their_own(bind_cores: str, digits: Path, tmp_path: Path) -> None:
    topology = TOPOLOGIES["multiworker-2"]
    flags = (SLOW, f"--data_dir={digits}", "--train_steps=200", f"--bind_cores={bind_cores}")
    with start(topology, tmp_path, *flags) as process:
        process.wait_for_step(10)
        first, second = (cores_of(process.task(f"worker {index}")) for index in range(2))
        run = process.wait()
    assert run.exit_code == 0, process.output()
    if bind_cores == "off":
        assert first == second == set(cores())
    else:
        assert first | second == set(cores())
        assert not first & second
    assert ("bound: each worker keeps to" in run.stderr) == (bind_cores == "auto")


def test_workers_with_more_threads_than_cores_are_not_bound(digits: Path, tmp_path: Path) -> None:
    threads = ("--workers=2", f"--num_threads={len(cores())}")
    too_many = dataclasses.replace(TOPOLOGIES["multiworker-2"], flags=threads)
    flags = (f"--data_dir={digits}", "--train_steps=2", "--batch_size=10")
    run = train(too_many, tmp_path / "auto", *flags)
    assert "bound:" not in run.stderr
    run = train(too_many, tmp_path / "on", *flags, "--bind_cores=on", exit_code=2)
    why = f"{len(cores())} cores for 2 workers, of --num_threads={len(cores())} each"
    assert_one_error(run, "--bind_cores=on", why)
