"""SplitMix64, a generator of random bits, as a function of its state.

    bits = finalized(states + np.uint64(GAMMA))                         # uint64, in numpy
    bits = finalized(states, tf.constant, tf.bitwise.right_shift)       # in a graph

Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014; constants as in
splitmix64.c. The same states give the same bits in every version of numpy and TensorFlow.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

GAMMA = 0x9E3779B97F4A7C15  # Between two states of one generator.


def finalized(
    states: Any,  # Any: an array of numpy or a tensor of 64-bit integers. So is the result.
    constant: Callable[[int], Any] = np.uint64,
    right_shift: Callable[[Any, Any], Any] = np.right_shift,
) -> Any:
    """Random bits for each of `states`: a bijection on 64 bits. `right_shift` fills with zeros."""
    z = (states ^ right_shift(states, constant(30))) * constant(0xBF58476D1CE4E5B9)
    z = (z ^ right_shift(z, constant(27))) * constant(0x94D049BB133111EB)
    return z ^ right_shift(z, constant(31))
