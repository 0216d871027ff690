"""SIGTERM to one task that is not the chief: the run is saved, and all tasks end with 75.

tests/cluster/test_interrupt.py tests the chief, to which a launcher passes the signal on.
"""

import signal
from pathlib import Path

import pytest

from strategies.cluster.tf_config import local_cluster
from tests.cluster.runs import by_hand

SLOW = "--config=tests/cluster/configs/slow.py"


@pytest.mark.parametrize(
    ("strategy", "asked"),
    [
        ("ps", "worker 1"),
        ("ps", "ps 0"),
        ("multiworker", "worker 1"),
    ],
    ids=str,
)
def test_sigterm_to_one_task_stops_the_run_with_its_state_saved(
    strategy: str, asked: str, tmp_path: Path
) -> None:
    cluster = local_cluster(strategy, 2, 1)
    flags = (SLOW, "--num_threads=1", "--config.checkpoint_every_steps=0")
    with by_hand(cluster, tmp_path, *flags) as tasks:
        tasks.start_all()
        chief = tasks["chief 0" if strategy == "ps" else "worker 0"]
        chief.wait_for_step(20)
        tasks[asked].send(signal.SIGTERM)
        runs = tasks.wait(75)
    result = runs[str(cluster.chief)].result
    assert 20 <= result["step"] < 300
    assert result["why"] == "asked to stop"
    assert runs[asked].checkpoints() == [f"step-{result['step']:08d}"]
