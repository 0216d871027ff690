"""The strategy is only a flag, and a resumed run ends bit for bit as an uninterrupted one."""

import signal
from pathlib import Path

import pytest

from tests.cluster.runs import (
    SYNCHRONOUS,
    TOPOLOGIES,
    Run,
    Topology,
    assert_same_bits,
    largest_difference,
    start,
    topologies,
    train,
)

RESUMED = [TOPOLOGIES[name] for name in ("mirrored-2", "multiworker-2", "ps-sync-3+1")]
# Options that have variables, or depend on the step.
OPTIONS = (
    "--config.precision=mixed_float16",
    "--config.loss_scale.growth_steps=40",
    "--config.ema.decay=0.99",
    "--config.ema.warmup",
    "--config.optimizer=nadam",
    "--config.schedule.kind=cosine",
    "--config.schedule.decay_steps=400",
    "--config.schedule.warmup_steps=150",
    "--config.weight_decay.rate=0.01",
)
QUICKLY = "--config.pause_secs=0"


def test_order_and_seed_change_the_weights_and_the_strategy_does_not(
    digits: Path, tmp_path: Path
) -> None:
    flags = (
        "--config=tests/cluster/configs/slow.py",  # It has dropout.
        QUICKLY,
        f"--data_dir={digits}",
        "--config.optimizer=sgd",
        "--learning_rate=0.1",
        "--train_steps=50",
        "--config.checkpoint_every_steps=25",
        "--config.export=False",
    )
    alone = train(SYNCHRONOUS[0], tmp_path / "alone", *flags)
    shared = train(SYNCHRONOUS[-1], tmp_path / "shared", *flags)
    in_order = train(SYNCHRONOUS[0], tmp_path / "order", *flags, "--config.data.shuffle=False")
    seeded = train(SYNCHRONOUS[0], tmp_path / "seeded", *flags, "--config.seed=1")

    assert largest_difference(alone.weights("step-00000025"), alone.weights()) > 1e-2
    for different in (in_order, seeded):
        assert largest_difference(alone.weights(), different.weights()) > 1e-2
    assert largest_difference(alone.weights(), shared.weights()) < 1e-5
    losses = [run.metrics("train")[-1]["loss"] for run in (alone, shared)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_augmented_examples_are_the_same_on_any_topology(digits: Path, tmp_path: Path) -> None:
    # 60 batches of 48 are two epochs: the seeds and tickets of both are used, and the cache.
    flags = (f"--data_dir={digits}", "--train_steps=60")
    augmented = ("--config=tests/cluster/configs/augmented.py", *flags)
    one, _, ring, ps = SYNCHRONOUS
    cached = (*augmented, f"--config.data.cache_bytes={1 << 28}")
    alone = train(one, tmp_path / "alone", *augmented)
    shared = [train(ring, tmp_path / "ring", *cached), train(ps, tmp_path / "ps", *augmented)]
    sgd = ("--config.optimizer=sgd", "--learning_rate=0.1")
    plain = ("--config=tests/cluster/configs/linear.py", *sgd, *flags)
    unaugmented = train(one, tmp_path / "plain", *plain)
    assert largest_difference(alone.weights(), unaugmented.weights()) > 1e-2
    for run in shared:
        assert largest_difference(alone.weights(), run.weights()) < 1e-5


@pytest.fixture(
    scope="module",
    params=topologies("multiworker-2", nightly=("mirrored-2", "ps-sync-3+1")),
    ids=str,
)
def topology(request: pytest.FixtureRequest) -> Topology:
    topology: Topology = request.param
    return topology


@pytest.fixture(scope="module")
def flags(topology: Topology, digits: Path) -> tuple[str, ...]:
    return (
        "--config=tests/cluster/configs/slow.py",
        f"--data_dir={digits}",
        "--config.checkpoint_every_steps=70",
        *OPTIONS,
    )


def buckets(topology: Topology) -> tuple[str, ...]:
    """Flags for several all-reduces a step. A resumed run takes their size from config.json."""
    return ("--bucket_mb=0.0625",) if topology.strategy == "multiworker" else ()


@pytest.fixture(scope="module")
def uninterrupted(
    topology: Topology, flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    model_dir = tmp_path_factory.mktemp(f"uninterrupted-{topology}") / "run"
    return train(topology, model_dir, *flags, *buckets(topology), QUICKLY)


def test_stopped_run_ends_bit_for_bit_as_an_uninterrupted_one(
    topology: Topology, flags: tuple[str, ...], uninterrupted: Run, tmp_path: Path
) -> None:
    with start(topology, tmp_path, *flags, *buckets(topology)) as process:
        process.wait_for_step(120)
        process.send(signal.SIGTERM)  # test_interrupt sends SIGINT.
        stopped = process.wait()
    assert stopped.exit_code == 75, stopped.stderr
    assert stopped.result["exit_code"] == 75
    step = stopped.result["step"]
    assert 120 <= step < 300
    assert {"step-00000070", f"step-{step:08d}"} <= set(stopped.checkpoints())
    assert largest_difference(stopped.weights(), uninterrupted.weights()) > 1e-3

    finished = train(topology, tmp_path, *flags, QUICKLY)

    assert finished.result["step"] == 300
    assert finished.config["all_reduce"] == stopped.config["all_reduce"]
    assert bool(stopped.config["all_reduce"]) == bool(buckets(topology))
    assert_same_bits(finished, uninterrupted)
    assert len(finished.variables()) > 10
    assert finished.result["eval"] == uninterrupted.result["eval"]
    steps = [report["step"] for report in finished.metrics("train")]
    assert steps == sorted({step, *range(20, 301, 20)})


@pytest.mark.parametrize("name", ["mirrored-1", pytest.param("ps-2+1", marks=pytest.mark.nightly)])
def test_learning_rate_of_a_resumed_run_is_that_of_its_command(
    name: str, digits: Path, tmp_path: Path
) -> None:
    flags = ("--config=tests/cluster/configs/linear.py", f"--data_dir={digits}")
    train(TOPOLOGIES[name], tmp_path, *flags, "--train_steps=20")
    finished = train(TOPOLOGIES[name], tmp_path, *flags, "--train_steps=40", "--learning_rate=0.5")
    rates = {report["step"]: report["learning_rate"] for report in finished.metrics("train")}
    assert rates == {20: pytest.approx(0.01), 40: pytest.approx(0.5)}


@pytest.mark.nightly
def test_deterministic_ops_train_in_all_synchronous_modes(digits: Path, tmp_path: Path) -> None:
    flags = (
        "--config=tests/cluster/configs/slow.py",  # It has dropout.
        QUICKLY,
        f"--data_dir={digits}",
        "--train_steps=20",
        "--config.export=False",
    )
    plain = train(RESUMED[0], tmp_path / "plain", *flags)
    found = []
    for topology in RESUMED:
        one, again = [
            train(topology, tmp_path / f"{topology}-{number}", *flags, "--deterministic")
            for number in range(2)
        ]
        assert one.config["config"]["deterministic"]
        assert_same_bits(one, again)
        found.append(one.weights())
    # Deterministic ops add in another order.
    assert 0 < largest_difference(found[0], plain.weights()) < 1e-5
    for weights in found[1:]:
        assert largest_difference(found[0], weights) < 1e-5
