"""Histograms of variables and gradients, and a TensorFlow profile, for TensorBoard."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import tensorflow as tf
from typing_extensions import override

from strategies.base import Batch
from strategies.metrics import Metrics
from trainer.checkpoints.file_checks import STORAGE_ERRORS
from trainer.exit_codes import first_line
from trainer.hooks.base import NEVER, Hook, PeriodicHook
from trainer.learner import Learner

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Histograms(PeriodicHook):
    """Writes histograms of trainable variables, except tables, and of their gradients."""

    learner: Learner
    next_batch: Callable[[], Batch]  # (inputs, labels)
    writing: Callable[[int], contextlib.AbstractContextManager[None]]  # For tf.summary; of a step.

    def __post_init__(self) -> None:
        # training=False: this must not change the statistics of batch normalisation.
        self._gradients = tf.function(
            lambda batch: self.learner.gradients(batch, training=False)[0]
        )

    @override
    def act(self, step: int) -> None:
        gradients = self._gradients(self.next_batch())
        histograms = {}
        # Tables come after these: their rows are too many for a histogram.
        variables = self.learner.dense_variables
        for variable, gradient in zip(variables, gradients, strict=False):
            histograms[f"variables/{variable.path}"] = tf.convert_to_tensor(variable.value)
            if gradient is not None:
                histograms[f"gradients/{variable.path}"] = tf.convert_to_tensor(gradient)
        try:
            with self.writing(step):
                for name, values in histograms.items():
                    tf.summary.histogram(name, values)
        except STORAGE_ERRORS as error:
            log.warning("The histograms of step %d are lost: %s", step, first_line(error))


@dataclass(eq=False)
class Profile(Hook):
    """A profile of the calls from `first_step` to the call that reaches first_step + num_steps."""

    log_dir: str
    _: KW_ONLY
    first_step: int
    num_steps: int
    _is_running: bool = field(default=False, init=False)

    @property
    def _last_step(self) -> int:
        return self.first_step + self.num_steps

    @override
    def next_step(self, step: int) -> int:
        if self._is_running:
            return self._last_step
        return self.first_step if step < self.first_step else NEVER

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        if self._is_running and step >= self._last_step:
            self.end(step)
        elif not self._is_running and self.first_step <= step < self._last_step:
            tf.profiler.experimental.start(self.log_dir)
            self._is_running = True

    @override
    def end(self, step: int) -> None:
        if self._is_running:
            self._is_running = False
            try:
                tf.profiler.experimental.stop()
            except STORAGE_ERRORS as error:
                log.warning("The profile is lost: %s", first_line(error))
