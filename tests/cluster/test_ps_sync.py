"""Synchronous parameter servers: backup workers, dropped gradients, and their examples.

test_determinism.py tests that they end in the weights of mirrored, and resume bit for bit.
"""

import shutil
from pathlib import Path

import pytest

from data.order import Order
from data.tfrecord.split import open_split
from tests.cluster.runs import Run, train
from trainer.config import DataConfig

BACKUP = "--replicas_to_aggregate=2"


def train_numbered(numbered: Path, model_dir: Path, *flags: str) -> Run:
    """Trains with three workers."""
    config = "--config=tests/cluster/configs/straggler.py"
    return train("ps-sync-3+1", model_dir, config, f"--data_dir={numbered}", *flags)


def sum_of_consumed(run: Run) -> int:
    (report,) = run.metrics("train")
    return round(float(report["number"]) * int(run.result["step"]) * 32)


def sum_of_handed_out(run: Run, numbered: Path) -> tuple[int, int]:
    """Sums of the numbers in the batches handed out, and in their unfinished sub-batches."""
    mark, split = run.mark(), open_split(str(numbered), "train")
    lengths, window = (split.shard_lengths, split.chunk_examples), DataConfig().window_batches
    order = Order(*lengths, 32, lanes=32, window_batches=window, seed=0, shuffle=True)
    open_sum = sum(
        int(order.records(batch, 1, range(first, last + 1)).sum())
        for batch, first, last in mark["open_shares"]
    )
    return int(order.records(0, mark["next_batch"]).sum()), open_sum


@pytest.fixture(scope="module")
def backed_up(numbered: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that waits for two of three workers; worker 0 is slow."""
    # Enough steps for worker 0 to finish a sub-batch before the other workers end the run.
    slow = ("--config.delay_ms=50", "--train_steps=120", "--config.log_every_steps=120")
    return train_numbered(numbered, tmp_path_factory.mktemp("2-of-3") / "run", BACKUP, *slow)


def test_step_does_not_wait_for_a_slow_worker_and_no_example_is_lost(
    backed_up: Run, numbered: Path
) -> None:
    assert backed_up.result["worker_dropped"]["worker 0"] > 0, "worker 0 was never late"
    assert sum(backed_up.result["worker_steps"].values()) == 2 * 120
    # 120 steps of 32 examples: four epochs of 800, and more than half of the next epoch.
    handed_out, still_open = sum_of_handed_out(backed_up, numbered)
    assert still_open > 0
    assert sum_of_consumed(backed_up) == handed_out - still_open
    assert backed_up.result["examples"] == 120 * 32


def test_without_a_backup_worker_all_workers_are_waited_for(numbered: Path, tmp_path: Path) -> None:
    run = train_numbered(numbered, tmp_path, "--config.delay_ms=50")
    assert run.result["worker_dropped"] == dict.fromkeys(("worker 0", "worker 1", "worker 2"), 0)
    assert set(run.result["worker_steps"].values()) == {40}
    assert sum_of_handed_out(run, numbered) == (sum_of_consumed(run), 0)
    assert run.result["seconds"] > 40 * 0.05, "worker 0 was not slow"


def test_unfinished_sub_batches_are_computed_after_a_resume(
    backed_up: Run, numbered: Path, tmp_path: Path
) -> None:
    shutil.copytree(backed_up.model_dir, tmp_path / "run")
    quick = (BACKUP, "--config.delay_ms=0", "--train_steps=140")
    finished = train_numbered(numbered, tmp_path / "run", *quick)

    handed_out, still_open = sum_of_handed_out(finished, numbered)
    last = finished.metrics("train")[-1]
    since = round(last["number"] * 20 * 32)
    assert sum_of_consumed(backed_up) + since == handed_out - still_open


def test_values_that_the_chief_reads_leave_nothing_on_the_server(tmp_path: Path) -> None:
    """TensorFlow keeps a kernel for each value that is read with `numpy()` of another task."""
    calls = ("--train_steps=200", "--config.steps_per_call=2")
    env = {"TF_CPP_VMODULE": "execute=2", "TF_CPP_MIN_LOG_LEVEL": "0"}
    counting = "--config=tests/cluster/configs/counting.py"
    run = train("ps-sync-1+1", tmp_path, counting, *calls, env=env)
    assert run.result["step"] == 200
    text = (tmp_path / "tasks" / "ps-0.log").read_text(errors="replace")
    # Some values are read with `numpy()` at the beginning.
    number = text.count("Creating new kernel for _Send")
    assert 0 < number < 50, "100 calls read something each"
