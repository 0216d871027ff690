"""Two runs for one MODEL_DIR: the second one waits for the first, and continues it."""

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.runs import Process, Topology, largest_difference, train

SLOW = ("--config=tests/cluster/configs/slow.py", "--num_threads=1", "--train_steps=120")
MIRRORED, CLUSTER = Topology("mirrored-1"), Topology("ps-sync-2+1")
# The processes inside see no other process, as in a container.
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
WAITS = "waiting up to 55 s for its end"


def reason_without_containers() -> str:
    if shutil.which("unshare") is None:
        return "the `unshare` command is missing (package util-linux)"
    return subprocess.run([*CONTAINER, "true"], capture_output=True, text=True).stderr


@contextlib.contextmanager
def start_second(
    first: Process, argv: tuple[str, ...], under: tuple[str, ...] = ()
) -> Iterator[Process]:
    """Starts the second run when the first one trains; gives it when it waits.

    The first one is frozen meanwhile, so that it does not end before.
    """
    first.wait_for_step(40)
    family = first.family()
    for process in family:
        process.suspend()
    with Process(argv, first.model_dir, under=under) as second:
        second.wait_until(lambda: WAITS in second.output(), "message that it waits")
        for process in family:
            process.resume()
        yield second


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("topology", "under", "signum"),
    [
        pytest.param(
            MIRRORED,
            CONTAINER,
            signal.SIGKILL,
            marks=pytest.mark.skipif(
                bool(reason_without_containers()), reason=reason_without_containers()
            ),
        ),
        (CLUSTER, (), signal.SIGTERM),
        pytest.param(CLUSTER, (), signal.SIGKILL, marks=pytest.mark.nightly),
    ],
    ids=["process-killed", "launcher-stopped", "launcher-killed"],
)
def test_second_run_waits_for_the_first_and_continues_it(
    topology: Topology, under: tuple[str, ...], signum: signal.Signals, digits: Path, tmp_path: Path
) -> None:
    flags = (*SLOW, f"--data_dir={digits}", "--config.checkpoint_every_steps=20")
    model_dir = tmp_path / "run"
    argv = (*topology.argv, f"--model_dir={model_dir}", *flags)
    with Process(argv, model_dir) as first, start_second(first, argv, under) as second:
        assert first.popen.poll() is None
        first.send(signum)
        assert first.wait_alone().exit_code == (75 if signum == signal.SIGTERM else -signum)
        run = second.wait()
    steps = run.steps("train")
    assert steps == sorted(set(steps)), "both have written reports"
    assert set(range(20, 121, 20)) <= set(steps)
    undisturbed = train(topology, tmp_path / "undisturbed", *flags, "--config.pause_secs=0")
    assert largest_difference(run.variables(), undisturbed.variables()) == 0


@pytest.mark.parametrize("topology", [MIRRORED, CLUSTER], ids=["process", "launcher"])
def test_second_run_of_a_run_that_ends_meanwhile_does_nothing(
    topology: Topology, digits: Path, tmp_path: Path
) -> None:
    argv = (*topology.argv, f"--model_dir={tmp_path}", *SLOW, f"--data_dir={digits}")
    with Process(argv, tmp_path) as first, start_second(first, argv) as second:
        assert first.wait_alone().exit_code == 0
        written = (tmp_path / "result.json").stat().st_mtime_ns
        run = second.wait()
    assert "is finished" in run.stderr + run.stdout
    assert (tmp_path / "result.json").stat().st_mtime_ns == written
