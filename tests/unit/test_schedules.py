"""The learning rate of each step: formulas, warm-up, linear scaling."""

import math
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.unit.replicas import replicas, updater
from trainer.learner import Learner
from trainer.step.options import ScheduleConfig
from trainer.step.schedules import rate_factor

EXPECTED: dict[str, tuple[ScheduleConfig, Callable[[int], float]]] = {
    "constant": (ScheduleConfig(), lambda t: 1.0),
    "exponential": (
        ScheduleConfig(kind="exponential", decay_steps=7, decay_rate=0.9),
        lambda t: 0.9 ** (t / 7),
    ),
    "staircase": (
        ScheduleConfig(kind="exponential", decay_steps=7, decay_rate=0.9, staircase=True),
        lambda t: 0.9 ** (t // 7),
    ),
    "step": (
        ScheduleConfig(kind="step", boundaries=(5, 30)),
        lambda t: 1.0 if t < 5 else 0.1 if t < 30 else 0.01,
    ),
    "cosine": (
        ScheduleConfig(kind="cosine", end_fraction=0.2),
        lambda t: 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * min(t, 50) / 50)),
    ),
    "polynomial": (
        ScheduleConfig(kind="polynomial", decay_steps=40, end_fraction=0.1, power=2.0),
        lambda t: 0.1 + 0.9 * (1 - min(t, 40) / 40) ** 2,
    ),
    "warm-up": (
        ScheduleConfig(kind="cosine", warmup_steps=10, warmup_start=0.25),
        lambda t: (
            (0.25 + 0.75 * min((t + 1) / 10, 1)) * 0.5 * (1 + math.cos(math.pi * min(t, 50) / 50))
        ),
    ),
    "linear scaling": (ScheduleConfig(base_batch_size=16), lambda t: 4.0),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_rate_follows_the_formula_at_every_step(name: str) -> None:
    schedule, formula = EXPECTED[name]
    factor = tf.function(rate_factor(schedule, train_steps=50, batch_size=64))
    found = [float(factor(tf.constant(t, tf.int64))) for t in range(60)]
    assert found == pytest.approx([formula(t) for t in range(60)], rel=1e-5, abs=1e-6)


def test_rate_is_that_of_the_step_that_uses_it() -> None:
    """A weight whose gradient is always 1 moves by the rate."""
    schedule = ScheduleConfig(kind="step", boundaries=(2, 3), warmup_steps=2)

    def loss(labels: Any, outputs: Any) -> Any:
        return outputs[:, 0]

    factor = rate_factor(schedule, train_steps=9, batch_size=1)
    with replicas(1).scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        optimizer = keras.optimizers.SGD(0.5)
        learner = Learner(model, optimizer, loss, {}, batch_size=1, rate_factor=factor)
    batch = tf.ones([1, 1]), tf.zeros([1], tf.int64)
    said, moved = [], []
    for _ in range(4):
        before = float(layer.kernel.numpy()[0, 0])
        said.append(learner.learning_rate)
        updater(learner)(batch)
        moved.append(before - float(layer.kernel.numpy()[0, 0]))
    assert said == pytest.approx([0.25, 0.5, 0.05, 0.005], rel=1e-5)
    assert moved == pytest.approx(said, rel=1e-4)
