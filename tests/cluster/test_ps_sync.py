"""Synchronous parameter servers: backup workers, dropped gradients, and their examples.

test_determinism.py tests that they end in the weights of mirrored, and resume bit for bit.
"""

import json
from pathlib import Path

from data.order import Order
from data.tfrecord.split import open_split
from tests.cluster.runs import Process, Run, Topology, train
from trainer.config import DataConfig

THREE_WORKERS = ("--workers=3", "--ps=1", "--num_threads=1", "--sync_replicas")
BACKUP = Topology("ps-sync-2-of-3", "ps", (*THREE_WORKERS, "--replicas_to_aggregate=2"))
NO_BACKUP = Topology("ps-sync-3-of-3", "ps", THREE_WORKERS)


def train_numbered(topology: Topology, numbered: Path, model_dir: Path, *flags: str) -> Run:
    config = "--config=tests/cluster/configs/straggler.py"
    return train(topology, model_dir, config, f"--data_dir={numbered}", *flags)


def sum_of_consumed(run: Run) -> int:
    (report,) = run.metrics("train")
    return round(float(report["number"]) * int(run.result["step"]) * 32)


def sum_of_handed_out(run: Run, numbered: Path) -> tuple[int, int]:
    """Sums of the numbers in the batches handed out, and in their unfinished sub-batches."""
    name = max(n for n in run.checkpoints() if n.startswith("step-"))
    mark = json.loads((run.model_dir / "checkpoints" / name / "checkpoint.json").read_text())
    split = open_split(str(numbered), "train")
    order = Order(
        split.shard_lengths,
        split.chunk_examples,
        batch_size=32,
        lanes=32,
        window_batches=DataConfig().window_batches,
        seed=0,
        shuffle=True,
    )
    open_sum = sum(
        int(order.records(batch, 1, range(first, last + 1)).sum())
        for batch, first, last in mark["open_shares"]
    )
    return int(order.records(0, mark["next_batch"]).sum()), open_sum


def test_step_does_not_wait_for_a_slow_worker_and_no_example_is_lost(
    numbered: Path, tmp_path: Path
) -> None:
    # Enough steps for worker 0 to finish a sub-batch before the other workers end the run.
    flags = ("--config.delay_ms=50", "--train_steps=120", "--config.log_every_steps=120")
    with_backup = train_numbered(BACKUP, numbered, tmp_path / "2-of-3", *flags)
    without = train_numbered(NO_BACKUP, numbered, tmp_path / "3-of-3", *flags)

    assert with_backup.result["worker_dropped"]["worker 0"] > 0, "worker 0 was never late"
    assert sum(with_backup.result["worker_steps"].values()) == 2 * 120
    # 120 steps of 32 examples: four epochs of 800, and more than half of the next epoch.
    handed_out, still_open = sum_of_handed_out(with_backup, numbered)
    assert still_open > 0
    assert sum_of_consumed(with_backup) == handed_out - still_open
    assert with_backup.result["examples"] == 120 * 32

    # Without a backup all workers are waited for, so no gradient is dropped and none is open.
    assert without.result["worker_dropped"] == dict.fromkeys(
        ("worker 0", "worker 1", "worker 2"), 0
    )
    assert set(without.result["worker_steps"].values()) == {120}
    assert sum_of_handed_out(without, numbered) == (sum_of_consumed(without), 0)
    assert without.result["seconds"] > 120 * 0.05, "worker 0 was not slow"


def test_unfinished_sub_batches_are_computed_after_a_resume(numbered: Path, tmp_path: Path) -> None:
    # The first sub-batch of worker 0 takes longer than the run.
    slow = ("--train_steps=20", "--config.delay_ms=5000")
    half = train_numbered(BACKUP, numbered, tmp_path, *slow)
    before = sum_of_consumed(half)
    assert sum_of_handed_out(half, numbered)[1] > 0, "no sub-batch was unfinished"

    finished = train_numbered(BACKUP, numbered, tmp_path)

    handed_out, still_open = sum_of_handed_out(finished, numbered)
    last = finished.metrics("train")[-1]
    assert before + round(last["number"] * 20 * 32) == handed_out - still_open


def test_values_that_the_chief_reads_leave_nothing_on_the_server(
    digits: Path, tmp_path: Path
) -> None:
    """TensorFlow keeps a kernel for each value that is read with `numpy()` of another task."""
    model_dir, log = tmp_path / "run", "Creating new kernel for _Send"
    flags = (f"--model_dir={model_dir}", f"--data_dir={digits}", "--train_steps=200")
    topology = ("--strategy=ps", "--sync_replicas", "--workers=1", "--ps=1", "--num_threads=1")
    calls = ("--config=tests/cluster/configs/counting.py", "--config.steps_per_call=2")
    env = {"TF_CPP_VMODULE": "execute=2", "TF_CPP_MIN_LOG_LEVEL": "0"}
    with Process((*topology, *flags, *calls), model_dir, env=env) as process:
        assert process.wait().result["step"] == 200, process.output()
    text = (model_dir / "tasks" / "ps-0.log").read_text(errors="replace")
    # Some values are read with `numpy()` at the beginning.
    assert 0 < text.count(log) < 50, "100 calls read something each"
