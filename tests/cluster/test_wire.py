"""`--wire_dtype`, `--read_dtype`: messages of 16 bits train like 32 bits, up to rounding."""

from pathlib import Path

import pytest

from strategies.cluster.tf_config import local_cluster
from tests.cluster.runs import (
    TOPOLOGIES,
    assert_one_error,
    by_hand,
    largest_difference,
    train,
)

FLAGS = (
    "--config=tests/cluster/configs/linear.py",
    "--config.optimizer=sgd",
    "--learning_rate=0.1",
    "--train_steps=40",
)


def test_synchronous_gradients_of_16_bits_end_near_the_weights_of_one_device(
    digits: Path, tmp_path: Path
) -> None:
    flags = (*FLAGS, f"--data_dir={digits}")
    alone = train(TOPOLOGIES["mirrored-1"], tmp_path / "alone", *flags)
    for name, flag, dtype in (
        ("multiworker-2", "wire_dtype", "bfloat16"),
        ("ps-sync-3+1", "wire_dtype", "float16"),
        ("ps-sync-3+1", "read_dtype", "bfloat16"),
    ):
        run = train(TOPOLOGIES[name], tmp_path / f"{name}-{flag}", *flags, f"--{flag}={dtype}")
        assert run.config[flag] == dtype
        # It was rounded, but by less than a hundredth.
        assert 1e-6 < largest_difference(alone.weights(), run.weights()) < 1e-2
        assert run.result["eval"]["loss"] == pytest.approx(alone.result["eval"]["loss"], rel=0.01)


def test_asynchronous_gradients_of_16_bits_train(digits: Path, tmp_path: Path) -> None:
    run = train(
        TOPOLOGIES["ps-2+1"],
        tmp_path,
        "--config=tests/cluster/configs/linear.py",
        f"--data_dir={digits}",
        "--train_steps=300",
        "--wire_dtype=bfloat16",
        "--read_dtype=bfloat16",
        "--max_staleness=2",
    )
    assert run.result["eval"]["accuracy"] > 0.9


def test_tasks_with_different_wire_dtypes_are_refused(digits: Path, tmp_path: Path) -> None:
    cluster = local_cluster("multiworker", 2, 0)
    with by_hand(cluster, tmp_path, *FLAGS, f"--data_dir={digits}") as tasks:
        one, other = cluster.tasks()
        tasks.start(one)
        tasks.start(other, flags=("--wire_dtype=float16",))
        runs = tasks.wait(2)
    assert_one_error(runs["worker 1"], "differ in --wire_dtype (float16 here)")


@pytest.mark.parametrize(
    ("name", "flags", "value_bytes"),
    [
        ("multiworker-2", ("--wire_dtype=float16",), 2),
        ("ps-sync-3+1", ("--wire_dtype=bfloat16",), 4 + 2),
        ("ps-sync-3+1", ("--read_dtype=float16", "--ps=2"), 2 + 4),
        ("ps-2+1", ("--wire_dtype=bfloat16", "--read_dtype=bfloat16"), 2 + 2),
    ],
)
def test_rows_of_tables_travel_in_16_bits(
    name: str, flags: tuple[str, ...], value_bytes: int, digits: Path, tmp_path: Path
) -> None:
    given = ("--config=tests/cluster/configs/tables.py", f"--data_dir={digits}", "--train_steps=40")
    run = train(TOPOLOGIES[name], tmp_path / "run", *given, *flags)
    report = run.metrics("train")[-1]
    if name != "ps-2+1":  # Not asynchronous.
        alone = train(TOPOLOGIES["mirrored-1"], tmp_path / "alone", *given)
        tables = {key: v for key, v in alone.variables().items() if key.endswith("/rows")}
        found = {key: run.variables()[key] for key in tables}
        assert 1e-6 < largest_difference(tables, found) < 2e-2
    # A batch of 40 examples has 8 ids each. Under ps an id travels twice.
    unique = report["table_unique_share"]["all"] * 40 * 8
    id_bytes = 8 if name == "multiworker-2" else 2 * 8
    expected = unique * (id_bytes + 8 * value_bytes)
    assert report["table_bytes_per_step"]["all"] == pytest.approx(expected, rel=0.01)
