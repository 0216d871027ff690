"""`--wire_dtype`, `--read_dtype`: messages of 16 bits train like 32 bits, up to rounding."""

from pathlib import Path

import pytest

from strategies.cluster.tf_config import local_cluster
from tests.cluster.runs import (
    Run,
    assert_one_error,
    by_hand,
    largest_difference,
    train,
    train_here,
)

LINEAR = "tests/cluster/configs/linear.py"
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "train_steps": 40}
FLAGS = (f"--config={LINEAR}", *(f"--config.{name}={value}" for name, value in SGD.items()))
ONLY_TABLES = "tests/cluster/configs/only_tables.py"


def test_synchronous_gradients_of_16_bits_end_near_the_weights_of_one_device(
    tmp_path: Path,
) -> None:
    alone = train_here(LINEAR, tmp_path / "alone", **SGD)
    for name, flag, dtype in (
        ("multiworker-2", "wire_dtype", "bfloat16"),
        ("ps-sync-2+1", "wire_dtype", "float16"),
        ("ps-sync-2+1", "read_dtype", "bfloat16"),
    ):
        run = train(name, tmp_path / f"{name}-{flag}", *FLAGS, f"--{flag}={dtype}")
        assert run.config[flag] == dtype
        # It was rounded, but by less than a hundredth.
        assert 1e-6 < largest_difference(alone.weights(), run.weights()) < 1e-2
        assert run.result["eval"]["loss"] == pytest.approx(alone.result["eval"]["loss"], rel=0.01)


def test_asynchronous_gradients_of_16_bits_train(tmp_path: Path) -> None:
    flags = (f"--config={LINEAR}", "--train_steps=300")
    sent = ("--wire_dtype=bfloat16", "--read_dtype=bfloat16", "--max_staleness=2")
    run = train("ps-2+1", tmp_path, *flags, *sent)
    assert run.result["eval"]["accuracy"] > 0.9


def test_tasks_with_different_wire_dtypes_are_refused(tmp_path: Path) -> None:
    cluster = local_cluster("multiworker", 2, 0)
    with by_hand(cluster, tmp_path, *FLAGS) as tasks:
        one, other = cluster.tasks()
        tasks.start(one)
        tasks.start(other, flags=("--wire_dtype=float16",))
        runs = tasks.wait(2)
    assert_one_error(runs["worker 1"], "differ in --wire_dtype (float16 here)")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    model_dir = tmp_path_factory.mktemp("alone") / "run"
    return train_here(ONLY_TABLES, model_dir, export=False)


@pytest.mark.parametrize(
    ("name", "flag", "value_bytes"),
    [
        ("multiworker-2", "--wire_dtype=float16", 2),
        pytest.param("ps-sync-2+1", "--wire_dtype=bfloat16", 4 + 2, marks=pytest.mark.nightly),
        ("ps-sync-2+2", "--read_dtype=bfloat16", 2 + 4),
        pytest.param("ps-1+1", "--wire_dtype=bfloat16", 4 + 2, marks=pytest.mark.nightly),
        pytest.param("ps-1+1", "--read_dtype=bfloat16", 2 + 4, marks=pytest.mark.nightly),
    ],
)
def test_rows_of_a_model_without_dense_variables_are_rounded(
    name: str,
    flag: str,
    value_bytes: int,
    alone: Run,
    tmp_path: Path,
) -> None:
    here = (f"--config={ONLY_TABLES}", "--config.export=False")
    exact = train(name, tmp_path / "exact", *here)
    assert largest_difference(alone.variables(), exact.variables()) < 1e-6
    run = train(name, tmp_path / "rounded", *here, flag)
    assert 1e-5 < largest_difference(alone.variables(), run.variables()) < 2e-2
    # A batch of 40 examples has 8 ids each. Under ps an id travels twice.
    report = run.metrics("train")[-1]
    unique = report["table_unique_share"]["ids"] * 40 * 8
    id_bytes = 8 if name == "multiworker-2" else 2 * 8
    expected = unique * (id_bytes + 10 * value_bytes)
    assert report["table_bytes_per_step"]["ids"] == pytest.approx(expected, rel=0.01)
