"""Tables on many parameter servers: the weights of one process, also after another topology."""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.runs import Run, train, train_here
from trainer.embeddings.saved import table_directories

# Eight processes trace the graphs of three tables.
TIMEOUT_SECS = 300
pytestmark = pytest.mark.timeout(3 * TIMEOUT_SECS)

TABLES = "tests/cluster/configs/tables.py"
CONFIG = f"--config={TABLES}"
# Each fifth checkpoint has complete tables, the others have changed rows.
CHANGES_ONLY = ("--config.checkpoint_every_steps=7", "--config.complete_checkpoint_every=5")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    model_dir = tmp_path_factory.mktemp("alone") / "run"
    often = {"checkpoint_every_steps": 7, "complete_checkpoint_every": 5}
    return train_here(TABLES, model_dir, export=False, **often)


def assert_equal(run: Run, expected: Run, checkpoint: str = "") -> None:
    left, right = run.variables(checkpoint), expected.variables(checkpoint)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.shape == right[name].shape, name
        if value.dtype.kind in "iu":
            np.testing.assert_array_equal(value, right[name], err_msg=name)
        elif value.dtype.kind == "f":
            np.testing.assert_allclose(value, right[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("ps-sync-4+3", "mirrored-2", marks=pytest.mark.nightly),
        ("multiworker-2", "ps-sync-1+2"),
    ],
)
def test_tables_are_those_of_one_process_before_and_after_another_topology(
    first: str, second: str, alone: Run, tmp_path: Path
) -> None:
    ids = [value for name, value in alone.variables().items() if name.endswith("/ids")]
    assert len(ids) == 2
    assert 0 < min(map(len, ids)) < max(map(len, ids)), "nothing was evicted"
    for topology, steps in ((first, 22), (second, 50)):
        here = (f"--train_steps={steps}", "--config.export=False")
        flags = (CONFIG, *CHANGES_ONLY, *here)
        run = train(topology, tmp_path / "run", *flags, timeout_secs=TIMEOUT_SECS)
        newest = run.model_dir / "checkpoints" / f"step-{steps:08d}"
        # Checkpoints of steps 7, 14, 21 and 22; and then of 28, 35, 42, 49 and 50.
        assert len(table_directories(str(newest))) == 4
    assert_equal(run, alone)
    ours, theirs = run.metrics("train")[-1], alone.metrics("train")[-1]
    for name in ("table_rows", "table_unique_share", "table_bytes_per_step"):
        assert len(ours[name]) == 3
    assert ours["table_rows"]["few"] == theirs["table_rows"]["few"] <= 150
    assert theirs["table_evicted"]["few"] > 0 == theirs["table_evicted"]["all"]
    assert 0.1 < theirs["table_unique_share"]["all"] < 1
    assert set(theirs["table_bytes_per_step"].values()) == {0}
    if second == "ps-sync-1+2":
        unique = ours["table_unique_share"]["all"] * 40 * 8
        assert ours["table_bytes_per_step"]["all"] == round(unique * 2 * (8 + 4 * 8))


def test_workers_share_rows_on_their_cpus_while_other_devices_compute(
    alone: Run, tmp_path: Path
) -> None:
    """Two more logical CPUs of each worker stand in for GPUs: four replicas."""
    config = "--config=tests/cluster/configs/tables_beside_gpus.py"
    flags = (config, *CHANGES_ONLY, "--config.export=False")
    run = train(
        "multiworker-2",
        tmp_path / "run",
        *flags,
        "--train_steps=14",
        "--log_device_placement",
        timeout_secs=TIMEOUT_SECS,
    )
    assert_equal(run, alone, "step-00000014")
    placement = (run.model_dir / "tasks" / "worker-1.placement.txt").read_text()
    found = re.findall(r"^\S*while\S*: \((\w+)\): \S*device:CPU:(\d)$", placement, re.M)
    devices: dict[str, set[str]] = {}
    for op, device in found:
        devices.setdefault(op, set()).add(device)
    assert devices["MatMul"] == devices["SparseSoftmaxCrossEntropyWithLogits"] == {"1", "2"}
    assert devices["CollectiveReduceV2"] == {"1", "2"}, "sums of dense gradients"
    for op in ("ResourceGather", "LookupTableInsertV2", "ResourceSparseApplyAdagradV2"):
        assert devices[op] == {"0"}, op
    # Once in a worker: the numbers of rows, and the rows, of each of three tables.
    assert [device for op, device in found if op == "CollectiveGatherV2"] == ["0"] * 6
    assert len([op for op, _ in found if op == "ResourceSparseApplyAdagradV2"]) == 2


def test_asynchronous_workers_may_bring_the_same_new_ids(alone: Run, tmp_path: Path) -> None:
    flags = (CONFIG, *CHANGES_ONLY)
    run = train("ps-2+2", tmp_path / "run", *flags, timeout_secs=TIMEOUT_SECS)
    ours, expected = run.variables(), alone.variables()
    assert ours.keys() == expected.keys()
    for name, ids in ours.items():
        if name.endswith("/ids"):
            np.testing.assert_array_equal(ids, np.unique(ids))
            num_rows = int(ours[name.replace("/ids", "/use")][:, 0].sum())
            assert ours[name.replace("/ids", "/rows")].shape == (num_rows, 8)
            if ours[name.replace("/ids", "/use")][:, 0].all():  # No id waits for its row.
                np.testing.assert_array_equal(ids, expected[name], "all ids of 50 batches")
    loaded = tf.saved_model.load(str(run.model_dir / "export" / "saved_model"))
    assert np.isfinite(loaded.serve(tf.random.uniform([5, 8, 8, 1]))).all()
