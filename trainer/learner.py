"""Learner: a model, its optimizer and the step; the maths that all strategies share.

    with executor.scope():
        learner = Learner(model, optimizer, loss, metrics, batch_size=100)

`gradients` changes no trainable variable; `apply` is the only place where one changes; `update` is
both. The gradient of a step is that of

    sum over the examples of the batch of weight * loss / batch_size

so replicas may have uneven shares, and the sum over replicas is the gradient of one big batch. A
share of n examples brings n / batch_size of the regularisation penalty, so that the shares bring it
once, however many they are.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from strategies.base import read_now

Tensor = Any
# outputs of the model and labels of B examples -> one float a example, [B].
PerExample = Callable[[Tensor, Tensor], Tensor]


class OptimizerError(ValueError):
    """An optimizer, or a setting of it or of the model, that would train wrongly. Exit code 2."""


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

# What of an optimizer's class `Learner` calls, or `update_step` may call. A class that overrides
# another method of Keras' Optimizer keeps a part of its maths where nobody calls it: Nadam in
# `_backend_update_step`, Muon in `_apply_weight_decay`, MultiOptimizer in `apply`.
_CALLED = {
    "add_optimizer_variables",
    "add_variable",
    "add_variable_from_reference",
    "assign",
    "assign_add",
    "assign_sub",
    "build",
    "from_config",
    "get_config",
    "update_step",
}


class Learner:
    """A model, an optimizer and what is measured, built in a strategy's scope.

    - The loss of a training step includes the model's regularisation penalties; that of an
      evaluation does not.
    - Losses and penalties are added up in float32, whatever the model computes in.
    - Weight regularisers are exact on any number of replicas. So are activity regularisers that
      add up over examples, as L1 and L2: Keras divides them by the examples of the share, and a
      share counts by its size. Others, and losses of `add_loss` that are no mean over examples,
      see one share at a time: with more or uneven shares they are an approximation.
    - A variable's constraint is applied after each update of it. Under asynchronous ps, what
      another worker adds between its read and its write is lost.
    - The gradient of an embedding travels as its rows, and is made dense where the variable is,
      because Keras' optimizers apply rows that occur twice in different ways. Each update costs
      time and memory of a whole table.
    """

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
            optimizer: A Keras optimizer that `check_optimizer` accepts.
            loss: (labels, outputs) -> loss of each example, [B].
            metrics: Name -> (labels, outputs) -> value of each example, [B].
            batch_size: Examples of a step, over all replicas.

        Raises:
            OptimizerError: the optimizer has a setting that would be ignored, or the model
                computes in float16.
        """
        check_optimizer(optimizer)
        check_precision(model)
        self.model = model
        self.optimizer = optimizer
        self._loss = loss
        self._metrics = dict(metrics)
        self._batch_size = batch_size
        self._variables = [variable.value for variable in model.trainable_variables]
        self._constraints = [variable.constraint for variable in model.trainable_variables]
        optimizer.build(model.trainable_variables)

    @property
    def metric_names(self) -> Sequence[str]:
        """`loss`, then the metrics in their order."""
        return ("loss", *self._metrics)

    @property
    def functions(self) -> Mapping[str, PerExample]:
        """What computes each of `metric_names` from labels and outputs."""
        return {"loss": self._loss, **self._metrics}

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

        Raises:
            ValueError: the loss or a metric does not return one value an example; while tracing.
        """
        inputs, labels = batch
        with tf.GradientTape() as tape:
            outputs = self.model(inputs, training=training)
            losses = self._losses(labels, outputs)
            penalty = tf.zeros([])
            for part in self.model.losses:
                penalty += tf.cast(part, tf.float32)
            # A regulariser counts once a step, not once a share.
            share = tf.cast(tf.size(losses), tf.float32) / self._batch_size
            loss = tf.reduce_sum(losses) / self._batch_size + penalty * share
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
            (variable, constraint, gradient)
            for variable, constraint, gradient in zip(
                self._variables, self._constraints, gradients, strict=True
            )
            if gradient is not None
        ]

        def update(variable: Tensor, gradient: Tensor, constraint: Any) -> Tensor:
            self.optimizer.update_step(_dense(gradient, variable), variable, rate)
            if constraint is not None:
                variable.assign(constraint(read_now(variable)))
            return read_now(variable)

        def update_all(strategy: Any, *summed: Tensor) -> list[Tensor]:
            return [
                strategy.extended.update(
                    variable,
                    functools.partial(update, constraint=constraint),
                    args=(gradient,),
                    group=False,
                )
                for (variable, constraint, _), gradient in zip(changed, summed, strict=True)
            ]

        context = tf.distribute.get_replica_context()
        updated = context.merge_call(update_all, args=tuple(gradient for *_, gradient in changed))
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
        return self._measure(labels, outputs, self._losses(labels, outputs), weights)

    def _losses(self, labels: Tensor, outputs: Tensor) -> Tensor:
        """The loss of each example, float32 [B]: a sum in float16 or bfloat16 loses most of it."""
        return tf.cast(_per_example("loss", self._loss(labels, outputs)), tf.float32)

    def _measure(
        self, labels: Tensor, outputs: Tensor, losses: Tensor, weights: Tensor | None
    ) -> Tensor:
        """(total, count) of each metric, float64 [metrics, 2]: a float32 count stops at 2**24."""
        values = [losses]
        for name, metric in self._metrics.items():
            values.append(_per_example(name, metric(labels, outputs)))
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
    """Returns if `Learner.apply` does all that `optimizer` would have done.

    Raises:
        OptimizerError: it has a setting that would be ignored, or that fails under tf.distribute;
            or its class does more than `update_step`.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise OptimizerError(
            "LossScaleOptimizer is not supported: under tf.distribute it looks for overflow on one "
            "replica only. Return the inner optimizer from build_optimizer."
        )
    kind = type(optimizer)
    if ignored := _ignored(optimizer):
        name, value = ignored[0]
        raise OptimizerError(
            f"{kind.__name__}({name}={value!r}) is not supported: Keras applies {name} wrongly, or "
            f"not at all, under tf.distribute. Leave {name} out of build_optimizer, or set it to "
            f"{_UNSUPPORTED[name]} where that is not the default."
        )
    if overridden := _overridden(kind):
        raise OptimizerError(
            f"{kind.__name__} is not supported: a part of its maths is in "
            f"{', '.join(overridden)}, but only update_step is called, once for each variable. "
            f"Use one of {', '.join(sorted(supported_optimizers()))}; or, in build_optimizer, a "
            "class that overrides only build and update_step."
        )


def _ignored(optimizer: keras.Optimizer) -> list[tuple[str, Any]]:
    """Settings of `optimizer` that `update_step` does not know of: name and value."""
    values = [(name, getattr(optimizer, name, off)) for name, off in _UNSUPPORTED.items()]
    return [(name, value) for name, value in values if value != _UNSUPPORTED[name]]


def _overridden(kind: type[keras.Optimizer]) -> list[str]:
    """Methods of Keras' Optimizer that `kind` overrides and that nobody would call."""
    base = keras.Optimizer
    own = {name for c in kind.__mro__ if c not in base.__mro__ for name in vars(c)}
    return sorted(
        name
        for name in own - _CALLED
        if not name.startswith("__") and callable(getattr(base, name, None))
    )


@functools.cache
def supported_optimizers() -> Mapping[str, type[keras.Optimizer]]:
    """Keras' optimizers that `check_optimizer` accepts with their defaults, by lower-case name."""
    # They do not work without an optimizer inside, and are refused anyway.
    wrappers = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)
    supported = {}
    for value in vars(keras.optimizers).values():
        if not isinstance(value, type) or not issubclass(value, keras.Optimizer):
            continue
        if value is keras.Optimizer or issubclass(value, wrappers):
            continue
        # Not value(): that makes variables, and on parameter servers they would stay.
        defaults = inspect.signature(value).parameters
        ignored = any(
            name in defaults and defaults[name].default != off for name, off in _UNSUPPORTED.items()
        )
        if not _overridden(value) and not ignored:
            supported[value.__name__.lower()] = value
    return supported


def check_precision(model: keras.Model) -> None:
    """Returns if no layer of `model` computes in float16.

    Raises:
        OptimizerError: one does; its small gradients would become 0 without loss scaling.
    """
    # Not `model.layers`: those are not the layers of its layers.
    for layer in model._flatten_layers():
        if layer.compute_dtype == "float16":
            raise OptimizerError(
                f"Layer {layer.name!r} computes in float16, which needs loss scaling, and that is "
                "not supported yet. Use keras.DTypePolicy('mixed_bfloat16') or 'float32'."
            )


def _sum_over_replicas(gradients: Sequence[Tensor]) -> list[Tensor]:
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)
    present = [gradient for gradient in gradients if gradient is not None]
    summed = iter(context.all_reduce("sum", present))
    return [None if gradient is None else next(summed) for gradient in gradients]


def _dense(gradient: Tensor, variable: Tensor) -> Tensor:
    """`gradient` as a tensor of `variable`'s shape; rows that occur more than once are summed."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])


def _per_example(name: str, value: Tensor) -> Tensor:
    """`value` if it has one value an example, as far as shapes are known.

    Raises:
        ValueError: it has not: its sum would be that of other numbers, or of too few.
    """
    value = tf.convert_to_tensor(value)
    if value.shape.rank not in (None, 1):
        raise ValueError(
            f"{name!r} must return one value an example, [B]. Received: shape {value.shape}."
        )
    return tf.ensure_shape(value, [None])


def sparse_categorical_crossentropy(labels: Tensor, logits: Tensor) -> Tensor:
    """Softmax cross entropy in nats. labels: int [B]; logits: float [B, classes]; returns [B]."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=tf.cast(logits, tf.float32)
    )


def accuracy(labels: Tensor, logits: Tensor) -> Tensor:
    """1 where the largest logit is the label's, else 0. labels: int [B]; returns float32 [B]."""
    hits = tf.equal(tf.argmax(logits, axis=-1), tf.cast(labels, tf.int64))
    return tf.cast(hits, tf.float32)
