"""Learner: a model, its optimizer and the step; the maths that all strategies share.

    with executor.scope():
        learner = Learner(model, optimizer, loss, metrics, batch_size=100)

`gradients` changes no trainable variable; `apply` is the only place where one changes; `update` is
both. The gradient of a step is that of

    sum over the examples of the batch of weight * loss / batch_size

so replicas may have uneven shares, and the sum over replicas is the gradient of one big batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from strategies.base import read_now

Tensor = Any
# outputs of the model and labels of B examples -> one float a example, [B].
PerExample = Callable[[Tensor, Tensor], Tensor]


class OptimizerError(ValueError):
    """An optimizer setting that would be ignored. Exit code 2."""


# Keras applies these outside `update_step`, where they are wrong or fail under tf.distribute.
_UNSUPPORTED = {
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "weight_decay": None,
    "use_ema": False,
    "gradient_accumulation_steps": None,
    "loss_scale_factor": None,
}


class Learner:
    """A model, an optimizer and what is measured, built in a strategy's scope."""

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.Optimizer,
        loss: PerExample,
        metrics: Mapping[str, PerExample],
        *,
        batch_size: int,
    ) -> None:
        """Builds the optimizer's variables, so call it inside the strategy's scope.

        Args:
            model: A built model.
            optimizer: Any Keras optimizer, without the settings it cannot keep here.
            loss: (labels, outputs) -> loss of each example, [B].
            metrics: Name -> (labels, outputs) -> value of each example, [B].
            batch_size: Examples of a step, over all replicas.

        Raises:
            OptimizerError: the optimizer has a setting that would be ignored.
        """
        check_optimizer(optimizer)
        self.model = model
        self.optimizer = optimizer
        self._loss = loss
        self._metrics = dict(metrics)
        self._batch_size = batch_size
        self._variables = [variable.value for variable in model.trainable_variables]
        optimizer.build(model.trainable_variables)

    @property
    def metric_names(self) -> Sequence[str]:
        """`loss`, then the metrics in their order."""
        return ("loss", *self._metrics)

    @property
    def variables(self) -> Sequence[Tensor]:
        """The trainable tf.Variables, in the order of `gradients`."""
        return self._variables

    @property
    def step(self) -> Tensor:
        """The optimizer's counter, an integer tf.Variable: applied updates, exactly."""
        return self.optimizer.iterations.value

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use."""
        return float(tf.convert_to_tensor(self.optimizer.learning_rate).numpy())

    def gradients(self, batch: Any, *, training: bool = True) -> tuple[list[Tensor], Tensor]:
        """This replica's part of the gradient, and the metrics of its share of the batch.

        Args:
            batch: (inputs, labels) with this replica's share of the batch in front.
            training: Whether layers such as dropout behave as in training.

        Returns:
            A gradient for each trainable variable (None where the loss does not depend on it), and
            float64 [metrics, 2].
        """
        inputs, labels = batch
        with tf.GradientTape() as tape:
            outputs = self.model(inputs, training=training)
            losses = self._loss(labels, outputs)
            # A regulariser counts once a step, not once a replica.
            num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
            penalty = (
                tf.add_n(self.model.losses) if self.model.losses else tf.zeros([], losses.dtype)
            )
            loss = tf.reduce_sum(losses) / self._batch_size + penalty / num_replicas
        gradients = tape.gradient(loss, self._variables)
        return gradients, self._measure(labels, outputs, losses + penalty, None)

    def apply(self, gradients: Sequence[Tensor]) -> Tensor:
        """Changes the variables by `gradients`, already summed over replicas, and counts the step.

        Returns the counter after that, which other workers may have advanced too by then.
        In replica context. The optimizer's own `apply` would add up gradients again, clip before
        the sum, and lose counts under parameter servers; `update_step` is Keras' public extension
        point for the maths alone.
        """
        rate = tf.convert_to_tensor(self.optimizer.learning_rate)
        changed = [
            (variable, gradient)
            for variable, gradient in zip(self._variables, gradients, strict=True)
            if gradient is not None
        ]

        def update(variable: Tensor, gradient: Tensor) -> Tensor:
            self.optimizer.update_step(gradient, variable, rate)
            return read_now(variable)

        def update_all(strategy: Any, *summed: Tensor) -> list[Tensor]:
            return [
                strategy.extended.update(variable, update, args=(gradient,), group=False)
                for (variable, _), gradient in zip(changed, summed, strict=True)
            ]

        context = tf.distribute.get_replica_context()
        updated = context.merge_call(update_all, args=tuple(gradient for _, gradient in changed))
        # The count comes after what it counts: who has read it may read the variables.
        with tf.control_dependencies(tf.nest.flatten(updated)):
            # keras.Variable.assign_add reads, then writes: two workers would lose counts.
            return self.step.assign_add(1)

    def update(self, batch: Any) -> Tensor:
        """One step on this replica's share of a batch; its metrics, float64 [metrics, 2]."""
        gradients, sums = self.gradients(batch)
        self.apply(_sum_over_replicas(gradients))
        return sums

    def evaluate(self, batch: Any) -> Tensor:
        """Metrics of a share (inputs, labels, weights) of a batch, float64 [metrics, 2].

        A weight is 1 for an example that counts, 0 for one that only fills the batch up.
        """
        inputs, labels, weights = batch
        outputs = self.model(inputs, training=False)
        return self._measure(labels, outputs, self._loss(labels, outputs), weights)

    def _measure(
        self, labels: Tensor, outputs: Tensor, losses: Tensor, weights: Tensor | None
    ) -> Tensor:
        """(total, count) of each metric, float64 [metrics, 2]: a float32 count stops at 2**24."""
        values = [losses, *(metric(labels, outputs) for metric in self._metrics.values())]
        weights = tf.ones_like(losses, tf.float64) if weights is None else weights
        weights = tf.cast(weights, tf.float64)
        # Not value * 0: a padded example must not count even where it gives nan.
        totals = [
            tf.reduce_sum(tf.where(weights > 0, tf.cast(value, tf.float64), 0.0) * weights)
            for value in values
        ]
        count = tf.reduce_sum(weights)
        return tf.stack([tf.stack([total, count]) for total in totals])


def check_optimizer(optimizer: keras.Optimizer) -> None:
    """Returns if every setting of `optimizer` is kept by `Learner.apply`.

    Raises:
        OptimizerError: it has one that would be ignored, or one that fails under tf.distribute.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise OptimizerError(
            "LossScaleOptimizer is not supported: under tf.distribute it looks for overflow on one "
            "replica only. Return the inner optimizer from build_optimizer."
        )
    for name, off in _UNSUPPORTED.items():
        value = getattr(optimizer, name, off)
        if value != off:
            raise OptimizerError(
                f"{type(optimizer).__name__}({name}={value!r}) is not supported: Keras applies "
                f"{name} wrongly, or not at all, under tf.distribute. Leave {name} out of "
                "build_optimizer."
            )


def _sum_over_replicas(gradients: Sequence[Tensor]) -> list[Tensor]:
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)
    present = [gradient for gradient in gradients if gradient is not None]
    summed = iter(context.all_reduce("sum", present))
    return [None if gradient is None else next(summed) for gradient in gradients]


def sparse_categorical_crossentropy(labels: Tensor, logits: Tensor) -> Tensor:
    """Softmax cross entropy in nats. labels: int [B]; logits: float [B, classes]; returns [B]."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def accuracy(labels: Tensor, logits: Tensor) -> Tensor:
    """1 where the largest logit is the label's, else 0. labels: int [B]; returns float32 [B]."""
    hits = tf.equal(tf.argmax(logits, axis=-1), tf.cast(labels, tf.int64))
    return tf.cast(hits, tf.float32)
