"""Learner: a model, its optimizer and the training step; the maths that all strategies share.

    learner = executor.build(lambda: Learner(model, optimizer, loss, metrics, batch_size=100))
    gradients, totals = learner.gradients(batch)        # on each replica, of its part of the batch
    learner.apply(summed)                               # the gradients, summed over replicas

`gradients` changes no trainable variable; only `apply` does. Between them the executor sums over
replicas (strategies/gradients/all_reduce.py). A step descends along the gradient of

    sum over the examples of the batch of loss / batch_size

A replica that has n examples computes its part of this sum, and n / batch_size of the
regularisation penalty. So the sum over replicas is the gradient of the complete batch, with the
penalty counted once, also when the parts are uneven. The order is the same under every strategy:
sum over replicas; finite check (float16); clipping; learning rate; then for each variable weight
decay, the optimizer's update, the constraint, the moving average.

B is the number of examples of a replica's part of a batch.
"""

import functools
import itertools
import logging
import operator
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.autograph import autograph, no_autograph
from strategies.base import Batch, read_now
from strategies.metrics import Metrics
from trainer.embeddings.counting import begin_counting, lookups_of
from trainer.embeddings.dynamic import DynamicTable
from trainer.embeddings.table import FixedTable, Rows, saved_variables, tables_of
from trainer.embeddings.updates import TablePart, require_table_options, saved_tables
from trainer.step.ema import ExponentialMovingAverage
from trainer.step.fused_updates import fused_update, supports
from trainer.step.gradients import Gradient, add_gradients, clip_gradients, to_dense
from trainer.step.keras_losses import KerasLoss, class_weights, output_names, weighted
from trainer.step.keras_metrics import KerasMetrics, without_padding
from trainer.step.loss_scale import LossScale, all_finite, computes_in_float16, unscaled
from trainer.step.losses import PerExample, metric_totals, require_per_example
from trainer.step.model_loss import ModelLoss
from trainer.step.optimizers import check_optimizer
from trainer.step.options import Options, matching
from trainer.step.random_layers import bind, drawing
from trainer.step.schedules import RateFactor
from trainer.step.xla_errors import described, is_of_xla

log = logging.getLogger(__name__)


class Learner:
    """A model, an optimizer, a loss and metrics, built in a strategy's scope.

    A config file may derive its own class (configs/custom_step.py) and override:

    | method | for |
    | --- | --- |
    | `gradients` | several losses, a custom backward pass |
    | `change_variable` | several optimizers, chosen by the index of the variable |
    | `build_optimizers`, `state` | creating and saving the variables of further optimizers |
    | `apply` | work before or after the change; `super().apply` counts the step |
    | `evaluate` | metrics that are not a mean over the examples of one forward pass |

    - The loss of a training step includes the model's regularisation penalties; the loss of an
      evaluation does not.
    - Weight regularisers are exact on any number of replicas. So are activity regularisers that are
      sums over examples, as L1 and L2: Keras divides them by B, and the replica's part is weighted
      by B. Other penalties of `add_loss` see one replica's examples at a time: on several replicas
      they are an approximation.
    - A variable's constraint is applied after each update. Under asynchronous ps, an update of
      another worker between the read and the write of the constraint is lost.
    - The gradient of a Keras Embedding is sent as rows (tf.IndexedSlices) and made dense on the
      device of the variable, because Keras' optimizers do not agree on rows that occur twice. So
      each update costs the time and memory of the whole table. Synchronous ps sends it dense.
      The parts of a ShardedEmbedding are updated by rows, by the optimizer of their table.

    Attributes:
        tables: The layers of the model that are ShardedEmbeddings.
        saved_tables: Their tables, with optimizer slots, as a checkpoint has them.
        variables: The trainable variables, in the order of `gradients`.
        num_dense: The first `num_dense` of `variables` are dense. The others are parts of tables
            (trainer/embeddings), whose gradients are rows.
        dense_variables: Keras' variables of the former, in the same order.
        step: The optimizer's counter, an integer scalar; it also counts steps that float16 skips.
        needs_seeds: True if the model has random layers, which draw from the examples' seeds.
        keras_metrics: The metrics that are not functions of one example; None if there are none.
        notes: What the user should know about the model, the loss and the optimizer.
        loss_scale: The scale of the loss if the model computes in float16, else None.
        compiles: True if XLA may compile all that a replica computes in a step, not only the
            gradient. Methods of a subclass may have ops that XLA lacks.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.Optimizer,
        loss: PerExample | KerasLoss | ModelLoss,
        metrics: Mapping[str, PerExample],
        *,
        batch_size: int,
        keras_metrics: KerasMetrics | None = None,
        rate_factor: RateFactor | None = None,
        options: Options | None = None,
        origin: str = "",
    ) -> None:
        """Creates the optimizer's variables. Called in the strategy's scope.

        `batch_size` is that of a step, over all replicas. `rate_factor` multiplies the optimizer's
        learning rate. `origin` is the source of the weights, in words; empty if initialised.
        A learner with `keras_metrics` needs a call of `build_metrics` before its first step.

        Raises:
            OptimizerError: the optimizer has a setting that would be ignored, or the model has
                float16 variables.
            ConfigError: a pattern of `options` matches no variable.
        """
        check_optimizer(optimizer)
        self.model = model
        self.optimizer = optimizer
        self.step: tf.Variable = optimizer.iterations.value
        self.origin = origin
        self.keras_metrics = keras_metrics
        self.notes: list[str] = []
        is_of_keras = isinstance(loss, (KerasLoss, ModelLoss))
        self._loss = loss if is_of_keras else autograph(loss)
        self._output_losses: Sequence[str] = ()  # Outputs whose loss is also reported alone.
        self._metrics = {name: autograph(metric) for name, metric in metrics.items()}
        self.batch_size = batch_size
        self.needs_seeds = bind(model)
        self._rate_factor = rate_factor
        self._options = options = options or Options()
        tables = [layer for layer in tables_of(model) if layer.table is not None]
        of_tables = {id(part) for layer in tables for part in layer.weights}
        trained = [v for v in model.trainable_variables if id(v) not in of_tables]
        others = [v for v in model.non_trainable_variables if id(v) not in of_tables]
        self.tables = tables
        self.num_dense = len(trained)
        self.dense_variables = trained
        self._table_parts = [
            TablePart(layer, index, marks_changes=options.marks_changed_rows)
            for layer in tables
            if layer.trainable
            for index in range(len(layer.table.parts))
        ]
        self.saved_tables = saved_tables(tables, self._table_parts)
        self.variables = [
            *(variable.value for variable in trained),
            *(part.variable for part in self._table_parts),
        ]
        # All inputs of the forward pass but tables, trainable variables first.
        self._keras_variables = [*trained, *others]
        self._tf_variables = [variable.value for variable in self._keras_variables]
        if tables:
            require_table_options(options, tables, is_float16=computes_in_float16(model))
        paths = [variable.path for variable in trained]
        self._is_penalised = [False] * len(trained)
        if options.penalty.l1 or options.penalty.l2:
            self._is_penalised = matching("penalty.variables", options.penalty.variables, paths)
        self._is_decayed = [options.weight_decay.rate > 0] * len(trained)
        if options.weight_decay.exclude:
            excluded = matching("weight_decay.exclude", options.weight_decay.exclude, paths)
            self._is_decayed = [not is_excluded for is_excluded in excluded]
        self.build_optimizers()
        self._ema = None
        if options.ema.decay:
            self._ema = ExponentialMovingAverage(self.variables, options.ema)
        self.loss_scale = LossScale(options.loss_scale) if computes_in_float16(model) else None
        self.compiles = self._may_stop_compiling = False
        self._differentiate_with_xla: tf.types.experimental.PolymorphicFunction | None = None
        if options.jit_compile:
            self.compile_with_xla()

    def compile_with_xla(self, *, is_optional: bool = False) -> None:
        """Has XLA compile gradients and, if no method is overridden, updates and evaluations.

        Called before the first step. If `is_optional`, `stop_compiling` may end it.
        """
        compiled = tf.function(self._differentiate_at, jit_compile=True, autograph=False)
        self._differentiate_with_xla = compiled
        self.compiles = type(self) is Learner
        self._may_stop_compiling = is_optional

    def stop_compiling(self, error: tf.errors.OpError) -> bool:
        """Returns True if `error` says that XLA cannot compile, and it need not: try again."""
        if not self._may_stop_compiling or not is_of_xla(error):
            return False
        self._differentiate_with_xla, self.compiles = None, False
        self._may_stop_compiling = False
        log.warning(
            "XLA is not used: %s With --config.jit_compile=False it is not tried.",
            described(error),
        )
        return True

    @no_autograph
    def build_metrics(self, labels: Batch, outputs: Batch) -> None:
        """Prepares what depends on the shapes of `labels` and `outputs`, nests of specs.

        Raises ConfigError if a metric does not fit them.
        """
        names = output_names(self.model, outputs)
        if isinstance(self._loss, KerasLoss) and len(names) > 1:
            self._output_losses = self._loss.outputs_with_loss(names)
        if self.keras_metrics:
            self.keras_metrics.build(labels, outputs, names)

    def leave_out_accuracy(self) -> None:
        """Leaves out the default metric, where labels are not classes."""
        self._metrics.pop("accuracy", None)

    @property
    def metric_names(self) -> Sequence[str]:
        """`loss`, then the names of the metrics."""
        return (*self._mean_names, *(self.keras_metrics.names if self.keras_metrics else ()))

    @property
    def _mean_names(self) -> Sequence[str]:
        return ("loss", *(f"{name}_loss" for name in self._output_losses), *self._metrics)

    @property
    def num_totals(self) -> int:
        """The size of the metric totals.

        A total and a count of each mean, the lookups of each table, then other states.
        """
        num_states = self.keras_metrics.size if self.keras_metrics else 0
        return 2 * len(self._mean_names) + 2 * len(self.tables) + num_states

    def to_metrics(self, totals: npt.NDArray[np.float64]) -> Metrics:
        """What summed metric totals, float64 [num_totals], mean."""
        names = self._mean_names
        num_pairs = len(names) + len(self.tables)
        pairs = totals[: 2 * num_pairs].reshape(-1, 2).tolist()
        of_tables = zip(self.tables, pairs[len(names) :], strict=True)
        lookups = {layer.name: (unique, number) for layer, (unique, number) in of_tables}
        pairs = pairs[: len(names)]
        named = {name: (total, count) for name, (total, count) in zip(names, pairs, strict=True)}
        results = self.keras_metrics.results if self.keras_metrics else None
        return Metrics(named, totals[2 * num_pairs :], results, lookups)

    def is_better_lower(self, metric: str) -> bool:
        """Returns True for losses and errors, False for accuracies, for example."""
        falling = self.keras_metrics.falling if self.keras_metrics else ()
        losses = ("loss", *(f"{name}_loss" for name in self._output_losses))
        return metric in losses or metric in falling

    @property
    def functions(self) -> Mapping[str, PerExample]:
        """The loss, and each metric that is a function: (labels, outputs) -> [B].

        Without the loss if it is a method of the model, which also takes the inputs.
        """
        if isinstance(self._loss, ModelLoss):
            return self._metrics
        return {"loss": self._loss_values, **self._metrics}

    @property
    def _can_compile_update(self) -> bool:
        """False if the update may have ops that XLA lacks.

        That would be found when the forward pass has changed its variables already.
        """
        is_of_keras = type(self.optimizer).__module__.startswith("keras.")
        return is_of_keras and not any(v.constraint is not None for v in self.dense_variables)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._rate(tf.convert_to_tensor(self.step)).numpy())

    @property
    def state(self) -> Mapping[str, Sequence[tf.Variable | Rows]]:
        """Variables, in named lists, that belong to neither the model nor the optimizer."""
        return self._own_state

    @property
    def _own_state(self) -> Mapping[str, Sequence[tf.Variable]]:
        return {
            **({"averages": self._ema.shadow_variables} if self._ema else {}),
            **({"loss_scale": self.loss_scale.variables} if self.loss_scale else {}),
            **({"table_slots": slots} if (slots := self._table_slots) else {}),
        }

    @property
    def _table_slots(self) -> list[Rows]:
        tables = [table for table in self.saved_tables if isinstance(table, FixedTable)]
        return [slot for table in tables for slot in table.slots.values()]

    @property
    def forward_state(self) -> Sequence[tf.Variable]:
        """The variables that `gradients` may change: all but those of the base class's `apply`."""
        ours = self._own_state
        others = [
            v for name, variables in self.state.items() if name not in ours for v in variables
        ]
        return [*self._tf_variables[self.num_dense :], *others]

    def weights(self) -> list[npt.NDArray[np.generic]]:
        """Returns the values that `evaluate` uses, averages if any.

        They are in the order of `model.variables`; but each table is one value, however many parts
        it has. Tables of dynamic ids are not among them.
        """
        evaluated = dict(zip(map(id, self.variables), self._evaluated, strict=False))
        return [
            v.numpy()
            if isinstance(v, Rows)
            else np.asarray(evaluated.get(id(v.value), v.value).numpy())
            for v in saved_variables(self.model)
            if not isinstance(v, DynamicTable)
        ]

    def build_optimizers(self) -> None:
        """Creates the optimizer's variables. Called by `__init__`, in the strategy's scope."""
        self.optimizer.build(self.dense_variables)

    def forward(self, inputs: Batch, seeds: tf.Tensor | None = None, *, training: bool) -> Batch:
        """Returns the model's outputs. Random layers draw from `seeds`, int32 [B, 2]."""
        begin_counting()
        with drawing(seeds):
            return self.model(inputs, training=training)

    @no_autograph
    def training_losses(self, batch: Batch) -> tf.Tensor:
        """The loss of each example of (inputs, labels), [B], as in training; assigns nothing."""
        inputs, labels, *weights = batch
        with self._assigning_nothing(()):
            outputs = self.forward(inputs, training=True)
            return self._losses(labels, outputs, *weights[:1], inputs=inputs, training=True)

    def _assigning_nothing(self, values: Sequence[tf.Tensor]) -> keras.StatelessScope:
        """A scope in which the first variables have `values`, and assignments have no effect."""
        if isinstance(self._loss, ModelLoss):
            # Keras' penalties, which it may add, are of variables with a value in the scope.
            others = self._tf_variables[len(values) :]
            values = [*values, *(tf.convert_to_tensor(variable) for variable in others)]
        mapping = list(zip(self._keras_variables, values, strict=False))
        return keras.StatelessScope(state_mapping=mapping, collect_losses=True)

    @no_autograph
    def gradients(self, batch: Batch, *, training: bool = True) -> tuple[list[Gradient], tf.Tensor]:
        """Returns this replica's part of the gradient, and the metric totals of its examples.

        `batch` is (inputs, labels), each of B examples; then their weights, if `parse` returns
        some; then their seeds, int32 [B, 2], if `needs_seeds`. There is a gradient for each of
        `variables`, None where the loss does not depend on it. The totals are float64 [num_totals].

        Raises ValueError, while tracing, if the loss or a metric is not one value per example.
        """
        return self.gradients_at(batch, None, training=training)

    @property
    def layer_state(self) -> Sequence[tf.Variable]:
        """What layers change in training, each replica its own copy: moving statistics.

        Without integers, and without variables for which the layer chose an aggregation.
        """
        return [
            variable.value
            for layer in self.model._flatten_layers()
            if layer.trainable
            for variable in layer._non_trainable_variables
            if variable.aggregation == "none" and tf.as_dtype(variable.dtype).is_floating
        ]

    @property
    def gradient_inputs(self) -> Sequence[tf.Variable]:
        """The variables that `gradients_at` needs; empty if a subclass overrides `gradients`."""
        return () if self.overrides_gradients else self._tf_variables

    @property
    def overrides_gradients(self) -> bool:
        """True if a subclass overrides `gradients`, so it reads the variables itself."""
        return type(self).gradients is not Learner.gradients

    @no_autograph
    def gradients_at(
        self, batch: Batch, values: Sequence[tf.Tensor] | None, *, training: bool = True
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Returns `gradients(batch)` at `values`, which were read from `gradient_inputs`."""
        values = None if values is None else list(values)
        num_parts = self._options.micro_batches
        part = batch if num_parts == 1 else _micro_batch(batch, 0, num_parts)
        gradients, totals = self._differentiate_and_assign(part, training, values)
        for i in range(1, num_parts):
            part = _micro_batch(batch, i, num_parts)
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
        scale = self.loss_scale.read() if self.loss_scale else None
        if self._differentiate_with_xla is not None:
            read = values or [tf.convert_to_tensor(variable) for variable in self._tf_variables]
            gradients, totals, updates = self._differentiate_with_xla(batch, training, read, scale)
        elif values is not None:
            gradients, totals, updates = self._differentiate_at(batch, training, values, scale)
        else:
            return self._differentiate(batch, training, self.variables, scale)
        for index, value in updates.items():
            self._tf_variables[int(index)].assign(value)
            if values is not None:
                values[int(index)] = value
        return gradients, totals

    def _differentiate_at(
        self, batch: Batch, training: bool, values: Sequence[tf.Tensor], scale: tf.Tensor | None
    ) -> tuple[list[Gradient], tf.Tensor, dict[str, tf.Tensor]]:
        """Returns `_differentiate` at `values`, without side effects.

        The third result is what the forward pass would assign, by the index of the variable.
        """
        variables = self._keras_variables
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            before = [scope.get_current_value(variable) for variable in variables]
            sources = [*values[: self.num_dense], *self.variables[self.num_dense :]]
            gradients, totals = self._differentiate(batch, training, sources, scale)
            after = [scope.get_current_value(variable) for variable in variables]
        changed = [
            i for i, (old, new) in enumerate(zip(before, after, strict=True)) if new is not old
        ]
        return gradients, totals, {str(i): after[i] for i in changed}

    def _differentiate(
        self,
        batch: Batch,
        training: bool,
        sources: Sequence[tf.Variable | tf.Tensor],
        scale: tf.Tensor | None,
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Returns the gradient with respect to `sources` (`variables`, or values), and totals."""
        inputs, labels, *others = batch
        seeds = [others.pop()] if self.needs_seeds and others else []
        weights = others[0] if others else None
        if self._options.class_weight and weights is None:
            weights = class_weights(labels, self._options.class_weight)
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = self.forward(inputs, *seeds, training=training)
            losses = self._losses(labels, outputs, weights, inputs=inputs, training=training)
            loss = tf.reduce_sum(losses) / self.batch_size
            if penalties := self._penalties():
                penalty = functools.reduce(operator.add, penalties)
                # B / batch_size of the penalty: the replicas together count it once.
                fraction = tf.cast(tf.size(losses), tf.float32) / self.batch_size
                loss += penalty * fraction
                losses += penalty
            scaled = loss if scale is None else loss * scale
        gradients = tape.gradient(scaled, sources)
        if scale is not None:
            gradients = unscaled(gradients, scale)
        return gradients, self.measure(labels, outputs, losses, weights=weights)

    def _losses(
        self,
        labels: Batch,
        outputs: Batch,
        weights: Batch | None = None,
        *,
        inputs: Batch = None,
        training: bool = False,
    ) -> tf.Tensor:
        """Returns the loss of each example, float32 [B]: a sum in 16 bits would lose precision."""
        if isinstance(self._loss, ModelLoss):
            value = self._loss(labels, outputs, weights, inputs, training=training)
        else:
            value = self._loss_values(labels, outputs, weights)
        return tf.cast(require_per_example("loss", value, labels, outputs), tf.float32)

    def _loss_values(
        self, labels: Batch, outputs: Batch, weights: Batch | None = None
    ) -> tf.Tensor:
        if isinstance(self._loss, KerasLoss):
            return self._loss(labels, outputs, output_names(self.model, outputs), weights)
        return weighted(self._loss(labels, outputs), weights)

    def _penalties(self) -> list[tf.Tensor]:
        """Returns the penalties of the options, [], and of the layers, [] or [B]: float32."""
        penalties = []
        l1, l2 = self._options.penalty.l1, self._options.penalty.l2
        for variable in itertools.compress(self.dense_variables, self._is_penalised):
            weights = tf.cast(tf.convert_to_tensor(variable.value), tf.float32)
            penalties.append(l1 * tf.reduce_sum(tf.abs(weights)))
            penalties.append(l2 * tf.reduce_sum(tf.square(weights)))
        if isinstance(self._loss, ModelLoss):  # It adds those of the layers, or leaves them out.
            return penalties
        return penalties + [tf.cast(part, tf.float32) for part in self.model.losses]

    @no_autograph
    def apply(self, gradients: Sequence[Gradient]) -> tf.Tensor:
        """Changes the variables by `gradients`, summed over replicas, and counts the step.

        Returns the new count; under asynchronous ps other workers may have counted too. Called in
        replica context. Keras' `optimizer.apply` is not used: it would sum over replicas again,
        clip before that sum, and lose counts under ps. `update_step` is Keras' public extension
        point for the formula alone; fused_updates.py has some of them as one op.
        """
        # On the device of the counter, so that a ps task needs no tensor of the worker.
        with tf.device(self.step.device):
            step = read_now(self.step)
            rate = self._rate(step)
            factor = None if self._rate_factor is None else self._rate_factor(step)
            is_overridden = type(self).change_variable is not Learner.change_variable
            update = None if is_overridden else fused_update(self.optimizer, step)
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        summed: Sequence[Gradient] = [gradients[index] for index in present]
        variables = [self.variables[index] for index in present]
        is_finite = all_finite(summed) if self.loss_scale else None
        # In one process only: XLA may compile other programs for other processors, but the
        # variables of all workers must stay equal to the last bit.
        is_one_process = isinstance(tf.distribute.get_strategy(), tf.distribute.MirroredStrategy)
        compiles = self.compiles and is_one_process and self._can_compile_update and bool(summed)
        if not compiles:
            summed = clip_gradients(summed, variables, self._options.clip)

        def change(variable: tf.Variable, gradient: Gradient, index: int) -> tf.Tensor:
            # Nothing changes before the gradient is there: a step whose sums fail, or whose worker
            # dies, must leave no weight decay either.
            with tf.control_dependencies(tf.nest.flatten(gradient, expand_composites=True)):
                return change_now(variable, gradient, index)

        def change_now(variable: tf.Variable, gradient: Gradient, index: int) -> tf.Tensor:
            if self._is_decayed[index]:
                decay = tf.cast(rate * self._options.weight_decay.rate, variable.dtype)
                variable.assign_sub(decay * read_now(variable))
            gradient = to_dense(gradient, variable)
            if update is not None and supports(variable, gradient):
                update(variable, gradient, rate)
            else:
                autograph(self.change_variable)(index, variable, gradient, rate)
            if (constraint := self._keras_variables[index].constraint) is not None:
                variable.assign(constraint(read_now(variable)))
            if self._ema:
                self._ema.update(index, variable, step)
            return read_now(variable)

        def change_if_finite(variable: tf.Variable, gradient: Gradient, index: int) -> tf.Tensor:
            if is_finite is None:
                return change(variable, gradient, index)
            return tf.cond(
                is_finite,
                lambda: change_now(variable, gradient, index),
                lambda: read_now(variable),
            )

        def change_compiled(
            _: tf.Variable, copies: Sequence[tf.Variable], changes: Sequence[Gradient]
        ) -> list[tf.Tensor]:
            """Changes the copies of all variables on one device, in one program of XLA."""

            def change_each(changes: Sequence[Gradient]) -> list[tf.Tensor]:
                clipped = clip_gradients(changes, copies, self._options.clip)
                return list(map(change_if_finite, copies, clipped, present))

            return list(tf.function(change_each, jit_compile=True, autograph=False)(changes))

        def change_all(strategy: tf.distribute.Strategy, *changes: Gradient) -> list[tf.Tensor]:
            on_copies = functools.partial(strategy.extended.update, group=False)
            each = list(zip(variables, changes, present, strict=True))
            changed = []
            if compiles:  # Then there are no tables.
                changed = [on_copies(variables[0], change_compiled, (variables, list(changes)))]
                each.clear()
            for variable, gradient, index in each:
                if index < self.num_dense:
                    changed.append(on_copies(variable, change_if_finite, (gradient, index)))
                    continue
                part = self._table_parts[index - self.num_dense]
                change_rows = functools.partial(part.change, factor=factor)
                arguments = gradient, rate, step, part.colocated
                changed.append(on_copies(variable, change_rows, arguments))
            if self.loss_scale:
                changed += self.loss_scale.adjust(strategy, is_finite)
            return changed

        context = tf.distribute.get_replica_context()
        changed = context.merge_call(change_all, args=tuple(summed))
        # Counted last: a task that reads the new count also reads the new variables.
        with tf.control_dependencies(tf.nest.flatten(changed)), tf.device(self.step.device):
            # keras.Variable.assign_add reads, then writes: two workers would lose counts.
            return self.step.assign_add(1)

    def change_variable(
        self, index: int, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor
    ) -> None:
        """Applies the optimizer to one copy of `self.variables[index]`. `gradient` is dense.

        If no class overrides it, SGD and Adam use one fused op in its place (fused_updates.py).
        """
        self.optimizer.update_step(gradient, variable, rate)

    def _rate(self, step: tf.Tensor) -> tf.Tensor:
        rate = self.optimizer._learning_rate
        if isinstance(rate, keras.Variable):
            rate = read_now(rate.value)
        elif isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(step)
        else:  # A function without arguments.
            rate = self.optimizer.learning_rate
        return rate if self._rate_factor is None else rate * self._rate_factor(step)

    @property
    def _evaluated(self) -> Sequence[tf.Variable]:
        averages = self._ema.shadow_variables if self._ema else None
        return self.variables[: self.num_dense] if averages is None else averages

    @no_autograph
    def evaluate(self, batch: Batch) -> tf.Tensor:
        """Returns the metric totals of (inputs, labels, counts), float64 [num_totals].

        `counts`, [B], is 1 for an example that counts, and 0 for padding. Before it come the
        weights of the examples, if `parse` returns some.
        """
        averages = self._ema.shadow_variables if self._ema else ()
        return self.evaluate_at(batch, [tf.convert_to_tensor(average) for average in averages])

    @property
    def evaluation_inputs(self) -> Sequence[tf.Variable]:
        """The variables that `evaluate_at` needs; empty if a subclass overrides `evaluate`."""
        inputs = [*self._evaluated, *self._tf_variables[self.num_dense :]]
        return inputs if type(self).evaluate is Learner.evaluate else ()

    @no_autograph
    def evaluate_at(self, batch: Batch, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns `evaluate(batch)` at `values`, read from the first of `evaluation_inputs`."""
        if isinstance(self._loss, ModelLoss):
            batch = without_padding(batch)
        inputs, labels, *others, counts = batch
        weights = others[0] if others else None
        with self._assigning_nothing(values):
            outputs = self.model(inputs, training=False)
            losses = self._losses(labels, outputs, weights, inputs=inputs)
        return self.measure(labels, outputs, losses, counts, weights=weights)

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
        values = [losses]
        if self._output_losses:
            assert isinstance(self._loss, KerasLoss)
            names = output_names(self.model, outputs)
            of_outputs = self._loss.by_output(labels, outputs, names, weights)
            values += [of_outputs[name] for name in self._output_losses]
        for name, metric in self._metrics.items():
            values.append(require_per_example(name, metric(labels, outputs), labels, outputs))
        totals = metric_totals(values, counts)
        if self.tables:
            totals = tf.concat([totals, tf.reshape(lookups_of(self.tables), [-1])], axis=0)
        if self.keras_metrics is None:
            return totals
        states = self.keras_metrics.update(labels, outputs, weights, counts)
        return tf.concat([totals, states], axis=0)


def _micro_batch(batch: Batch, index: int, num_parts: int) -> Batch:
    """Returns part `index` of the B examples of `batch`; the sizes differ by at most 1."""

    def part_of(tensor: tf.Tensor) -> tf.Tensor:
        size = tensor.shape[0] if tensor.shape[0] is not None else tf.shape(tensor)[0]
        return tensor[index * size // num_parts : (index + 1) * size // num_parts]

    return tf.nest.map_structure(part_of, batch)
