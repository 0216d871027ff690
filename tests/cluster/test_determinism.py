"""The strategy is only a flag, and a resumed run ends bit for bit as an uninterrupted one."""

import signal
from pathlib import Path

import pytest

from tests.cluster.runs import (
    Run,
    Topology,
    assert_same_bits,
    largest_difference,
    start,
    topologies,
    train,
    train_here,
)

RESUMED = ("mirrored-2", "multiworker-2", "ps-sync-3+1")
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
SLOW = "tests/cluster/configs/slow.py"  # It has dropout.
AUGMENTED = "tests/cluster/configs/augmented.py"
QUICKLY = "--config.pause_secs=0"


def test_order_and_seed_change_the_weights(tmp_path: Path) -> None:
    def trained(name: str, **changes: object) -> Run:
        given = {"train_steps": 20, "pause_secs": 0.0, "optimizer": "sgd", "learning_rate": 0.1}
        return train_here(SLOW, tmp_path / name, **given, **changes)

    plain = trained("plain", checkpoint_every_steps=10)
    assert largest_difference(plain.weights("step-00000010"), plain.weights()) > 1e-2
    for different in (trained("in order", data={"shuffle": False}), trained("seeded", seed=1)):
        assert largest_difference(plain.weights(), different.weights()) > 1e-2


def test_augmented_examples_are_the_same_on_any_topology(tmp_path: Path) -> None:
    # 60 batches of 48 are two epochs: the seeds and tickets of both are used, and the cache.
    given = {"train_steps": 60}
    alone = train_here(AUGMENTED, tmp_path / "alone", **given)
    sgd = {"optimizer": "sgd", "learning_rate": 0.1}
    plain = train_here("tests/cluster/configs/linear.py", tmp_path / "plain", **given, **sgd)
    assert largest_difference(alone.weights(), plain.weights()) > 1e-2
    for name, cache_bytes in (("multiworker-2", 1 << 28), ("ps-sync-3+1", 0)):
        flags = (f"--config={AUGMENTED}", "--train_steps=60")
        cache = f"--config.data.cache_bytes={cache_bytes}"
        run = train(name, tmp_path / name, *flags, cache)
        assert largest_difference(alone.weights(), run.weights()) < 1e-5


def buckets(topology: Topology) -> tuple[str, ...]:
    """Flags for several all-reduces a step. A resumed run takes their size from config.json."""
    return ("--bucket_mb=0.0625",) if topology.strategy == "multiworker" else ()


@pytest.mark.parametrize(
    "topology", topologies("multiworker-2", nightly=("mirrored-2", "ps-sync-3+1"))
)
def test_stopped_run_ends_bit_for_bit_as_an_uninterrupted_one(
    topology: Topology, tmp_path: Path
) -> None:
    often = ("--config.checkpoint_every_steps=70", "--train_steps=200")
    flags = (f"--config={SLOW}", *often, *OPTIONS)
    uninterrupted = train(topology, tmp_path / "whole", *flags, *buckets(topology), QUICKLY)
    with start(topology, tmp_path / "run", *flags, *buckets(topology)) as process:
        process.wait_for_step(80)
        process.send(signal.SIGTERM)  # test_interrupt sends SIGINT.
        stopped = process.wait(exit_code=75)
    assert stopped.result["exit_code"] == 75
    step = stopped.result["step"]
    assert 80 <= step < 200
    assert {"step-00000070", f"step-{step:08d}"} <= set(stopped.checkpoints())
    assert largest_difference(stopped.weights(), uninterrupted.weights()) > 1e-3

    finished = train(topology, tmp_path / "run", *flags, QUICKLY)

    assert finished.result["step"] == 200
    assert finished.config["all_reduce"] == stopped.config["all_reduce"]
    assert bool(stopped.config["all_reduce"]) == bool(buckets(topology))
    assert_same_bits(finished, uninterrupted)
    assert len(finished.variables()) > 10
    assert finished.result["eval"] == uninterrupted.result["eval"]
    assert finished.steps("train") == sorted({step, *range(20, 201, 20)})


@pytest.mark.nightly  # test_python.py does it under mirrored.
def test_learning_rate_of_a_resumed_run_of_ps_is_that_of_its_command(tmp_path: Path) -> None:
    flags = "--config=tests/cluster/configs/linear.py"
    train("ps-2+1", tmp_path, flags, "--train_steps=20")
    finished = train("ps-2+1", tmp_path, flags, "--train_steps=40", "--learning_rate=0.5")
    rates = {report["step"]: report["learning_rate"] for report in finished.metrics("train")}
    assert rates == {20: pytest.approx(0.01), 40: pytest.approx(0.5)}


@pytest.mark.nightly
def test_deterministic_ops_train_in_all_synchronous_modes(tmp_path: Path) -> None:
    short = ("--train_steps=20", "--config.export=False")
    flags = (f"--config={SLOW}", QUICKLY, *short)
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
