"""Learner: a model, its optimizer and the step; the maths that all strategies share.

    with executor.scope():
        learner = Learner(model, optimizer, loss, metrics, batch_size=100)

`gradients` changes no trainable variable; `apply` is the only place where one changes; between the
two is the sum over replicas (strategies/wire.py). The gradient of a step is that of

    sum over the examples of the batch of weight * loss / batch_size

so replicas may have uneven shares, and the sum over replicas is the gradient of one big batch. A
share of n examples brings n / batch_size of the regularisation penalty, so that the shares bring it
once, however many they are. What follows has one order under every strategy: the sum over replicas;
whether all of it is finite, in float16; clipping; the learning rate of this step; and for each
variable its decay, the optimizer's change, its constraint, its average.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.graphs import converted, plain
from strategies.base import read_now
from trainer.averages import Averages
from trainer.loss_scale import LossScale, all_finite, unscaled
from trainer.optimizers import OptimizerError, check_optimizer
from trainer.options import ConfigError, Options, matching
from trainer.random_layers import bind, drawing
from trainer.updates import fused_update

Tensor = Any
# outputs of the model and labels of B examples -> one float a example, [B].
PerExample = Callable[[Tensor, Tensor], Tensor]


class Learner:
    """A model, an optimizer and what is measured, built in a strategy's scope.

    A config file may derive its own (configs/custom_step.py). What it may override, and what for:

    | method | for |
    | --- | --- |
    | `gradients` | several losses, a backward pass of one's own |
    | `change_variable` | several optimizers, by the index of the variable |
    | `build_optimizers`, `state` | the variables of others than `optimizer`, and saving them |
    | `apply` | what happens before or after the change; `super().apply` counts the step |
    | `evaluate` | metrics that are no mean over examples of one forward pass |

    - The loss of a training step includes the model's regularisation penalties; that of an
      evaluation does not.
    - Losses and penalties are added up in float32, whatever the model computes in.
    - Weight regularisers are exact on any number of replicas. So are activity regularisers that
      add up over examples, as L1 and L2: Keras divides them by the examples of the share, and a
      share counts by its size. Others, and losses of `add_loss` that are no mean over examples,
      see one share at a time: with more or uneven shares they are an approximation.
    - A variable's constraint is applied after each update of it. Under asynchronous ps, what
      another worker adds between its read and its write is lost.
    - What random layers draw depends on the examples, not on who computes them
      (trainer/random_layers.py).
    - In float16 the loss is scaled (trainer/loss_scale.py). A step whose gradient is not finite
      changes no variable but the scale, and counts: its batch is consumed.
    - The gradient of an embedding travels as its rows, and is made dense where the variable is,
      because Keras' optimizers apply rows that occur twice in different ways. Each update costs
      time and memory of a whole table. With synchronous parameter servers it travels dense.

    Attributes:
        needs_seeds: Whether batches to train on must bring the seeds of their examples: the model
            has random layers.
        loss_scale: The scale of the loss where the model computes in float16, else None.
        origin: Where the weights come from, if they were not initialised.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.Optimizer,
        loss: PerExample,
        metrics: Mapping[str, PerExample],
        *,
        batch_size: int,
        rate_factor: Callable[[Tensor], Tensor] | None = None,
        options: Options | None = None,
        origin: str = "",
    ) -> None:
        """Builds the optimizer's variables, so call it inside the strategy's scope.

        Args:
            model: A built model.
            optimizer: A Keras optimizer that `check_optimizer` accepts.
            loss: (labels, outputs) -> loss of each example, [B].
            metrics: Name -> (labels, outputs) -> value of each example, [B].
            batch_size: Examples of a step, over all replicas.
            rate_factor: Steps done -> what the optimizer's learning rate is multiplied by.
            options: What else a step does.
            origin: Where the weights come from, in words, if they were not initialised.

        Raises:
            OptimizerError: the optimizer has a setting that would be ignored, or the model has
                float16 variables.
            ConfigError: a pattern of `options` is found in no variable, or the model cannot be
                compiled.
        """
        check_optimizer(optimizer)
        self.model = model
        self.optimizer = optimizer
        self.origin = origin
        self._loss = converted(loss)
        self._metrics = {name: converted(metric) for name, metric in metrics.items()}
        self.batch_size = batch_size
        self.needs_seeds = bind(model)
        self._rate_factor = rate_factor
        self._options = options = options or Options()
        trained = model.trainable_variables
        self._variables = [variable.value for variable in trained]
        # What the model computes with; of Keras, and of TensorFlow.
        self._variables_read = [*trained, *model.non_trainable_variables]
        self._read = [variable.value for variable in self._variables_read]
        self._constraints = [variable.constraint for variable in trained]
        paths = [variable.path for variable in trained]
        self._penalised = [False] * len(trained)
        if options.penalty.l1 or options.penalty.l2:
            self._penalised = matching("penalty.variables", options.penalty.variables, paths)
        self._decays = [options.weight_decay.rate > 0] * len(trained)
        if options.weight_decay.exclude:
            excluded = matching("weight_decay.exclude", options.weight_decay.exclude, paths)
            self._decays = [not found for found in excluded]
        self.build_optimizers()
        is_ours = type(self).change_variable is Learner.change_variable
        self._fused = fused_update(self.optimizer) if is_ours else None
        self._averages = Averages(self._variables, options.ema) if options.ema.decay else None
        self.loss_scale = LossScale(options.loss_scale) if _is_float16(model) else None
        self._compiled = None
        if options.jit_compile:
            _check_can_be_compiled(model)
            self._compiled = tf.function(self._compute, jit_compile=True, autograph=False)

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
        return float(self._rate(tf.convert_to_tensor(self.step)).numpy())

    @property
    def state(self) -> Mapping[str, Sequence[Any]]:
        """Variables that are neither the model's nor the optimizer's, in named lists."""
        state = {}
        if self._averages:
            state["averages"] = self._averages.variables
        if self.loss_scale:
            state["loss_scale"] = self.loss_scale.variables
        return state

    def weights(self) -> list[npt.NDArray[Any]]:
        """What `evaluate` evaluates: values of `model.variables`, averages where they are kept."""
        averages = self._averages.variables if self._averages else self._variables
        of_variable = {
            id(variable): average
            for variable, average in zip(self._variables, averages, strict=True)
        }
        return [
            np.asarray(of_variable.get(id(v.value), v.value).numpy()) for v in self.model.variables
        ]

    def build_optimizers(self) -> None:
        """Makes the optimizer's variables; while a Learner is made, in the strategy's scope."""
        self.optimizer.build(self.model.trainable_variables)

    def forward(self, inputs: Any, seeds: Tensor | None = None, *, training: bool) -> Any:
        """The model's outputs; its random layers draw from `seeds`, of the examples."""
        with drawing(seeds):
            return self.model(inputs, training=training)

    @property
    def computed_with(self) -> Sequence[Tensor]:
        """The tf.Variables of `gradients_at`; none where `gradients` is a config file's own."""
        return self._read if type(self).gradients is Learner.gradients else ()

    @plain
    def gradients(self, batch: Any, *, training: bool = True) -> tuple[list[Tensor], Tensor]:
        """This replica's part of the gradient, and the metrics of its share of the batch.

        Args:
            batch: (inputs, labels) with this replica's share of the batch in front; and the seeds
                of its examples, int32 [B, 2], where it `needs_seeds`.
            training: Whether layers such as dropout behave as in training.

        Returns:
            A gradient for each trainable variable (None where the loss does not depend on it), and
            float64 [metrics, 2].

        Raises:
            ValueError: the loss or a metric does not return one value an example; while tracing.
        """
        return self._in_parts(batch, training, None)

    @plain
    def gradients_at(self, batch: Any, values: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """`gradients` at `values` of `computed_with`, read before."""
        return self._in_parts(batch, True, values)

    def _in_parts(
        self, batch: Any, training: bool, values: Sequence[Tensor] | None
    ) -> tuple[list[Tensor], Tensor]:
        num_parts = self._options.micro_batches
        values = None if values is None else list(values)
        if num_parts == 1:
            return self._gradients(batch, training, values)
        gradients, sums = self._gradients(_part(batch, 0, num_parts), training, values)
        for i in range(1, num_parts):
            part = _part(batch, i, num_parts)
            # One after another: the memory that is saved is that of the activations.
            with tf.control_dependencies([g for g in gradients if g is not None]):
                part = tf.nest.map_structure(tf.identity, part)
            more, more_sums = self._gradients(part, training, values)
            gradients = [_plus(left, right) for left, right in zip(gradients, more, strict=True)]
            sums += more_sums
        return gradients, sums

    def _gradients(
        self, batch: Any, training: bool, values: list[Tensor] | None
    ) -> tuple[list[Tensor], Tensor]:
        """`gradients` of a part of a batch; in `values` are then those for the next part."""
        scale = self.loss_scale.read() if self.loss_scale else None
        if self._compiled is not None:
            given = values or [tf.convert_to_tensor(variable) for variable in self._read]
            gradients, sums, changed = self._compiled(batch, training, given, scale)
        elif values is not None:
            gradients, sums, changed = self._compute(batch, training, values, scale)
        else:
            return self._differentiate(batch, training, self._variables, scale)
        for index, value in changed.items():
            self._read[int(index)].assign(value)
            if values is not None:
                values[int(index)] = value
        return gradients, sums

    def _compute(
        self, batch: Any, training: bool, values: Sequence[Tensor], scale: Tensor | None
    ) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
        """`_differentiate` at `values`; and what the model would assign, by index of the variable.

        The variables stay as they are.
        """
        variables = self._variables_read
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            before = [scope.get_current_value(variable) for variable in variables]
            sources = values[: len(self._variables)]
            gradients, sums = self._differentiate(batch, training, sources, scale)
            after = [scope.get_current_value(variable) for variable in variables]
        changed = {
            str(index): new
            for index, (old, new) in enumerate(zip(before, after, strict=True))
            if new is not old
        }
        return gradients, sums, changed

    def _differentiate(
        self, batch: Any, training: bool, sources: Sequence[Tensor], scale: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        """The gradient with respect to `sources`, which are what the model computes with."""
        inputs, labels, *seeds = batch
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = self.forward(inputs, *seeds, training=training)
            losses = self._losses(labels, outputs)
            loss = tf.reduce_sum(losses) / self.batch_size
            if penalties := self._penalties():
                penalty = functools.reduce(operator.add, penalties)
                # A regulariser counts once a step, not once a share.
                share = tf.cast(tf.size(losses), tf.float32) / self.batch_size
                loss += penalty * share
                losses += penalty
            scaled = loss if scale is None else loss * scale
        gradients = tape.gradient(scaled, sources)
        if scale is not None:
            gradients = unscaled(gradients, scale)
        return gradients, self.measure(labels, outputs, losses)

    def _penalties(self) -> list[Tensor]:
        """Those of the options, then what layers add: float32, scalars or, of layers alone, [B]."""
        penalties = []
        for variable, is_meant in zip(self.model.trainable_variables, self._penalised, strict=True):
            if is_meant:
                weights = tf.cast(tf.convert_to_tensor(variable.value), tf.float32)
                penalties.append(self._options.penalty.l1 * tf.reduce_sum(tf.abs(weights)))
                penalties.append(self._options.penalty.l2 * tf.reduce_sum(tf.square(weights)))
        return penalties + [tf.cast(part, tf.float32) for part in self.model.losses]

    @plain
    def apply(self, gradients: Sequence[Tensor]) -> Tensor:
        """Changes the variables by `gradients`, already summed over replicas, and counts the step.

        Returns the counter after that, which other workers may have advanced too by then.
        In replica context. The optimizer's own `apply` would add up gradients again, clip before
        the sum, and lose counts under parameter servers; `update_step` is Keras' public extension
        point for the maths alone, which trainer/updates.py has in one op for some.
        """
        # Where the counter is: a parameter server then needs nothing of who computed the gradient.
        with tf.device(self.step.device):
            step = read_now(self.step)
            rate = self._rate(step)
            prepared = self._fused.prepare(step) if self._fused is not None else ()
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        summed = [gradients[index] for index in present]
        is_finite = all_finite(summed) if self.loss_scale else None
        clipped = self._clip(present, summed)

        def change(variable: Tensor, gradient: Tensor, index: int) -> Tensor:
            if self._decays[index]:
                decay = tf.cast(rate * self._options.weight_decay.rate, variable.dtype)
                variable.assign_sub(decay * read_now(variable))
            gradient = _dense(gradient, variable)
            if self._fused is not None and self._fused.suits(variable, gradient):
                self._fused.apply(variable, gradient, rate, prepared)
            else:
                converted(self.change_variable)(index, variable, gradient, rate)
            if (constraint := self._constraints[index]) is not None:
                variable.assign(constraint(read_now(variable)))
            if self._averages:
                self._averages.update(index, variable, step)
            return read_now(variable)

        def update(variable: Tensor, gradient: Tensor, index: int) -> Tensor:
            if is_finite is None:
                return change(variable, gradient, index)
            return tf.cond(
                is_finite,
                lambda: change(variable, gradient, index),
                lambda: read_now(variable),
            )

        def update_all(strategy: Any, *changes: Tensor) -> list[Tensor]:
            done = [
                strategy.extended.update(
                    self._variables[index],
                    functools.partial(update, index=index),
                    args=(gradient,),
                    group=False,
                )
                for index, gradient in zip(present, changes, strict=True)
            ]
            return done + (self.loss_scale.adjust(strategy, is_finite) if self.loss_scale else [])

        context = tf.distribute.get_replica_context()
        updated = context.merge_call(update_all, args=tuple(clipped))
        # The count comes after what it counts: who has read it may read the variables.
        with tf.control_dependencies(tf.nest.flatten(updated)), tf.device(self.step.device):
            # keras.Variable.assign_add reads, then writes: two workers would lose counts.
            return self.step.assign_add(1)

    def change_variable(self, index: int, variable: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """What the optimizer does in a step to `self.variables[index]`, of which this is a copy.

        Where nobody overrides it, SGD and Adam do the same without it (trainer/updates.py).
        """
        self.optimizer.update_step(gradient, variable, rate)

    def _rate(self, step: Tensor) -> Tensor:
        rate = self.optimizer.learning_rate
        if isinstance(rate, keras.Variable):
            rate = read_now(rate.value)
        return rate if self._rate_factor is None else rate * self._rate_factor(step)

    def _clip(self, present: Sequence[int], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """`gradients` of the variables at the indices `present`, clipped as the options say."""
        clip = self._options.clip
        if not (clip.value or clip.norm or clip.global_norm):
            return gradients
        # Rows that occur twice are one row with their sum.
        dense = [_dense(g, self._variables[i]) for i, g in zip(present, gradients, strict=True)]
        if clip.value:
            return [_there(tf.clip_by_value, g, -clip.value, clip.value) for g in dense]
        if clip.norm:
            return [_there(tf.clip_by_norm, g, clip.norm) for g in dense]
        clipped, _ = tf.clip_by_global_norm(dense, clip.global_norm)
        return list(clipped)

    @plain
    def evaluate(self, batch: Any) -> Tensor:
        """Metrics of a share (inputs, labels, weights) of a batch, float64 [metrics, 2].

        A weight is 1 for an example that counts, 0 for one that only fills the batch up.
        """
        averages = self._averages.variables if self._averages else ()
        return self._evaluate(batch, [tf.convert_to_tensor(average) for average in averages])

    @property
    def evaluated_with(self) -> Sequence[Tensor]:
        """The tf.Variables of `evaluate_at`; none where `evaluate` is a config file's own."""
        if type(self).evaluate is not Learner.evaluate:
            return ()
        averages = self._averages.variables if self._averages else self._variables
        return [*averages, *self._read[len(averages) :]]

    @plain
    def evaluate_at(self, batch: Any, values: Sequence[Tensor]) -> Tensor:
        """`evaluate` at `values` of `evaluated_with`, read before."""
        return self._evaluate(batch, values)

    def _evaluate(self, batch: Any, values: Sequence[Tensor]) -> Tensor:
        """`evaluate` at `values` of the first of the model's variables; nothing is assigned."""
        inputs, labels, weights = batch
        mapping = list(zip(self._variables_read, values, strict=False))
        with keras.StatelessScope(state_mapping=mapping):
            outputs = self.model(inputs, training=False)
        return self.measure(labels, outputs, self._losses(labels, outputs), weights)

    def _losses(self, labels: Tensor, outputs: Tensor) -> Tensor:
        """The loss of each example, float32 [B]: a sum in float16 or bfloat16 loses most of it."""
        value = self._loss(labels, outputs)
        return tf.cast(_per_example("loss", value, labels, outputs), tf.float32)

    @plain
    def measure(
        self, labels: Tensor, outputs: Tensor, losses: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """(total, count) of `losses`, [B], and of each metric: float64 [metrics, 2].

        Examples of weight 0 do not count. A float32 count would stop at 2**24.
        """
        values = [losses]
        for name, metric in self._metrics.items():
            values.append(_per_example(name, metric(labels, outputs), labels, outputs))
        values = [tf.cast(value, tf.float64) for value in values]
        if weights is None:
            count = tf.cast(tf.size(losses), tf.float64)
        else:
            weights = tf.cast(weights, tf.float64)
            # Not value * 0: a padded example must not count even where it gives nan.
            values = [tf.where(weights > 0, value, 0.0) * weights for value in values]
            count = tf.reduce_sum(weights)
        totals = [tf.reduce_sum(value) for value in values]
        return tf.stack([tf.stack([total, count]) for total in totals])


def _there(function: Callable[..., Tensor], gradient: Tensor, *args: Any) -> Tensor:
    """`function(gradient, *args)` where the gradient is: it may have been sent there."""
    with tf.device(gradient.device):
        return function(gradient, *args)


def _is_float16(model: keras.Model) -> bool:
    """Whether a layer of `model` computes in float16, where small gradients become 0.

    Raises:
        OptimizerError: its variables are float16 too, so that its gradients are.
    """
    # Not `model.layers`: those are not the layers of its layers.
    layers = model._flatten_layers()
    for variable in model.trainable_variables:
        if variable.dtype == "float16":
            raise OptimizerError(
                f"Variable {variable.path!r} is float16, which holds too little of a weight to "
                "train it. Use the policy 'mixed_float16', whose variables are float32: "
                "--config.precision=mixed_float16, or keras.DTypePolicy in build_model."
            )
    return any(layer.compute_dtype == "float16" for layer in layers)


def _check_can_be_compiled(model: keras.Model) -> None:
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False):
            raise ConfigError(
                f"config.jit_compile=True compiles a replica's gradient alone, but layer "
                f"{layer.name!r} is synchronized=True: it meets other replicas in the middle of "
                "it. Leave one of the two out."
            )


def _part(batch: Any, index: int, num_parts: int) -> Any:
    """Part `index` of the examples of `batch`, which may have any number of them."""

    def slice_of(tensor: Tensor) -> Tensor:
        size = tensor.shape[0] if tensor.shape[0] is not None else tf.shape(tensor)[0]
        return tensor[index * size // num_parts : (index + 1) * size // num_parts]

    return tf.nest.map_structure(slice_of, batch)


def _plus(left: Tensor, right: Tensor) -> Tensor:
    """The sum of two gradients of one variable, None where the loss does not depend on it."""
    if left is None:
        return right
    if isinstance(left, tf.IndexedSlices):
        values = tf.concat([left.values, right.values], axis=0)
        indices = tf.concat([left.indices, right.indices], axis=0)
        return tf.IndexedSlices(values, indices, left.dense_shape)
    return left + right


def _dense(gradient: Tensor, variable: Tensor) -> Tensor:
    """`gradient` as a tensor of `variable`'s shape; rows that occur more than once are summed."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = gradient.values
    with tf.device(rows.device):
        return tf.math.unsorted_segment_sum(rows, gradient.indices, variable.shape[0])


def _per_example(name: str, value: Tensor, labels: Any, outputs: Any) -> Tensor:
    """`value` if it has one value an example, as many as `labels` and `outputs`.

    Raises:
        ValueError: it has not: its sum would be that of other numbers, or of too few. While
            tracing, as far as shapes are known; else an InvalidArgumentError of the graph.
    """
    value = tf.convert_to_tensor(value)
    examples = tf.convert_to_tensor(tf.nest.flatten((labels, outputs))[0])
    message = f"{name!r} must return one value an example, [B]."
    if not value.shape.is_compatible_with(examples.shape[:1]):
        raise ValueError(f"{message} Received: shape {value.shape} of {examples.shape[:1]}.")
    if value.shape.is_fully_defined() and examples.shape[:1].is_fully_defined():
        return value
    shapes = tf.shape(value), tf.shape(examples)[:1]
    # Shapes of another rank cannot be compared.
    is_one = tf.equal(tf.reduce_prod(shapes[0]), shapes[1][0]) & tf.equal(tf.size(shapes[0]), 1)
    with tf.control_dependencies([tf.debugging.Assert(is_one, [message, *shapes])]):
        return tf.ensure_shape(value, [None])


def sparse_categorical_crossentropy(labels: Tensor, logits: Tensor) -> Tensor:
    """Softmax cross entropy in nats. labels: int [B]; logits: float [B, classes]; returns [B]."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=tf.cast(logits, tf.float32)
    )


def smoothed_crossentropy(smoothing: float) -> PerExample:
    """`sparse_categorical_crossentropy` of labels that give `smoothing` to all classes alike."""
    if not smoothing:
        return sparse_categorical_crossentropy

    def crossentropy(labels: Tensor, logits: Tensor) -> Tensor:
        of_labels = sparse_categorical_crossentropy(labels, logits)
        of_all = -tf.reduce_mean(tf.nn.log_softmax(tf.cast(logits, tf.float32)), axis=-1)
        return (1 - smoothing) * of_labels + smoothing * of_all

    return crossentropy


def accuracy(labels: Tensor, logits: Tensor) -> Tensor:
    """1 where the largest logit is the label's, else 0. labels: int [B]; returns float32 [B]."""
    hits = tf.equal(tf.argmax(logits, axis=-1), tf.cast(labels, tf.int64))
    return tf.cast(hits, tf.float32)
