"""Schedules: the factor of the learning rate as a function of the steps done.

    factor = rate_factor(config.schedule, train_steps=1000, batch_size=100)
    factor(learner.step)        # float32, a scalar

The decays are Keras' own; a warm-up for each of them, and linear scaling with the batch size, are
added here. trainer.step.options.ScheduleConfig has the formulas.
"""

from collections.abc import Callable
from typing import TypeAlias

import keras
import tensorflow as tf

from trainer.step.options import ScheduleConfig

# Steps done, an integer scalar -> factor of the learning rate of the next step, float32 scalar.
RateFactor: TypeAlias = Callable[[tf.Tensor], tf.Tensor]


def rate_factor(schedule: ScheduleConfig, *, train_steps: int, batch_size: int) -> RateFactor:
    """Returns the factor that `schedule` describes."""
    decay = _decay(schedule, schedule.decay_steps or train_steps)
    scale = batch_size / schedule.base_batch_size if schedule.base_batch_size else 1.0

    def factor(step: tf.Tensor) -> tf.Tensor:
        value = tf.constant(scale, tf.float32)
        if decay is not None:
            value *= decay(step)
        if schedule.warmup_steps:
            risen = tf.cast(step + 1, tf.float32) / schedule.warmup_steps
            start = schedule.warmup_start
            value *= start + (1 - start) * tf.minimum(risen, 1.0)
        return value

    return factor


def _decay(
    schedule: ScheduleConfig, decay_steps: int
) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """Returns Keras' schedule of a learning rate that starts at 1; None if it is constant."""
    kinds = keras.optimizers.schedules
    match schedule.kind:
        case "exponential":
            return kinds.ExponentialDecay(
                1.0, decay_steps, schedule.decay_rate, staircase=schedule.staircase
            )
        case "step":
            # Keras changes the rate one step after the boundary.
            boundaries = [boundary - 1 for boundary in schedule.boundaries]
            values = [schedule.decay_rate**i for i in range(len(boundaries) + 1)]
            return kinds.PiecewiseConstantDecay(boundaries, values)
        case "cosine":
            return kinds.CosineDecay(1.0, decay_steps, alpha=schedule.end_fraction)
        case "polynomial":
            return kinds.PolynomialDecay(1.0, decay_steps, schedule.end_fraction, schedule.power)
    return None
