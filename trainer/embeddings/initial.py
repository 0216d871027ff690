"""Initial rows of ids that no table has yet: functions of (initializer with its seed, id).

    rows = initial_rows(ids, width, initializer)            # int64 [n] -> [n, width]

A generator of random numbers would give values in the order in which ids arrive, which differs
between runs. Here the id itself is hashed by SplitMix64, once for each column of the row.
"""

import hashlib
import math

import keras
import tensorflow as tf

from data.split_mix import GAMMA
from trainer.step.random_layers import split_mix, uint64

# Of 23 bits and a half, no value of an interval is rounded to 0 or 1 in float32.
_BITS = 23


def initial_rows(
    ids: tf.Tensor, width: int, initializer: keras.initializers.Initializer, dtype: tf.DType
) -> tf.Tensor:
    """The initial rows of `ids`, int64 [n], as `initializer` distributes values: [n, width]."""
    shape = [tf.size(ids), width]
    settings = initializer.get_config()
    if "seed" not in settings:
        return tf.cast(initializer(shape), dtype)
    uniform = _uniform(ids, width, str(initializer.seed))
    if isinstance(initializer, keras.initializers.RandomUniform):
        low, high = settings["minval"], settings["maxval"]
        return tf.cast(low + (high - low) * uniform, dtype)
    if isinstance(initializer, keras.initializers.TruncatedNormal):
        # Values are between -2 and 2 standard deviations.
        below = math.erfc(2**0.5) / 2
        uniform = below + (1 - 2 * below) * uniform
    return tf.cast(settings["mean"] + settings["stddev"] * tf.math.ndtri(uniform), dtype)


def _uniform(ids: tf.Tensor, width: int, seed: str) -> tf.Tensor:
    """Values between 0 and 1, both excluded, float32 [n, width]."""
    key = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "big")
    # `split_mix` adds GAMMA, which the key of an id does not have.
    mixed = split_mix(
        tf.bitwise.bitwise_xor(tf.bitcast(ids, tf.uint64), uint64(key)) - uint64(GAMMA)
    )
    # Not a constant vector: TensorFlow rounds vectors of large uint64 constants in graphs.
    columns = tf.cast(tf.range(width), tf.uint64) * uint64(GAMMA)
    bits = tf.bitwise.right_shift(split_mix(mixed[:, tf.newaxis] + columns), uint64(64 - _BITS))
    return (tf.cast(bits, tf.float32) + 0.5) / 2**_BITS
