"""Random layers, such as dropout, draw as a function of (config.seed, layer, position in the data).

    has_random_layers = bind(model)                     # once, after the model is built
    with drawing(seeds):                                # int32 [B, 2], from Order.seeds
        outputs = model(inputs, training=True)

Keras draws from a variable that each draw advances: as a mirrored variable it gives all replicas
the same mask, and on parameter servers workers race for it. Here each example has a seed, so masks
differ between examples and epochs, but are equal on every topology and after a resume.

| layer | its draws depend on |
| --- | --- |
| Dropout, SpatialDropout1D to 3D, AlphaDropout, GaussianDropout, GaussianNoise | the example |
| any other with a keras.random.SeedGenerator | the first of the replica's examples |

`bind` replaces `call` of the layer instances and `next` of their generators. So layers are saved as
Keras' own, and behave as before outside `drawing`. Draws also depend on a layer's `seed`.
"""

import collections
import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from data.order import hash_words
from data.split_mix import GAMMA, finalized
from data.system.compat.keras_layers import all_layers, own

# Shape -> random words, uint32 of this shape. A size is an int, or a tensor if it is unknown.
Words = Callable[[Sequence[int | tf.Tensor]], tf.Tensor]
# (layer, inputs, words) -> outputs.
Draw = Callable[[keras.Layer, tf.Tensor, Words], tf.Tensor]


class _Pass:
    """One forward pass of a model on n examples. `seeds` is int32 [n, 2]."""

    def __init__(self, seeds: tf.Tensor) -> None:
        self._seeds = seeds
        self._draws: collections.Counter[tuple[int, int]] = collections.Counter()

    def copy(self) -> "_Pass":
        """Returns a pass that draws what this one draws from now on."""
        copied = _Pass(self._seeds)
        copied._draws = self._draws.copy()
        return copied

    def seed(self, layer: tuple[int, int]) -> tf.Tensor:
        """Returns the next seed of `layer`, int32 [2], made from the seed of the first example."""
        return tf.bitcast(self._states(layer)[0], tf.int32)

    def words(self, layer: tuple[int, int], shape: Sequence[int | tf.Tensor]) -> tf.Tensor:
        """Returns the next random words of `layer`, uint32 of `shape`. Each row is of one example.

        If there are k rows per example, each example has k neighbouring rows, as when [B, T, ...]
        was reshaped to [B * T, ...]. If the number of rows is not a multiple of n, all are drawn
        from the seed of the first example.
        """
        states = self._states(layer)
        (num_examples,) = _shape(states)
        sizes = (shape[0], num_examples)
        if all(isinstance(size, int) for size in sizes) and shape[0] % num_examples:
            states, num_examples = states[:1], 1
        num_words = math.prod(shape) // num_examples
        counts = tf.cast(tf.range((num_words + 1) // 2), tf.uint64)
        # One generator per example.
        pairs = split_mix(states[:, tf.newaxis] + counts * uint64(GAMMA))
        words = tf.reshape(tf.bitcast(pairs, tf.uint32), [num_examples, -1])
        return tf.reshape(words[:, :num_words], shape)

    def _states(self, layer: tuple[int, int]) -> tf.Tensor:
        """Returns one state per example for one draw of `layer`, uint64 [n]."""
        key = uint64(int(hash_words(*layer, self._draws[layer])[0]))
        self._draws[layer] += 1
        return split_mix(tf.bitwise.bitwise_xor(tf.bitcast(self._seeds, tf.uint64), key))


# Not a global variable: MirroredStrategy traces each replica in its own thread.
_PASS: contextvars.ContextVar[_Pass | None] = contextvars.ContextVar("pass", default=None)


@contextlib.contextmanager
def drawing(seeds: tf.Tensor | None) -> Iterator[None]:
    """Inside it random layers draw from `seeds`, int32 [B, 2]; None changes nothing.

    A layer in a loop of the graph draws the same values in each iteration.
    """
    token = _PASS.set(_PASS.get() if seeds is None else _Pass(seeds))
    try:
        yield
    finally:
        _PASS.reset(token)


def replaying() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a function whose context repeats what random layers draw after this call."""
    draws = current.copy() if (current := _PASS.get()) else None

    @contextlib.contextmanager
    def replay() -> Iterator[None]:
        token = _PASS.set(draws.copy() if draws else None)
        try:
            yield
        finally:
            _PASS.reset(token)

    return replay


def bind(model: keras.Model) -> bool:
    """Makes the random layers of `model` use `drawing`. Returns True if there are any."""
    is_random = False
    for index, layer in enumerate(all_layers(model)):
        for place, generator in enumerate(own(layer, "seed_generators")):
            is_random = True
            seed = generator.get_config()["seed"] or 0
            key = (index, int(hash_words(place, seed)[0]))
            generator.next = functools.partial(_next, generator.next, key)
            draw = _BY_EXAMPLE.get(type(layer))
            # If the rate is 1 Keras drops everything without a draw.
            if draw is not None and getattr(layer, "rate", 0) < 1:
                layer.call = functools.partial(_call, layer.call, draw, layer, key)
    return is_random


def _next(stock: Callable[..., tf.Tensor], key: tuple[int, int], ordered: bool = True) -> tf.Tensor:
    current = _PASS.get()
    return stock(ordered) if current is None else current.seed(key)


def _call(
    stock: Callable[..., tf.Tensor],
    draw: Draw,
    layer: keras.Layer,
    key: tuple[int, int],
    inputs: tf.Tensor,
    training: bool = False,
) -> tf.Tensor:
    current = _PASS.get()
    if current is None or not training:
        return stock(inputs, training=training)
    return draw(layer, inputs, functools.partial(current.words, key))


def _dropout(layer: keras.Layer, inputs: tf.Tensor, words: Words) -> tf.Tensor:
    scaled = inputs / tf.cast(1 - layer.rate, inputs.dtype)
    return tf.where(_keep_mask(layer, inputs, words), scaled, tf.zeros_like(inputs))


def _alpha_dropout(layer: keras.Layer, inputs: tf.Tensor, words: Words) -> tf.Tensor:
    """Klambauer et al., "Self-Normalizing Neural Networks", 2017."""
    alpha_p = -1.6732632423543772848170429916717 * 1.0507009873554804934193349852946
    a = ((1 - layer.rate) * (1 + layer.rate * alpha_p**2)) ** -0.5
    mixed = tf.where(_keep_mask(layer, inputs, words), inputs, tf.cast(alpha_p, inputs.dtype))
    return tf.cast(a, inputs.dtype) * mixed - tf.cast(a * alpha_p * layer.rate, inputs.dtype)


def _gaussian_dropout(layer: keras.Layer, inputs: tf.Tensor, words: Words) -> tf.Tensor:
    stddev = math.sqrt(layer.rate / (1 - layer.rate))
    return inputs * tf.cast(1 + stddev * _normal(words, _shape(inputs)), inputs.dtype)


def _gaussian_noise(layer: keras.Layer, inputs: tf.Tensor, words: Words) -> tf.Tensor:
    return inputs + tf.cast(layer.stddev * _normal(words, _shape(inputs)), inputs.dtype)


_SPATIAL = tuple(getattr(keras.layers, f"SpatialDropout{n}D") for n in (1, 2, 3))
_BY_EXAMPLE: Mapping[type, Draw] = {
    keras.layers.Dropout: _dropout,
    **dict.fromkeys(_SPATIAL, _dropout),
    keras.layers.AlphaDropout: _alpha_dropout,
    keras.layers.GaussianDropout: _gaussian_dropout,
    keras.layers.GaussianNoise: _gaussian_noise,
}


def _keep_mask(layer: keras.Layer, inputs: tf.Tensor, words: Words) -> tf.Tensor:
    shape = _shape(inputs)
    if isinstance(layer, _SPATIAL):
        channels = 1 if getattr(layer, "data_format", "") == "channels_first" else len(shape) - 1
        shape = [size if axis in (0, channels) else 1 for axis, size in enumerate(shape)]
    elif layer.noise_shape is not None:
        shape = [given or size for given, size in zip(layer.noise_shape, shape, strict=True)]
    return _uniform(words, shape) >= layer.rate


def _uniform(words: Words, shape: Sequence[int | tf.Tensor]) -> tf.Tensor:
    """Returns float32 of `shape` in [0, 1): multiples of 2**-24, which are exact in float32."""
    bits = tf.bitwise.right_shift(words(shape), tf.constant(8, tf.uint32))
    return tf.cast(bits, tf.float32) * 2**-24


def _normal(words: Words, shape: Sequence[int | tf.Tensor]) -> tf.Tensor:
    """Returns standard normal numbers, float32 of `shape` (Box and Muller, 1958)."""
    radius, angle = tf.unstack(_uniform(words, [*shape, 2]), axis=-1)
    # 1 - u is in (0, 1].
    return tf.sqrt(-2 * tf.math.log(1 - radius)) * tf.cos(2 * math.pi * angle)


def _shape(inputs: tf.Tensor) -> list[int | tf.Tensor]:
    sizes = tf.shape(inputs)
    return [sizes[i] if size is None else size for i, size in enumerate(inputs.shape)]


def split_mix(states: tf.Tensor) -> tf.Tensor:
    """Returns random bits for each of `states`, uint64."""
    return finalized(states + uint64(GAMMA), uint64, tf.bitwise.right_shift)


def uint64(value: int) -> tf.Tensor:
    """Returns `value` as a scalar."""
    return tf.constant(value, tf.uint64)
