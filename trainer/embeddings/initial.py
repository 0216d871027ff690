"""Initial rows of ids that no table has yet: functions of (initializer with its seed, id).

    rows = initial_rows(ids, width, initializer)            # int64 [n] -> [n, width]

A generator of random numbers would give values in the order in which ids arrive, which differs
between runs. Here the id itself is hashed (the finaliser of SplitMix64: Steele et al., "Fast
Splittable Pseudorandom Number Generators", 2014), once for each column of the row.
"""

import hashlib
import math

import keras
import tensorflow as tf

# Of SplitMix64.
_STEP = 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31

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
    columns = tf.stack([_constant(_STEP * (i + 1)) for i in range(width)])
    bits = _shifted(_mix(mixed[:, tf.newaxis] + columns), 64 - _BITS)
    return (tf.cast(bits, tf.float32) + 0.5) / 2**_BITS


def _mix(values: tf.Tensor) -> tf.Tensor:
    for shift, multiplier in _MULTIPLIERS:
        values = tf.bitwise.bitwise_xor(values, _shifted(values, shift))
        values *= _constant(multiplier)
    return tf.bitwise.bitwise_xor(values, _shifted(values, _LAST_SHIFT))


def _shifted(values: tf.Tensor, shift: int) -> tf.Tensor:
    """`values`, int64, shifted to the right by `shift` bits; zeros come from the left."""
    unsigned = tf.bitcast(values, tf.uint64)
    return tf.bitcast(tf.bitwise.right_shift(unsigned, tf.constant(shift, tf.uint64)), tf.int64)


def _constant(bits: int) -> tf.Tensor:
    """The last 64 bits of `bits` as int64.

    Not as uint64: TensorFlow rounds vectors of large uint64 constants in graphs.
    """
    return tf.constant((bits + 2**63) % 2**64 - 2**63, tf.int64)
