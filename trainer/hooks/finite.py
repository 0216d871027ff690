"""Raises NonFiniteLossError if the loss or a variable is not finite, before the state is saved.

hooks = [StopOnNonFinite(learner.loss_scale), ...]     # first: later hooks save and export
require_finite(learner, step)                          # raises if a variable is not finite
"""

import math
from dataclasses import dataclass, field

import tensorflow as tf
from typing_extensions import override

from data.system.errors import RunFailed
from strategies.metrics import Metrics
from trainer.embeddings.optimizers import capacity, gather_rows
from trainer.hooks.base import Hook
from trainer.learner import Learner
from trainer.step.loss_scale import LossScale

# Rows of a table that are read at a time.
_ROWS = 1 << 18


class NonFiniteLossError(RunFailed):
    """The loss or a variable is not finite: the run ends, or goes back to a checkpoint."""


def require_finite(learner: Learner, step: int) -> None:
    """Raises NonFiniteLossError if a trainable variable is not finite.

    Called before each save, except of the initial state. A finite loss proves nothing: the loss
    of a step is computed before the variables change.
    """
    for index, variable in enumerate(learner.variables):
        is_table = index >= learner.num_dense
        if not (_is_finite_table(variable) if is_table else _is_finite(variable.read_value())):
            raise NonFiniteLossError(
                f"At step {step} {variable.name} is no longer finite: a gradient overflowed. Lower "
                "--learning_rate. The last checkpoint is from before."
            )


def _is_finite(value: tf.Tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(value)).numpy())


def _is_finite_table(part: tf.Variable) -> bool:
    """Reads a part of a table on its device, a few rows at a time: it may be large."""
    with tf.device(part.device):
        num_rows = int(capacity(part))
        return all(
            _is_finite(gather_rows(part, tf.range(start, min(start + _ROWS, num_rows))))
            for start in range(0, num_rows, _ROWS)
        )


@dataclass(eq=False)
class StopOnNonFinite(Hook):
    """Raises NonFiniteLossError for a NaN or infinite loss. The first hook of every task.

    In float16 a step whose gradient is not finite is skipped, and its loss may be infinite. This
    is no error, unless the scale is at its minimum and all steps since the last call were skipped.
    """

    loss_scale: LossScale | None = None  # None if the model does not compute in float16.
    _last_step: int = field(default=0, init=False)
    _num_skipped_before: int = field(default=0, init=False)

    @override
    def begin(self, step: int) -> None:
        self._last_step = step
        self._num_skipped_before = self._num_skipped()

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        total, _ = metrics["loss"]
        skipped = self._num_skipped() - self._num_skipped_before
        self._num_skipped_before += skipped
        first, num_steps = self._last_step + 1, step - self._last_step
        if self.loss_scale and skipped >= num_steps and self.loss_scale.is_at_minimum:
            raise NonFiniteLossError(
                f"The gradients of steps {first} to {step} are not finite in float16, even without "
                "a loss scale. Type --config.precision=mixed_bfloat16, or lower --learning_rate."
            )
        if not math.isfinite(total) and not skipped:
            raise NonFiniteLossError(
                f"The loss became {total} somewhere in steps {first} to {step}. Lower "
                "--learning_rate, or look at that range with --config.steps_per_call=1. The last "
                "checkpoint is from before."
            )
        self._last_step = step

    def _num_skipped(self) -> int:
        return self.loss_scale.num_skipped if self.loss_scale else 0
