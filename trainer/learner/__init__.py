"""Learner: a model, its optimizer and the training step; the maths that all strategies share.

    learner = executor.build(lambda: Learner(model, optimizer, loss, metrics, batch_size=100))
    gradients, totals = learner.gradients(batch)        # on each replica, of its part of the batch
    learner.apply(summed)                               # the gradients, summed over replicas

`gradients` changes no trainable variable; only `apply` does. Between them the executor sums over
replicas (strategies/gradients/all_reduce.py). Learner is the sum of three parts, and what a config
file may override of them:

| part | what |
| --- | --- |
| objective.py | the loss, the penalties and the metric totals |
| differentiation.py | the gradient: at given values, in micro-batches, compiled by XLA |
| update.py | clipping, weight decay, the optimizer, moving averages, the count of the step |

A step descends along the gradient of

    sum over the examples of the batch of loss / batch_size

A replica that has n examples computes its part of this sum, and n / batch_size of the
regularisation penalty. So the sum over replicas is the gradient of the complete batch, with the
penalty counted once, also when the parts are uneven. This, and the order in update.py, is the same
under every strategy.

B is the number of examples of a replica's part of a batch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import override

from data.system.compat.autograph import no_autograph
from data.system.compat.keras_optimizers import given_rate
from strategies.base import Batch
from strategies.metrics import Metrics
from trainer.learner.objective import Objective
from trainer.learner.update import Update
from trainer.learner.variables import saved_arrays
from trainer.step.keras_losses import KerasLoss, ModelLoss
from trainer.step.keras_metrics import KerasMetrics, without_padding
from trainer.step.losses import PerExample
from trainer.step.optimizers import check_optimizer
from trainer.step.options import Options
from trainer.step.random_layers import bind
from trainer.step.schedules import RateFactor

if TYPE_CHECKING:
    from strategies.local_steps import LocalSteps


class Learner(Update):
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
      by B. A penalty of `add_loss` with one value per example counts as their sum over the batch.
      Other scalars see one replica's examples at a time: unless they are a mean over examples, they
      are an approximation on several replicas.
    - A variable's constraint is applied after each update. Under asynchronous ps, an update of
      another worker between the read and the write of the constraint is lost.
    - The gradient of a Keras Embedding is sent as rows (tf.IndexedSlices) and made dense on the
      device of the variable, because Keras' optimizers do not agree on rows that occur twice. So
      each update costs the time and memory of the whole table. Synchronous ps sends it dense.
      The parts of a ShardedEmbedding are updated by rows, by the optimizer of their table.

    Attributes:
        tables: The layers of the model that are ShardedEmbeddings: ModelTables, or ().
        table_parts: The parts of these that are trained.
        variables: The trainable variables, in the order of `gradients`.
        num_dense: The first `num_dense` of `variables` are dense. The others are parts of tables
            (trainer/embeddings), whose gradients are rows.
        dense_variables: Keras' variables of the former, in the same order.
        step: The optimizer's counter, an integer scalar; it also counts steps that float16 skips.
        needs_seeds: True if the model has random layers, which draw from the examples' seeds.
        objective: The loss, the penalties and the metrics.
        notes: What the user should know about the model, the loss and the optimizer.
        loss_scale: The scale of the loss if the model computes in float16, else None.
        local_steps: None if the gradients of each step are summed over replicas.
        virtual_replicas: As config.virtual_replicas.
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
        With `keras_metrics`, `objective.build_metrics` must be called before the first step.

        Raises:
            OptimizerError: the optimizer has a setting that would be ignored, or the model has
                float16 variables.
            ConfigError: a pattern of `options` matches no variable.
        """
        check_optimizer(optimizer)
        options = options or Options()
        self.model, self.optimizer, self._step_options = model, optimizer, options
        self.step: tf.Variable = optimizer.iterations.value
        self.origin = origin
        self.notes: list[str] = []
        self.batch_size = batch_size
        self.virtual_replicas = options.virtual_replicas
        self.needs_seeds = bind(model)
        # In this order: the loss uses the variables, and `_start_update` a built optimizer.
        self._find_variables()
        self.objective = Objective(self, loss, metrics, keras_metrics, options, batch_size)
        self.build_optimizers()
        self._start_update(rate_factor)
        self.local_steps: LocalSteps | None = None
        if options.local_steps.chosen:
            from strategies import local_steps  # Few runs choose them.

            others, settings = self._changed_besides(), dataclasses.asdict(options.local_steps)
            constraints = [variable.constraint for variable in self.dense_variables]
            arguments = self.variables, others, constraints, options.last_step
            self.local_steps = local_steps.LocalSteps(*arguments, **settings)
        if options.jit_compile:
            self.compile_with_xla()

    @property
    @override
    def compiles(self) -> bool:
        """False in a subclass: its methods may have ops that XLA lacks."""
        return super().compiles and type(self) is Learner

    def ends_report(self, step: tf.Tensor) -> tf.Tensor:
        """True, bool [], if step `step` + 1 is the last one of a report, or of the run."""
        is_last = tf.equal(step + 1, self._step_options.last_step)
        every = self._step_options.log_every_steps
        return is_last | tf.equal((step + 1) % every, 0) if every else is_last

    @property
    def num_totals(self) -> int:
        """The size of the metric totals."""
        return self.objective.num_totals

    def to_metrics(self, totals: npt.NDArray[np.float64]) -> Metrics:
        """Converts summed metric totals, float64 [num_totals], to Metrics."""
        return self.objective.to_metrics(totals)

    @property
    def state(self) -> Mapping[str, Sequence[tf.Variable]]:
        """Variables, in named lists, that belong to neither the model nor the optimizer."""
        momenta = self.local_steps.momenta if self.local_steps else []
        return {**super().state, **({"outer_momentum": momenta} if momenta else {})}

    def _changed_besides(self) -> list[tf.Variable]:
        """What a step changes besides `variables`. The learning rate is changed by hooks alone."""
        rate, state = given_rate(self.optimizer), self.state.values()
        slots = [v.value for v in self.optimizer.variables if v is not rate]
        counters = [v for v in self._not_trained if not v.dtype.is_floating]
        return [*slots, *self.layer_state, *counters, *(v for each in state for v in each)]

    @property
    def own_state(self) -> list[tf.Variable]:
        """What a subclass adds to `state`."""
        ours = super().state
        return [v for name, each in self.state.items() if name not in ours for v in each]

    @property
    def forward_state(self) -> Sequence[tf.Variable]:
        """The variables that `gradients` may change: all but those of the base class's `apply`."""
        return [*self._not_trained, *self.own_state]

    def weights(self) -> list[npt.NDArray[np.generic]]:
        """Returns the values of `model.variables` that `evaluate` uses: averages, if there are any.

        Each table is one value, however many parts it has. Tables of dynamic ids are left out.
        """
        evaluated = dict(zip(map(id, self.variables), self._ema_averages, strict=False))
        return [
            np.asarray(evaluated.get(id(v.value), v.value).numpy())
            if isinstance(v, keras.Variable)
            else v.numpy()
            for v in saved_arrays(self.model)
        ]

    def build_optimizers(self) -> None:
        """Creates the optimizer's variables. Called by `__init__`, in the strategy's scope."""
        self.optimizer.build(self.dense_variables)

    @no_autograph
    def training_losses(self, batch: Batch) -> tf.Tensor:
        """The loss of each example, [B], with penalties, as in training; assigns nothing.

        `batch` is (inputs, labels), or (inputs, labels, weights).
        """
        inputs, labels, *weights = batch
        with self._assigning_nothing(list(map(tf.convert_to_tensor, self._forward_inputs))):
            outputs = self.forward(inputs, training=True)
            losses = self.objective.losses(
                labels, outputs, *weights[:1], inputs=inputs, training=True
            )
            return self.objective.with_penalties(losses)[1]

    @no_autograph
    def evaluate(self, batch: Batch) -> tf.Tensor:
        """Returns the metric totals of (inputs, labels, counts), float64 [num_totals].

        `counts`, [B], is 1 for an example that counts, and 0 for padding. Before it come the
        weights of the examples, if `parse` returns some.
        """
        return self.evaluate_at(batch, list(map(tf.convert_to_tensor, self._ema_averages)))

    @property
    def evaluation_inputs(self) -> Sequence[tf.Variable]:
        """The variables that `evaluate_at` needs; empty if a subclass overrides `evaluate`."""
        if type(self).evaluate is not Learner.evaluate:
            return ()
        trained = self._ema_averages or self.variables[: self.num_dense]
        return [*trained, *self._not_trained]

    @no_autograph
    def evaluate_at(self, batch: Batch, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns `evaluate(batch)` at `values`, read from the first of `evaluation_inputs`."""
        if self.objective.has_model_loss:
            batch = without_padding(batch)
        inputs, labels, *others, counts = batch
        weights = others[0] if others else None
        with self._assigning_nothing(values):
            outputs = self.model(inputs, training=False)
            losses = self.objective.losses(labels, outputs, weights, inputs=inputs)
        return self.measure(labels, outputs, losses, counts, weights=weights)
