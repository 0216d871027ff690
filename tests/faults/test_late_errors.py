"""An error late in a run loses no work: the last complete step is saved; a run resumes there."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from tests.cluster.configs.failing import AT_STEP
from tests.cluster.runs import Run, TrainOnce, largest_difference, start, train
from tests.damage import flip_bit

CONFIG = "--config=tests/cluster/configs/failing.py"
STEPS, EPOCH = 60, 30
SAID = {"exit": "", "size": "Lower --config.eval_batch_size"}
MIRRORED, MIRRORED_2, WORKERS = "mirrored-1", "mirrored-2", "multiworker-2"
PS, SYNC = "ps-2+1", "ps-sync-2+1"
NIGHTLY = pytest.mark.nightly


def mislabel(shard: Path) -> None:
    """Gives record 330 a label that the model has no output for.

    It is in the seventh batch of an evaluation, in the part of the last replica or worker.
    """
    records = [record.numpy() for record in tf.data.TFRecordDataset(str(shard))]
    example = tf.train.Example.FromString(records[330])
    example.features.feature["label"].int64_list.value[0] = 10
    records[330] = example.SerializeToString()
    with tf.io.TFRecordWriter(str(shard)) as writer:
        for record in records:
            writer.write(record)


def damage(shard: Path) -> None:
    """Flips a bit in the first record, which is in the 13th batch, and read for no other window."""
    flip_bit(shard, 40)


def assert_continues(resumed: Run, saved: int, train_once: TrainOnce, topology: str) -> None:
    """`resumed` began at the step `saved`, and ended as a run without the fault."""
    assert f"resuming from step {saved}" in resumed.stdout
    assert resumed.result["eval"].keys() == {"loss", "accuracy"}
    if topology == PS:
        assert resumed.result["step"] >= STEPS
        assert resumed.result["examples"] == 48 * resumed.result["step"]
        return
    reference = train_once(topology, CONFIG)
    assert resumed.steps("eval") == [EPOCH, STEPS]
    assert resumed.result["examples"] == reference.result["examples"]
    ours, theirs = resumed.variables(), reference.variables()
    if topology == SYNC:  # Moving statistics are changed by one worker after another.
        ours, theirs = ({k: v for k, v in of.items() if "optimizer/" in k} for of in (ours, theirs))
    assert largest_difference(ours, theirs) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("topology", "split", "change", "message"),
    [
        (WORKERS, "train", damage, "corrupt"),
        *(
            pytest.param(topology, "test", mislabel, "label", marks=NIGHTLY)
            for topology in (MIRRORED_2, SYNC, WORKERS, PS)
        ),
        *(
            pytest.param(topology, "train", damage, "corrupt", marks=NIGHTLY)
            for topology in (MIRRORED, PS, SYNC)
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bad_data_costs_no_step_and_the_same_command_continues_when_it_is_mended(
    topology: str,
    split: str,
    change: Callable[[Path], None],
    message: str,
    digits: Path,
    train_once: TrainOnce,
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    (shard,) = data.glob(f"*-{split}.tfrecord*")
    good = shard.read_bytes()
    change(shard)
    flags = CONFIG, f"--data_dir={data}"
    first = train(topology, tmp_path / "run", *flags, exit_code=2)
    assert message in first.result["why"]
    step = first.result["step"]
    assert (step >= EPOCH) == (split == "test")
    assert step > 0
    assert first.checkpoints()[-1] == f"step-{step:08d}"
    assert f"tep {step}, the last that this task completed" in first.stderr + first.stdout

    shard.write_bytes(good)
    resumed = train(topology, tmp_path / "run", *flags)
    assert_continues(resumed, step, train_once, topology)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("topology", "fault", "exit_code"),
    [
        (MIRRORED, "hang", -signal.SIGKILL),
        (WORKERS, "hook", 1),
        (PS, "hook", 1),
        pytest.param(MIRRORED, "callback", 2, marks=NIGHTLY),
        pytest.param(MIRRORED, "memory", 1, marks=NIGHTLY),
        pytest.param(MIRRORED, "interrupt", 1, marks=NIGHTLY),
        pytest.param(MIRRORED, "exit", 3, marks=NIGHTLY),
        pytest.param(WORKERS, "callback", 2, marks=NIGHTLY),
        pytest.param(PS, "size", 2, marks=NIGHTLY),
        pytest.param(SYNC, "callback", 2, marks=NIGHTLY),
        pytest.param(WORKERS, "size", 2, marks=NIGHTLY),
    ],
    ids=str,
)
def test_code_that_fails_costs_no_step(
    topology: str,
    fault: str,
    exit_code: int,
    train_once: TrainOnce,
    tmp_path: Path,
) -> None:
    trap = tmp_path / "trap"
    argv = CONFIG, f"--config.fault={fault}"
    with start(topology, tmp_path / "run", *argv, env={"TRAP": str(trap)}) as process:
        if fault == "hang":
            mark = tmp_path / f"run/checkpoints/step-{EPOCH:08d}/checkpoint.json"
            process.wait_until(mark.exists, "a checkpoint before the first evaluation")
            process.send(signal.SIGKILL)
        first = process.wait(exit_code=exit_code)
    if fault == "hang":
        assert trap.exists()
        assert first.metrics("eval") == []
        saved = EPOCH
    else:
        saved = first.result["step"]
        assert saved >= (EPOCH if fault in ("callback", "size") else AT_STEP)
        assert SAID.get(fault, fault) in first.result["why"]
    assert first.checkpoints()[-1] == f"step-{saved:08d}"

    resumed = train(topology, tmp_path / "run", CONFIG)
    assert_continues(resumed, saved, train_once, topology)
