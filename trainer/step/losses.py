"""Losses and metrics with one value per example, and their totals. B is the number of examples.

values = require_per_example("loss", loss(labels, outputs), labels, outputs)    # [B]
totals = metric_totals([values, accuracy(labels, outputs)])                     # [4]
"""

import re
from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies.base import Batch

# (labels, outputs of the model) of B examples -> one float per example, [B].
PerExample = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def sparse_categorical_crossentropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Softmax cross entropy in nats. logits: float [B, classes]; returns [B].

    labels: int [B]; or the probability of each class, [B, classes], one-hot for example.
    """
    if len(labels.shape) == 2:
        return tf.nn.softmax_cross_entropy_with_logits(
            labels=tf.cast(labels, tf.float32), logits=tf.cast(logits, tf.float32)
        )
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=tf.cast(logits, tf.float32)
    )


def smoothed_crossentropy(smoothing: float) -> PerExample:
    """Returns a cross entropy with label smoothing, [B].

    The target of class k is (1 - smoothing) * [k is the label] + smoothing / classes (Szegedy et
    al., "Rethinking the Inception Architecture for Computer Vision", 2016, section 7).
    """
    if not smoothing:
        return sparse_categorical_crossentropy

    def crossentropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        hard = sparse_categorical_crossentropy(labels, logits)
        uniform = -tf.reduce_mean(tf.nn.log_softmax(tf.cast(logits, tf.float32)), axis=-1)
        return (1 - smoothing) * hard + smoothing * uniform

    return crossentropy


def accuracy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns 1 for each example whose label has the largest logit, else 0; float32 [B].

    labels: int [B]; or the probability of each class, [B, classes].
    """
    if len(labels.shape) == 2:
        labels = tf.argmax(labels, axis=-1)
    hits = tf.equal(tf.argmax(logits, axis=-1), tf.cast(labels, tf.int64))
    return tf.cast(hits, tf.float32)


# Words in names of metrics that are better the lower they are.
_COSTS = {
    *("loss", "losses", "cost", "costs", "error", "errors", "err", "wer", "cer", "eer"),
    *("mse", "rmse", "mae", "mape", "msle", "rmsle", "deviance", "distance", "divergence"),
    *("perplexity", "ppl", "nll", "entropy", "crossentropy", "bits", "bpb", "bpc", "bpd"),
    *("false", "misses", "regret"),
}


def is_cost(name: str) -> bool:
    """Returns True if a metric of this `name` is better the lower it is, as a word in it says."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return not _COSTS.isdisjoint(word.lower() for word in words)


def require_per_example(name: str, value: tf.Tensor, labels: Batch, outputs: Batch) -> tf.Tensor:
    """Returns `value`, [B], if it has one value for each example of `labels` and `outputs`.

    Otherwise its sum over examples would be wrong: raises ValueError while tracing, as far as
    shapes are known; else the graph raises InvalidArgumentError.
    """
    value = tf.convert_to_tensor(value)
    examples = tf.convert_to_tensor(tf.nest.flatten((labels, outputs))[0])
    message = f"{name} must give one value an example, [B]."
    if not value.shape.is_compatible_with(examples.shape[:1]):
        raise ValueError(f"{message} Received: shape {value.shape} of {examples.shape[:1]}.")
    if value.shape.is_fully_defined() and examples.shape[:1].is_fully_defined():
        return value
    has_rank = tf.debugging.assert_rank(value, 1, message)
    with tf.control_dependencies([has_rank]):
        is_equal = tf.debugging.assert_equal(tf.shape(value), tf.shape(examples)[:1], message)
    with tf.control_dependencies([is_equal]):
        return tf.ensure_shape(value, [None])


def metric_totals(values: Sequence[tf.Tensor], weights: tf.Tensor | None = None) -> tf.Tensor:
    """Returns total and count of each metric, one pair after the other: float64 [2 * metrics].

    `values` has one tensor [B] per metric. Examples of weight 0 in `weights`, [B], do not count.
    float64, because a float32 count would stop at 2**24.
    """
    count = tf.cast(tf.size(values[0]), tf.float64)
    values = [tf.cast(value, tf.float64) for value in values]
    if weights is not None:
        weights = tf.cast(weights, tf.float64)
        # Not value * 0: a padded example must not count even if its value is NaN.
        values = [tf.where(weights > 0, value, 0.0) * weights for value in values]
        count = tf.reduce_sum(weights)
    totals = [tf.reduce_sum(value) for value in values]
    return tf.stack([value for total in totals for value in (total, count)])
