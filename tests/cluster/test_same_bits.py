"""config.virtual_replicas: one run has the same bits on any topology, also through deaths."""

import signal
from pathlib import Path

import pytest

from tests.cluster.runs import TOPOLOGIES, Run, Topology, read_metrics, start, train
from trainer.compare import compare
from trainer.hooks.digest import OPTIMIZER
from trainer.run_files import DIGESTS

CONFIG = "--config=tests/cluster/configs/same_bits.py"
STEPS = 120
TWO_THREADS = Topology("mirrored-1", "mirrored", ("--replicas=1", "--num_threads=2"))
FOUR = Topology("mirrored-4", "mirrored", ("--replicas=4", "--num_threads=1"))
FOUR_WORKERS = Topology(
    "multiworker-4",
    "multiworker",
    ("--workers=4", "--num_threads=1"),
    tuple(f"worker-{i}" for i in range(4)),
)
TWO_SYNC = Topology(
    "ps-sync-2+2",
    "ps",
    ("--workers=2", "--ps=2", "--sync_replicas", "--num_threads=2"),
    ("chief-0", "worker-0", "worker-1", "ps-0", "ps-1"),
)


@pytest.fixture(scope="module")
def alone(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of one replica and two threads, which the other runs must equal."""
    return train(
        TWO_THREADS, tmp_path_factory.mktemp("alone") / "run", CONFIG, f"--data_dir={digits}"
    )


def assert_equal(left: Run, right: Run) -> None:
    found = compare(str(left.model_dir), str(right.model_dir))
    assert found.is_equal, found
    assert found.num_reports == 16
    assert found.steps[-1] == STEPS
    ours, theirs = (run.metrics("train")[-1][DIGESTS] for run in (left, right))
    assert ours == theirs
    assert {"conv2d/kernel", "batch_normalization/moving_mean", OPTIMIZER} <= ours.keys()


@pytest.mark.parametrize(
    "topology",
    [TWO_SYNC, pytest.param(FOUR_WORKERS, marks=pytest.mark.nightly)],
    ids=str,
)
def test_weights_and_reports_have_the_bits_of_one_replica(
    topology: Topology, alone: Run, digits: Path, tmp_path: Path
) -> None:
    run = train(topology, tmp_path / "run", CONFIG, f"--data_dir={digits}")
    assert_equal(alone, run)


def test_killed_run_continues_on_other_topologies_with_the_same_bits(
    alone: Run, digits: Path, tmp_path: Path
) -> None:
    flags = (CONFIG, f"--data_dir={digits}")
    for topology, step in ((FOUR, 30), (TOPOLOGIES["multiworker-2"], 60)):
        with start(topology, tmp_path / "run", *flags, "--config.steps_per_call=1") as process:
            process.wait_for_step(step)
            for each in process.family():
                each.send_signal(signal.SIGKILL)
            process.wait_for_family_to_end()
        assert max(line["step"] for line in read_metrics(tmp_path / "run")) < STEPS
    run = train(TOPOLOGIES["mirrored-1"], tmp_path / "run", *flags)
    assert "resuming from step" in run.stdout
    assert_equal(alone, run)


def test_flipped_bits_of_a_gradient_are_in_the_next_digest(
    alone: Run, digits: Path, tmp_path: Path
) -> None:
    flags = (CONFIG, f"--data_dir={digits}", "--config.flip_step=15")
    run = train(FOUR, tmp_path / "run", *flags)
    found = compare(str(alone.model_dir), str(run.model_dir))
    assert found.reports is not None
    assert (found.reports.equal_step, found.reports.step) == (10, 20)
    names = [name for name, _ in found.reports.names]
    assert "embedding/embeddings" in names
    assert found.variables is not None  # Of the oldest checkpoint that is left.
