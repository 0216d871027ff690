"""Initial rows of ids that no table has yet: functions of (initializer with its seed, id).

    rows = initial_rows(ids, width, initializer)            # int64 [n] -> [n, width]

A generator of random numbers would give values in the order in which ids arrive, which differs
between runs. Here the id itself is hashed by SplitMix64, once for each column of the row.
"""

import hashlib
import math

import keras
import tensorflow as tf

from data.split_mix import GAMMA, finalized

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
    mixed = _mix(tf.bitwise.bitwise_xor(ids, _constant(key)))
    columns = tf.stack([_constant(GAMMA * (i + 1)) for i in range(width)])
    bits = _shifted(_mix(mixed[:, tf.newaxis] + columns), _constant(64 - _BITS))
    return (tf.cast(bits, tf.float32) + 0.5) / 2**_BITS


def _mix(values: tf.Tensor) -> tf.Tensor:
    return finalized(values, _constant, _shifted)


def _shifted(values: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
    """`values`, int64, shifted to the right by `shift` bits; zeros come from the left."""
    unsigned = tf.bitcast(values, tf.uint64)
    return tf.bitcast(tf.bitwise.right_shift(unsigned, tf.bitcast(shift, tf.uint64)), tf.int64)


def _constant(bits: int) -> tf.Tensor:
    """The last 64 bits of `bits` as int64.

    Not as uint64: TensorFlow rounds vectors of large uint64 constants in graphs.
    """
    return tf.constant((bits + 2**63) % 2**64 - 2**63, tf.int64)
