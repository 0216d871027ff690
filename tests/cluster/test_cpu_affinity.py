"""--cpu_affinity through the launcher: the cores on which each worker runs."""

import contextlib
import os
from pathlib import Path

import psutil
import pytest

from data.system.cores import cores
from tests.cluster.runs import assert_one_error, start, train

pytestmark = pytest.mark.nightly

SLOW = "--config=tests/cluster/configs/slow.py"


def cores_of(process: psutil.Process) -> set[int]:
    """The cores on which any thread of `process` may run."""
    found: set[int] = set()
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):  # The thread has ended.
            found |= os.sched_getaffinity(thread.id)
    return found


@pytest.fixture(autouse=True)
def two_cores() -> None:
    if not hasattr(os, "sched_getaffinity") or len(cores()) < 2:
        pytest.skip("two workers need two cores, and Linux, for separate CPU sets")


@pytest.mark.parametrize("cpu_affinity", ["auto", "off"])
def test_workers_run_on_separate_cores(cpu_affinity: str, tmp_path: Path) -> None:
    flags = (SLOW, "--train_steps=200", f"--cpu_affinity={cpu_affinity}")
    with start("multiworker-2", tmp_path, *flags) as process:
        process.wait_for_step(10)
        first, second = (cores_of(process.task(f"worker {index}")) for index in range(2))
        run = process.wait()
    if cpu_affinity == "off":
        assert first == second == set(cores())
    else:
        assert first | second == set(cores())
        assert not first & second
    assert ("CPU affinity: each worker has" in run.stderr) == (cpu_affinity == "auto")


def test_workers_with_more_threads_than_cores_have_no_cpu_affinity(tmp_path: Path) -> None:
    too_many = f"--num_threads={len(cores())}"
    flags = ("--train_steps=2", "--batch_size=10", too_many)
    run = train("multiworker-2", tmp_path / "auto", *flags)
    assert "CPU affinity" not in run.stderr
    run = train("multiworker-2", tmp_path / "on", *flags, "--cpu_affinity=on", exit_code=2)
    why = f"{len(cores())} cores for 2 workers, of --num_threads={len(cores())} each"
    assert_one_error(run, "--cpu_affinity=on", why)
