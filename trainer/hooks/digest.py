"""Digests of weights and gradients in metrics.jsonl, with `config.virtual_replicas`.

    lines = DigestLines("model_dir/metrics.jsonl", always, learner)
    lines(100, executor.run(10))
    lines.write(100, "train", {"loss": 0.5})    # ... "digests": {"dense/kernel": "0f3a...", ...}

So `trainer.compare` finds the first report at which two runs differ, the variables and the parts of
the batch, without checkpoints.
"""

import functools
from collections.abc import Mapping

import tensorflow as tf
from typing_extensions import override

from data.split_mix import finalized
from strategies.metrics import Metrics
from trainer.hooks.writers import JsonLines, Values
from trainer.learner import Learner
from trainer.run_files import DIGESTS, PART_DIGESTS

OPTIMIZER = "all of the optimizer"
# The type with the bits of an element, by its size in bytes.
_WORDS = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}


class DigestLines(JsonLines):
    """Adds the digests of a learner's variables to each report of training.

    One for each variable of the model, by its path, and one for all states of the optimizer. Rows
    of a ShardedEmbedding are left out: how they are divided depends on the strategy. And one for
    the gradients of each part of the batch of the last step; none if a stop ended the report.
    """

    def __init__(self, path: str, always: Mapping[str, Values], learner: Learner) -> None:
        super().__init__(path, always)
        named = [(v.path, v.value) for v in learner.model.variables if hasattr(v, "value")]
        named += [(OPTIMIZER, v.value) for v in learner.optimizer.variables]

        @tf.function(autograph=False)
        def digests() -> dict[str, tf.Tensor]:
            found: dict[str, tf.Tensor] = {}
            for name, variable in named:  # Several may have one name.
                if variable.dtype.size in _WORDS:
                    found[name] = digest(variable) + found.get(name, 0)
            return found

        self._digests = digests
        self._part_digests = Metrics().part_digests

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        self._part_digests = metrics.part_digests

    @override
    def _write(self, step: int, split: str, values: Values) -> None:
        if split == "train":
            found = self._digests()
            shown = {name: f"{int(value) % 2**64:016x}" for name, value in found.items()}
            of_parts = self._part_digests if self._part_digests.any() else ()
            parts = {str(i): f"{int(value) % 2**32:08x}" for i, value in enumerate(of_parts)}
            values = {**values, DIGESTS: shown, PART_DIGESTS: parts}
        super()._write(step, split, values)


def digest(variable: tf.Variable) -> tf.Tensor:
    """64 bits of the value of `variable`, int64 []: a sum of integers, in any order.

    Each element counts as random bits of its bits and its index.
    """
    with tf.device(variable.device):
        value = tf.reshape(tf.convert_to_tensor(variable), [-1])
        if value.dtype == tf.bool:
            value = tf.cast(value, tf.uint8)
        bits = tf.cast(tf.bitcast(value, _WORDS[value.dtype.size]), tf.uint64)
        places = tf.cast(tf.range(1, tf.size(bits) + 1), tf.uint64)
        mixed = _mixed(_mixed(places) ^ bits)
        return tf.reduce_sum(tf.cast(mixed, tf.int64))


def _mixed(states: tf.Tensor) -> tf.Tensor:
    return finalized(
        states, functools.partial(tf.constant, dtype=tf.uint64), tf.bitwise.right_shift
    )
