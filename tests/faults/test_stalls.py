"""Tasks that are alive but do not move: found, named, and treated as dead."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from strategies.cluster.tf_config import local_cluster
from tests.cluster.runs import Process, by_hand, read_metrics

SLOW = "--config=tests/cluster/configs/slow.py"
STALLS = "--stall_timeout_secs=12"  # A peer may be silent for half of it.


@contextlib.contextmanager
def stopped(process: Process) -> Iterator[None]:
    """Stops the process while the context lasts, and checks that it is stopped."""
    process.send(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while psutil.Process(process.popen.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield
    finally:
        process.send(signal.SIGCONT)


# With a bound, a worker holds the lock most of the time, perhaps the stopped one.
BOUNDED = (
    "--config=tests/cluster/configs/counting.py",
    "--config.apply_ms=20",
    "--max_staleness=1",
    "--config.log_every_steps=10",
)


@pytest.mark.parametrize(
    "mode",
    [
        (SLOW, "--sync_replicas", "--replicas_to_aggregate=1"),
        pytest.param(BOUNDED, marks=pytest.mark.nightly),
    ],
    ids=["sync", "async"],
)
def test_workers_continue_without_an_unresponsive_worker_which_may_return(
    mode: tuple[str, ...], tmp_path: Path
) -> None:
    cluster = local_cluster("ps", 2, 1)
    flags = (*mode, STALLS, "--num_threads=1", "--train_steps=1_000_000")
    with by_hand(cluster, tmp_path, *flags) as tasks:
        tasks.start_all()
        chief = tasks["chief 0"]
        # Not the first report: for what the chief does for the first time TensorFlow registers
        # functions with all tasks, and an unresponsive task then ends the run with 75.
        chief.wait_for_step(40)
        with stopped(tasks["worker 1"]):
            chief.wait_until(lambda: "is considered lost." in chief.output(), "word of the silence")
            chief.wait_for_more_steps(40)
            before = read_metrics(tmp_path)[-1]["worker_steps"]["worker 1"]
        chief.wait_until(
            lambda: read_metrics(tmp_path)[-1]["worker_steps"]["worker 1"] > before + 20,
            "steps of worker 1, again",
        )
        chief.send(signal.SIGTERM)
        runs = tasks.wait(75)
    result = runs["chief 0"].result
    assert result["why"] == "asked to stop"
    assert sum(result["worker_steps"].values()) == result["step"]
    assert "worker 1 answers again" in runs["chief 0"].stderr
    if mode == BOUNDED:
        ages = {age for found in result["staleness"].values() for age in found}
        assert ages <= {"0", "1"}


@pytest.mark.parametrize(
    ("strategy", "still"), [("ps", "ps 0"), ("multiworker", "worker 1")], ids=str
)
def test_run_that_needs_an_unresponsive_task_ends_with_75(
    strategy: str, still: str, tmp_path: Path
) -> None:
    cluster = local_cluster(strategy, 2, 1)
    flags = [SLOW, "--num_threads=1", STALLS]
    if strategy == "ps":
        flags.append("--chief_timeout_secs=5")
    with by_hand(cluster, tmp_path, *flags) as tasks:
        tasks.start_all()
        chief = tasks["chief 0" if strategy == "ps" else "worker 0"]
        chief.wait_for_step(20)
        with stopped(tasks[still]):
            run = chief.wait_alone()
        assert run.exit_code == 75, chief.output()
        assert f"{still} does not answer" in run.stderr
        assert still in run.result["why"]
        is_saved = any(tmp_path.glob("checkpoints/step-*"))
        said = "The last checkpoint is complete" if is_saved else "No step has been saved"
        assert said in run.stderr
        tasks.wait(75)
