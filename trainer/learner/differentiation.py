"""The gradient of a replica's part of a batch: at given values, in micro-batches, by XLA.

    differentiation = Differentiation(learner, variables, micro_batches=1)
    gradients, totals = differentiation.gradients_at(batch, None, training=True)
    gradients, totals = differentiation.gradients_at(batch, values, training=True)

`values` were read from the variables before: parameter servers send them, and XLA takes no variable
that the forward pass assigns.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from strategies.base import Batch
from strategies.gradients.parts import add_gradients, part_of_batch
from trainer.learner.variables import ModelVariables
from trainer.step.gradients import Gradient
from trainer.step.loss_scale import unscaled
from trainer.step.xla_errors import described, is_of_xla

if TYPE_CHECKING:
    from trainer.learner import Learner

log = logging.getLogger(__name__)


class Differentiation:
    """Differentiates the objective of a learner, whose methods a subclass may override.

    Attributes:
        with_xla: The function that XLA compiles, if it does.
    """

    def __init__(
        self, learner: "Learner", variables: ModelVariables, *, micro_batches: int
    ) -> None:
        self._learner, self._variables = learner, variables
        self._micro_batches = micro_batches
        self.with_xla: tf.types.experimental.PolymorphicFunction | None = None
        self._may_stop_compiling = False
        self._new: dict[int, tf.Tensor] | None = None

    def compile_with_xla(self, *, is_optional: bool) -> None:
        """Has XLA compile the gradient; if `is_optional`, `stop_compiling` may end it."""
        self.with_xla = tf.function(self._differentiate_at, jit_compile=True, autograph=False)
        self._may_stop_compiling = is_optional

    def stop_compiling(self, error: tf.errors.OpError) -> bool:
        """Returns True if `error` says that XLA cannot compile, and it need not: try again."""
        if not self._may_stop_compiling or not is_of_xla(error):
            return False
        self.with_xla, self._may_stop_compiling = None, False
        log.warning(
            "XLA is not used: %s With --config.jit_compile=False it is not tried.",
            described(error),
        )
        return True

    @contextlib.contextmanager
    def keeping_state(self) -> Iterator[dict[int, tf.Tensor]]:
        """Inside, new values of the inputs are collected by their index, and not assigned."""
        self._new = {}
        yield self._new
        self._new = None

    def gradients_at(
        self, batch: Batch, values: Sequence[tf.Tensor] | None, *, training: bool
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Returns the gradients and totals of `batch`, as `Learner.gradients`.

        At `values` of the `inputs` of the model's variables; None reads the variables.
        """
        values = None if values is None else list(values)
        num_parts = self._micro_batches
        part = part_of_batch(batch, 0, num_parts)
        gradients, totals = self._differentiate_and_assign(part, training, values)
        for i in range(1, num_parts):
            part = part_of_batch(batch, i, num_parts)
            # In sequence, so that the activations of only one micro-batch are in memory.
            with tf.control_dependencies([g for g in gradients if g is not None]):
                part = tf.nest.map_structure(tf.identity, part)
            more, more_totals = self._differentiate_and_assign(part, training, values)
            gradients = [add_gradients(a, b) for a, b in zip(gradients, more, strict=True)]
            totals += more_totals
        return gradients, totals

    def _differentiate_and_assign(
        self, batch: Batch, training: bool, values: list[tf.Tensor] | None
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Differentiates, and assigns what the forward pass updates: batch statistics, for example.

        If there are `values`, updates them too: the next micro-batch starts from them.
        """
        loss_scale = self._learner.loss_scale
        scale = loss_scale.read() if loss_scale else None
        if self.with_xla is not None:
            read = values or [tf.convert_to_tensor(variable) for variable in self._variables.inputs]
            gradients, totals, updates = self.with_xla(batch, training, read, scale)
        elif values is not None:
            gradients, totals, updates = self._differentiate_at(batch, training, values, scale)
        else:
            return self._differentiate(batch, training, self._variables.trained, scale)
        for key, value in updates.items():
            index = int(key)
            if self._new is None:
                self._variables.inputs[index].assign(value)
            else:
                self._new[index] = value
            if values is not None:
                values[index] = value
        return gradients, totals

    def _differentiate_at(
        self, batch: Batch, training: bool, values: Sequence[tf.Tensor], scale: tf.Tensor | None
    ) -> tuple[list[Gradient], tf.Tensor, dict[str, tf.Tensor]]:
        """Returns `_differentiate` at `values`, without side effects.

        The third result is what the forward pass would assign, by the index of the variable.
        """
        variables = self._variables.keras_inputs
        parts = self._variables.trained[len(self._variables.dense) :]
        with self._variables.assigning_nothing(values) as scope:
            before = [scope.get_current_value(variable) for variable in variables]
            sources = [*values[: len(self._variables.dense)], *parts]
            gradients, totals = self._differentiate(batch, training, sources, scale)
            after = [scope.get_current_value(variable) for variable in variables]
        pairs = enumerate(zip(before, after, strict=True))
        return gradients, totals, {str(i): new for i, (old, new) in pairs if new is not old}

    def _differentiate(
        self,
        batch: Batch,
        training: bool,
        sources: Sequence[tf.Variable | tf.Tensor],
        scale: tf.Tensor | None,
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Returns the gradient with respect to `sources`, variables or values, and totals."""
        learner, objective = self._learner, self._learner.objective
        inputs, labels, *others = batch
        seeds = [others.pop()] if learner.needs_seeds and others else []
        weights = objective.weights_of(labels, others[0] if others else None)
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = learner.forward(inputs, *seeds, training=training)
            losses = objective.losses(labels, outputs, weights, inputs=inputs, training=training)
            loss, losses = objective.with_penalties(losses)
            scaled = loss if scale is None else loss * scale
        gradients = tape.gradient(scaled, sources)
        if scale is not None:
            gradients = unscaled(gradients, scale)
        return gradients, learner.measure(labels, outputs, losses, weights=weights)
