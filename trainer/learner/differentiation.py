"""The gradient of a replica's part of a batch: at given values, in micro-batches, by XLA.

    gradients, totals = learner.gradients(batch)
    gradients, totals = learner.gradients_at(batch, values)

`values` were read from the variables before: parameter servers send them, and XLA takes no variable
that the forward pass assigns.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from data.system.compat import recomputing
from data.system.compat.autograph import no_autograph
from data.system.compat.keras_layers import keep_losses
from strategies.base import Batch, Tensor, read_now
from strategies.gradients.parts import add_gradients, part_of_batch
from strategies.step_errors import reason_of_xla
from trainer.learner.objective import Objective
from trainer.learner.variables import ModelVariables
from trainer.step.loss_scale import LossScale, unscaled
from trainer.step.random_layers import drawing

log = logging.getLogger(__name__)

_OR_CAPTURED = (
    ", or only through a tensor that a function of tf.recompute_grad takes from outside: make it "
    "an argument of the function"
)


class Differentiation(ModelVariables):
    """The part of a Learner that differentiates its objective. Learner sets the attributes."""

    needs_seeds: bool
    objective: Objective
    loss_scale: LossScale | None
    virtual_replicas: int
    _with_xla: tf.types.experimental.PolymorphicFunction | None = None
    _may_stop_compiling = False
    _has_warned = False
    _new_state: dict[int, tf.Tensor] | None = None

    def compile_with_xla(self, *, is_optional: bool = False) -> None:
        """Has XLA compile gradients and, if no method is overridden, updates and evaluations.

        Called before the first step. If `is_optional`, `stop_compiling` may end it.
        """
        self._with_xla = tf.function(self._differentiate_at, jit_compile=True, autograph=False)
        self._may_stop_compiling = is_optional

    def stop_compiling(self, error: tf.errors.OpError) -> bool:
        """Returns True if `error` says that XLA cannot compile, and it need not: try again."""
        reason = reason_of_xla(error)
        if not self._may_stop_compiling or not reason:
            return False
        self._with_xla, self._may_stop_compiling = None, False
        log.warning("XLA is not used: %s With --config.jit_compile=False it is not tried.", reason)
        return True

    @property
    def compiles(self) -> bool:
        """True if XLA may compile all that a replica computes in a step, not only the gradient.

        XLA merges operations, so that bits depend on what it compiles together.
        """
        return self._with_xla is not None and not self.virtual_replicas

    def forward(self, inputs: Batch, seeds: tf.Tensor | None = None, *, training: bool) -> Batch:
        """Returns the model's outputs. Random layers draw from `seeds`, int32 [B, 2]."""
        if self.tables:
            self.tables.begin_counting()
        with drawing(seeds):
            outputs = self.model(inputs, training=training)
        if self._needs_scope:
            keep_losses(self.model)
        return outputs

    @no_autograph
    def gradients(self, batch: Batch, *, training: bool = True) -> tuple[list[Tensor], tf.Tensor]:
        """Returns this replica's part of the gradient, and the metric totals of its examples.

        `batch` is (inputs, labels), each of B examples; then their weights, if `parse` returns
        some; then their seeds, int32 [B, 2], if `needs_seeds`. There is a gradient for each of
        `variables`, None where the loss does not depend on it. The totals are float64 [num_totals].

        Raises ValueError, while tracing, if the loss or a metric is not one value per example.
        """
        return self.gradients_at(batch, None, training=training)

    @property
    def gradient_inputs(self) -> Sequence[tf.Variable]:
        """The variables that `gradients_at` needs; empty if a subclass overrides `gradients`."""
        return () if self.overrides_gradients else self._forward_inputs

    @property
    def overrides_gradients(self) -> bool:
        """True if a subclass overrides `gradients`, so it reads the variables itself."""
        return type(self).gradients is not Differentiation.gradients

    @contextlib.contextmanager
    def keeping_state(self) -> Iterator[Mapping[int, tf.Tensor]]:
        """Inside, `gradients_at` changes no variable.

        The mapping gets what they would be, by the index in `gradient_inputs`.
        """
        self._new_state = {}
        yield self._new_state
        self._new_state = None

    @no_autograph
    def gradients_at(
        self, batch: Batch, values: Sequence[tf.Tensor] | None, *, training: bool = True
    ) -> tuple[list[Tensor], tf.Tensor]:
        """Returns `gradients(batch)` at `values`, which were read from `gradient_inputs`.

        None reads the variables.
        """
        values = None if values is None else list(values)
        num_parts = self._step_options.micro_batches
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
    ) -> tuple[list[Tensor], tf.Tensor]:
        """Differentiates, and assigns what the forward pass updates: batch statistics, for example.

        If there are `values`, updates them too: the next micro-batch starts from them.
        """
        scale = self.loss_scale.read() if self.loss_scale else None
        if values is None and self._with_xla is None and not self._needs_scope:
            state = self.layer_state if self.loss_scale else []
            before = [read_now(variable) for variable in state]
            gradients, totals = self._differentiate(batch, training, self.variables, scale)
            for variable, old in zip(state, before, strict=True):
                variable.assign(_where_finite(read_now(variable), old))
            return gradients, totals
        read = values or [tf.convert_to_tensor(variable) for variable in self._forward_inputs]
        differentiate = self._with_xla or self._differentiate_at
        gradients, totals, updates = differentiate(batch, training, read, scale)
        for key, value in updates.items():
            index = int(key)
            if scale is not None:
                value = _where_finite(value, read[index])
            if self._new_state is None:
                self._forward_inputs[index].assign(value)
            else:
                self._new_state[index] = value
            if values is not None:
                values[index] = value
        return gradients, totals

    def _differentiate_at(
        self, batch: Batch, training: bool, values: Sequence[tf.Tensor], scale: tf.Tensor | None
    ) -> tuple[list[Tensor], tf.Tensor, dict[str, tf.Tensor]]:
        """Returns `_differentiate` at `values`, without side effects.

        The third result is what the forward pass would assign, by the index of the variable.
        """
        variables, parts = self._keras_inputs, self.variables[self.num_dense :]
        with self._assigning_nothing(values) as scope:
            before = [scope.get_current_value(variable) for variable in variables]
            sources = [*values[: self.num_dense], *parts]
            gradients, totals = self._differentiate(batch, training, sources, scale)
            after = [scope.get_current_value(variable) for variable in variables]
        pairs = enumerate(zip(before, after, strict=True))
        return gradients, totals, {str(i): new for i, (old, new) in pairs if new is not old}

    def _assigning_nothing(self, values: Sequence[tf.Tensor]) -> keras.StatelessScope:
        """A scope in which the first inputs have `values`, and assignments have no effect.

        A loss of the model may add Keras' penalties: then the others have their present values in
        the scope, too.
        """
        if self.objective.has_model_loss:
            values = [*values, *map(tf.convert_to_tensor, self._forward_inputs[len(values) :])]
        mapping = list(zip(self._keras_inputs, values, strict=False))
        return keras.StatelessScope(state_mapping=mapping, collect_losses=True)

    def _differentiate(
        self,
        batch: Batch,
        training: bool,
        sources: Sequence[tf.Variable | tf.Tensor],
        scale: tf.Tensor | None,
    ) -> tuple[list[Tensor], tf.Tensor]:
        """Returns the gradient with respect to `sources`, variables or values, and totals."""
        inputs, labels, *others = batch
        seeds = others.pop() if self.needs_seeds and others else None
        weights = self.objective.weights_of(labels, others[0] if others else None)
        # The loss may also call the model.
        with tf.GradientTape() as tape, drawing(seeds):
            tape.watch(sources)
            outputs = self.forward(inputs, training=training)
            losses = self.objective.losses(
                labels, outputs, weights, inputs=inputs, training=training
            )
            loss, losses = self.objective.with_penalties(losses)
            scaled = loss if scale is None else loss * scale
        gradients = tape.gradient(scaled, sources)
        self._warn_of_untrained(gradients)
        if scale is not None:
            gradients = unscaled(gradients, scale)
        return gradients, self.measure(labels, outputs, losses, weights=weights)

    def _warn_of_untrained(self, gradients: Sequence[Tensor]) -> None:
        """Names the variables without a gradient, once."""
        pairs = zip(self.dense_variables, gradients, strict=False)
        paths = [variable.path for variable, gradient in pairs if gradient is None]
        if not paths or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "The loss has no gradient for %s: these variables do not change. The loss does not "
            "depend on them%s.",
            ", ".join(paths),
            _OR_CAPTURED * recomputing.is_used_by(self.model),
        )

    @no_autograph
    def measure(
        self,
        labels: Batch,
        outputs: Batch,
        losses: tf.Tensor,
        counts: tf.Tensor | None = None,
        *,
        weights: Batch | None = None,
    ) -> tf.Tensor:
        """Returns the totals of `losses`, [B], and of each metric: float64 [num_totals].

        Examples of which `counts` is 0 do not count. `weights` are those of the examples.
        """
        return self.objective.measure(labels, outputs, losses, counts, weights)


def _where_finite(new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Returns `new`, but the elements of `old` where `new` is NaN or infinite.

    A moving statistic would never recover from a step that overflows.
    """
    return tf.where(tf.math.is_finite(new), new, old) if new.dtype.is_floating else new
