"""The objective of a step: the loss of each example, the penalties, and the metric totals.

    objective = Objective(variables, loss, metrics, None, Options(), batch_size=100)
    losses = objective.losses(labels, outputs)                  # [B], without penalties
    loss, losses = objective.with_penalties(losses)             # a scalar to differentiate; [B]
    totals = objective.measure(labels, outputs, losses)         # float64 [num_totals]

B is the number of examples of a replica's part of a batch.
"""

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.system.compat.autograph import autograph, no_autograph
from strategies.base import Batch
from strategies.metrics import Metrics
from trainer.learner.variables import ModelVariables
from trainer.step.keras_losses import KerasLoss, ModelLoss, class_weights, output_names, weighted
from trainer.step.keras_metrics import KerasMetrics
from trainer.step.losses import PerExample, is_cost, metric_totals, require_per_example
from trainer.step.options import Options, matching


class Objective:
    """The loss, penalties and metrics of a model.

    Attributes:
        keras_metrics: The metrics that are not functions of one example; None if there are none.
        directions: What the config says of metrics, by name: True if lower is better.
    """

    def __init__(
        self,
        variables: ModelVariables,
        loss: PerExample | KerasLoss | ModelLoss,
        metrics: Mapping[str, PerExample],
        keras_metrics: KerasMetrics | None,
        options: Options,
        batch_size: int,
    ) -> None:
        """`batch_size` is that of a step, over all replicas.

        Raises ConfigError if `options.penalty.variables` matches no variable.
        """
        self.keras_metrics = keras_metrics
        self.directions: dict[str, bool] = {}
        self._model, self._tables, self._batch_size = variables.model, variables.tables, batch_size
        is_of_keras = isinstance(loss, (KerasLoss, ModelLoss))
        self._loss = loss if is_of_keras else autograph(loss)
        self._metrics = {name: autograph(metric) for name, metric in metrics.items()}
        self._output_losses: Sequence[str] = ()  # Outputs whose loss is also reported alone.
        self._class_weight, self._penalty = options.class_weight, options.penalty
        self._penalised: list[keras.Variable] = []
        if options.penalty.l1 or options.penalty.l2:
            paths = [variable.path for variable in variables.dense_variables]
            found = matching("penalty.variables", options.penalty.variables, paths)
            self._penalised = list(itertools.compress(variables.dense_variables, found))

    @no_autograph
    def build_metrics(self, labels: Batch, outputs: Batch) -> None:
        """Prepares what depends on the shapes of `labels` and `outputs`, nests of specs.

        Raises ConfigError if a metric does not fit them.
        """
        names = output_names(self._model, outputs)
        if isinstance(self._loss, KerasLoss):
            self._loss.require_widths(labels, outputs, names)
            if len(names) > 1:
                self._output_losses = self._loss.outputs_with_loss(names)
        if self.keras_metrics:
            self.keras_metrics.build(labels, outputs, names)

    def leave_out_accuracy(self) -> None:
        """Leaves out the default metric, where labels are not classes."""
        self._metrics.pop("accuracy", None)

    @property
    def has_model_loss(self) -> bool:
        """True if the loss is a method of the model, which also takes the inputs."""
        return isinstance(self._loss, ModelLoss)

    @property
    def functions(self) -> Mapping[str, PerExample]:
        """The loss, if it is not a method of the model, and each metric that is a function.

        They take (labels, outputs) and return [B].
        """
        return self._metrics if self.has_model_loss else {"loss": self._loss_of, **self._metrics}

    @property
    def metric_names(self) -> Sequence[str]:
        """`loss`, then the names of the metrics."""
        of_keras = self.keras_metrics.names if self.keras_metrics else ()
        return (*self._loss_names, *self._metrics, *of_keras)

    @property
    def _loss_names(self) -> Sequence[str]:
        return ("loss", *(f"{name}_loss" for name in self._output_losses))

    @property
    def num_totals(self) -> int:
        """The size of the metric totals.

        A total and a count of each mean, the lookups of each table, then other states.
        """
        num_means = len(self._loss_names) + len(self._metrics)
        num_states = self.keras_metrics.size if self.keras_metrics else 0
        return 2 * num_means + 2 * len(self._tables) + num_states

    def to_metrics(self, totals: npt.NDArray[np.float64]) -> Metrics:
        """Converts summed metric totals, float64 [num_totals], to Metrics.

        Further values are the digests of parts of a batch.
        """
        totals, digests = np.split(totals, [self.num_totals])
        names = (*self._loss_names, *self._metrics, *(layer.name for layer in self._tables))
        num_means, num_pairs = len(names) - len(self._tables), len(names)
        pairs = totals[: 2 * num_pairs].reshape(-1, 2).tolist()
        named = [(name, (total, count)) for name, (total, count) in zip(names, pairs, strict=True)]
        means, lookups = dict(named[:num_means]), dict(named[num_means:])
        results = self.keras_metrics.results if self.keras_metrics else None
        return Metrics(means, totals[2 * num_pairs :], results, lookups, digests)

    def is_lower_better(self, metric: str) -> bool:
        """Returns True for losses and errors, False for accuracies, for example.

        `directions` comes before what Keras knows, and that before the words in the name.
        """
        known = self.keras_metrics.are_lower_better if self.keras_metrics else {}
        said = {**dict.fromkeys(self._loss_names, True), **known, **self.directions}
        return said.get(metric, is_cost(metric))

    def weights_of(self, labels: Batch, weights: Batch | None) -> Batch | None:
        """Returns the weights of the examples in training: `weights`, or those of their classes."""
        if self._class_weight and weights is None:
            return class_weights(labels, self._class_weight)
        return weights

    def losses(
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
            value = self._loss_of(labels, outputs, weights)
        return tf.cast(require_per_example("loss", value, labels, outputs), tf.float32)

    def _loss_of(self, labels: Batch, outputs: Batch, weights: Batch | None = None) -> tf.Tensor:
        if isinstance(self._loss, KerasLoss):
            return self._loss(labels, outputs, output_names(self._model, outputs), weights)
        return weighted(self._loss(labels, outputs), weights)

    def with_penalties(self, losses: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this replica's part of the loss of a step, [], and `losses` with penalties, [B].

        Called after the forward pass, in which layers add their penalties.
        """
        loss = tf.reduce_sum(losses) / self._batch_size
        # B / batch_size of the penalty: the replicas together count it once.
        fraction = tf.cast(tf.size(losses), tf.float32) / self._batch_size
        if penalties := self._penalties(losses, fraction):
            penalty = functools.reduce(operator.add, penalties)
            loss += penalty * fraction
            losses += penalty
        return loss, losses

    def _penalties(self, losses: tf.Tensor, fraction: tf.Tensor) -> list[tf.Tensor]:
        """Returns the penalties of the options and of the layers, float32 []."""
        penalties = []
        for variable in self._penalised:
            weights = tf.cast(tf.convert_to_tensor(variable.value), tf.float32)
            penalties.append(self._penalty.l1 * tf.reduce_sum(tf.abs(weights)))
            penalties.append(self._penalty.l2 * tf.reduce_sum(tf.square(weights)))
        if self.has_model_loss:  # It adds those of the layers, or leaves them out.
            return penalties
        for part in self._model.losses:
            penalty = tf.cast(part, tf.float32)
            if penalty.shape.num_elements() == 1:
                penalty = tf.reshape(penalty, [])
            if penalty.shape.rank:  # Of each example: the sum over the batch counts, as in Keras.
                penalty = tf.reduce_sum(require_per_example("add_loss()", penalty, losses, ()))
                penalty = tf.math.divide_no_nan(penalty, fraction)
            penalties.append(penalty)
        return penalties

    def measure(
        self,
        labels: Batch,
        outputs: Batch,
        losses: tf.Tensor,
        counts: tf.Tensor | None = None,
        weights: Batch | None = None,
    ) -> tf.Tensor:
        """Returns the totals of `losses`, [B], and of each metric, as `Learner.measure`."""
        values = [losses]
        if self._output_losses:
            assert isinstance(self._loss, KerasLoss)
            names = output_names(self._model, outputs)
            of_outputs = self._loss.by_output(labels, outputs, names, weights)
            values += [of_outputs[name] for name in self._output_losses]
        for name, metric in self._metrics.items():
            values.append(require_per_example(name, metric(labels, outputs), labels, outputs))
        totals = metric_totals(values, counts)
        if self._tables:
            totals = tf.concat([totals, self._tables.lookups()], axis=0)
        if self.keras_metrics is None:
            return totals
        states = self.keras_metrics.update(labels, outputs, weights, counts)
        return tf.concat([totals, states], axis=0)
