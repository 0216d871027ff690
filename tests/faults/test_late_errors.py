"""An error late in a run loses no work: the last complete step is saved; a run resumes there."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from tests.cluster.configs.failing import AT_STEP
from tests.cluster.runs import TOPOLOGIES, Run, Topology, largest_difference, start, train

CONFIG = "--config=tests/cluster/configs/failing.py"
STEPS, EPOCH = 60, 30
SAID = {"exit": "", "size": "Lower --config.eval_batch_size"}
MIRRORED, MIRRORED_2, WORKERS, PS, SYNC = (
    TOPOLOGIES[name]
    for name in ("mirrored-1", "mirrored-2", "multiworker-2", "ps-2+1", "ps-sync-2+1")
)


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
    content = bytearray(shard.read_bytes())
    content[40] ^= 1
    shard.write_bytes(content)


@pytest.fixture(scope="module")
def undisturbed(
    digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Topology], Run]:
    runs: dict[str, Run] = {}

    def run_of(topology: Topology) -> Run:
        if topology.name not in runs:
            directory = tmp_path_factory.mktemp("undisturbed") / "run"
            runs[topology.name] = train(topology, directory, CONFIG, f"--data_dir={digits}")
        return runs[topology.name]

    return run_of


def assert_continues(
    resumed: Run, saved: int, undisturbed: Callable[[Topology], Run], topology: Topology
) -> None:
    """`resumed` began at the step `saved`, and ended as a run without the fault."""
    assert f"resuming from step {saved}" in resumed.stdout
    assert resumed.result["eval"].keys() == {"loss", "accuracy"}
    if topology is PS:
        assert resumed.result["step"] >= STEPS
        assert resumed.result["examples"] == 48 * resumed.result["step"]
        return
    reference = undisturbed(topology)
    assert [line["step"] for line in resumed.metrics("eval")] == [EPOCH, STEPS]
    assert resumed.result["examples"] == reference.result["examples"]
    ours, theirs = resumed.variables(), reference.variables()
    if topology is SYNC:  # Moving statistics are changed by one worker after another.
        ours, theirs = ({k: v for k, v in of.items() if "optimizer/" in k} for of in (ours, theirs))
    assert largest_difference(ours, theirs) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("topology", "split", "change", "message"),
    [
        (WORKERS, "train", damage, "corrupt"),
        pytest.param(MIRRORED_2, "test", mislabel, "label", marks=pytest.mark.nightly),
        pytest.param(SYNC, "test", mislabel, "label", marks=pytest.mark.nightly),
        pytest.param(WORKERS, "test", mislabel, "label", marks=pytest.mark.nightly),
        pytest.param(PS, "test", mislabel, "label", marks=pytest.mark.nightly),
        pytest.param(MIRRORED, "train", damage, "corrupt", marks=pytest.mark.nightly),
        pytest.param(PS, "train", damage, "corrupt", marks=pytest.mark.nightly),
        pytest.param(SYNC, "train", damage, "corrupt", marks=pytest.mark.nightly),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bad_data_costs_no_step_and_the_same_command_continues_when_it_is_mended(
    topology: Topology,
    split: str,
    change: Callable[[Path], None],
    message: str,
    digits: Path,
    undisturbed: Callable[[Topology], Run],
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
    assert_continues(resumed, step, undisturbed, topology)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("topology", "fault", "exit_code"),
    [
        (MIRRORED, "hang", -signal.SIGKILL),
        (WORKERS, "hook", 1),
        (PS, "hook", 1),
        pytest.param(MIRRORED, "callback", 2, marks=pytest.mark.nightly),
        pytest.param(MIRRORED, "memory", 1, marks=pytest.mark.nightly),
        pytest.param(MIRRORED, "interrupt", 1, marks=pytest.mark.nightly),
        pytest.param(MIRRORED, "exit", 3, marks=pytest.mark.nightly),
        pytest.param(WORKERS, "callback", 2, marks=pytest.mark.nightly),
        pytest.param(PS, "size", 2, marks=pytest.mark.nightly),
        pytest.param(SYNC, "callback", 2, marks=pytest.mark.nightly),
        pytest.param(WORKERS, "size", 2, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_code_that_fails_costs_no_step(
    topology: Topology,
    fault: str,
    exit_code: int,
    digits: Path,
    undisturbed: Callable[[Topology], Run],
    tmp_path: Path,
) -> None:
    flags = CONFIG, f"--data_dir={digits}"
    trap = tmp_path / "trap"
    argv = *flags, f"--config.fault={fault}"
    with start(topology, tmp_path / "run", *argv, env={"TRAP": str(trap)}) as process:
        if fault == "hang":
            mark = tmp_path / f"run/checkpoints/step-{EPOCH:08d}/checkpoint.json"
            process.wait_until(mark.exists, "a checkpoint before the first evaluation")
            process.send(signal.SIGKILL)
        first = process.wait()
    assert first.exit_code == exit_code, process.output()
    if fault == "hang":
        assert trap.exists()
        assert first.metrics("eval") == []
        saved = EPOCH
    else:
        saved = first.result["step"]
        assert saved >= (EPOCH if fault in ("callback", "size") else AT_STEP)
        assert SAID.get(fault, fault) in first.result["why"]
    assert first.checkpoints()[-1] == f"step-{saved:08d}"

    resumed = train(topology, tmp_path / "run", *flags)
    assert_continues(resumed, saved, undisturbed, topology)
