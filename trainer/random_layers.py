"""Random layers: what dropout and its like draw is a function of (config.seed, layer, position).

    is_random = bind(model)                             # once, when it is built
    with drawing(seeds):                                # int32 [B, 2], as Order.seeds makes them
        outputs = model(inputs, training=True)

Keras draws from a variable that every draw advances. Mirrored, it gives all replicas one mask; on
parameter servers workers race for it. Here it is left alone: each example brings a seed of its
own, so masks differ from example to example, are drawn anew each epoch, and are the same whatever
the topology, and after a resume.

| layer | its draws depend on |
| --- | --- |
| Dropout, SpatialDropout1D to 3D, AlphaDropout, GaussianDropout, GaussianNoise | the example |
| any other with a keras.random.SeedGenerator | the first example of the replica's share |

The layers stay Keras' own, and are saved and exported as such: `call` of the instances is replaced,
and `next` of their generators, and only inside `drawing` do these do anything new. A layer's `seed`
is a part of what its draws depend on.
"""

import collections
import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from data.order import hash_words

Tensor = Any
# Gives random words, uint32 of a shape; of these a layer makes its outputs from its inputs.
Words = Callable[[Sequence[Any]], Tensor]
Draw = Callable[[Any, Tensor, Words], Tensor]

_GAMMA = 0x9E3779B97F4A7C15


class _Pass:
    """One call of a model on a share of n examples; `seeds`: int32 [n, 2]."""

    def __init__(self, seeds: Tensor) -> None:
        self._seeds = seeds
        self._draws: collections.Counter[tuple[int, int]] = collections.Counter()

    def seed(self, layer: tuple[int, int]) -> Tensor:
        """The next seed of `layer` for the whole share, int32 [2]."""
        return tf.bitcast(self._states(layer)[0], tf.int32)

    def words(self, layer: tuple[int, int], shape: Sequence[Any]) -> Tensor:
        """The next random words of `layer`, uint32 of `shape`; each row is its example's.

        Where there are more rows than examples, each example has as many neighbouring ones, as when
        [B, T, ...] was folded to [B * T, ...]. A number of rows that is no multiple of the examples
        belongs to none of them: it is drawn for the share.
        """
        states = self._states(layer)
        (num_examples,) = _shape(states)
        sizes = (shape[0], num_examples)
        if all(isinstance(size, int) for size in sizes) and shape[0] % num_examples:
            states, num_examples = states[:1], 1
        num_words = math.prod(shape) // num_examples
        counts = tf.cast(tf.range((num_words + 1) // 2), tf.uint64)
        # SplitMix64 (Steele, Lea, Flood 2014) from a state of each example's own.
        pairs = split_mix(states[:, tf.newaxis] + counts * _uint64(_GAMMA))
        words = tf.reshape(tf.bitcast(pairs, tf.uint32), [num_examples, -1])
        return tf.reshape(words[:, :num_words], shape)

    def _states(self, layer: tuple[int, int]) -> Tensor:
        """A state of each example for one draw of `layer`, uint64 [n]."""
        key = hash_words(*layer, self._draws[layer])[0]
        self._draws[layer] += 1
        return split_mix(
            tf.bitwise.bitwise_xor(tf.bitcast(self._seeds, tf.uint64), _uint64(int(key)))
        )


# Not a global: each replica of a MirroredStrategy traces its part in a thread of its own.
_PASS: contextvars.ContextVar[_Pass | None] = contextvars.ContextVar("pass", default=None)


@contextlib.contextmanager
def drawing(seeds: Tensor | None) -> Iterator[None]:
    """While in it, random layers draw from `seeds`, int32 [B, 2]; None leaves them to Keras.

    Layers inside a loop of the graph draw the same in each turn.
    """
    token = _PASS.set(None if seeds is None else _Pass(seeds))
    try:
        yield
    finally:
        _PASS.reset(token)


def bind(model: keras.Model) -> bool:
    """Makes the random layers of `model` heed `drawing`; whether it has any."""
    is_random = False
    # Not `model.layers`: those are not the layers of its layers. Nor does Keras say publicly which
    # generators a layer has.
    for index, layer in enumerate(model._flatten_layers()):
        for place, generator in enumerate(layer._seed_generators):
            is_random = True
            seed = generator.get_config()["seed"] or 0
            key = (index, int(hash_words(place, seed)[0]))
            generator.next = functools.partial(_next, generator.next, key)
            draw = _BY_EXAMPLE.get(type(layer))
            # Keras draws nothing where all is dropped.
            if draw is not None and getattr(layer, "rate", 0) < 1:
                layer.call = functools.partial(_call, layer.call, draw, layer, key)
    return is_random


def _next(stock: Callable[..., Tensor], key: tuple[int, int], ordered: bool = True) -> Tensor:
    """In place of SeedGenerator.next."""
    current = _PASS.get()
    return stock(ordered) if current is None else current.seed(key)


def _call(
    stock: Callable[..., Tensor],
    draw: Draw,
    layer: Any,
    key: tuple[int, int],
    inputs: Tensor,
    training: bool = False,
) -> Tensor:
    """In place of a layer's call."""
    current = _PASS.get()
    if current is None or not training:
        return stock(inputs, training=training)
    return draw(layer, inputs, functools.partial(current.words, key))


def _dropout(layer: Any, inputs: Tensor, words: Words) -> Tensor:
    scaled = inputs / tf.cast(1 - layer.rate, inputs.dtype)
    return tf.where(_kept(layer, inputs, words), scaled, tf.zeros_like(inputs))


def _alpha_dropout(layer: Any, inputs: Tensor, words: Words) -> Tensor:
    """Klambauer et al., "Self-Normalizing Neural Networks", 2017."""
    alpha_p = -1.6732632423543772848170429916717 * 1.0507009873554804934193349852946
    a = ((1 - layer.rate) * (1 + layer.rate * alpha_p**2)) ** -0.5
    mixed = tf.where(_kept(layer, inputs, words), inputs, tf.cast(alpha_p, inputs.dtype))
    return tf.cast(a, inputs.dtype) * mixed - tf.cast(a * alpha_p * layer.rate, inputs.dtype)


def _gaussian_dropout(layer: Any, inputs: Tensor, words: Words) -> Tensor:
    stddev = math.sqrt(layer.rate / (1 - layer.rate))
    return inputs * tf.cast(1 + stddev * _normal(words, _shape(inputs)), inputs.dtype)


def _gaussian_noise(layer: Any, inputs: Tensor, words: Words) -> Tensor:
    return inputs + tf.cast(layer.stddev * _normal(words, _shape(inputs)), inputs.dtype)


_SPATIAL = (
    keras.layers.SpatialDropout1D,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
)
_BY_EXAMPLE: Mapping[type, Draw] = {
    keras.layers.Dropout: _dropout,
    **dict.fromkeys(_SPATIAL, _dropout),
    keras.layers.AlphaDropout: _alpha_dropout,
    keras.layers.GaussianDropout: _gaussian_dropout,
    keras.layers.GaussianNoise: _gaussian_noise,
}


def _kept(layer: Any, inputs: Tensor, words: Words) -> Tensor:
    """What is not dropped, bool, in a shape that broadcasts to that of `inputs`."""
    shape = _shape(inputs)
    if isinstance(layer, _SPATIAL):
        channels = 1 if getattr(layer, "data_format", "") == "channels_first" else len(shape) - 1
        shape = [size if axis in (0, channels) else 1 for axis, size in enumerate(shape)]
    elif layer.noise_shape is not None:
        shape = [given or size for given, size in zip(layer.noise_shape, shape, strict=True)]
    return _uniform(words, shape) >= layer.rate


def _uniform(words: Words, shape: Sequence[Any]) -> Tensor:
    """Multiples of 2**-24 in [0, 1), float32 of `shape`: each is a float32."""
    bits = tf.bitwise.right_shift(words(shape), tf.constant(8, tf.uint32))
    return tf.cast(bits, tf.float32) * 2**-24


def _normal(words: Words, shape: Sequence[Any]) -> Tensor:
    """Standard normal numbers, float32 of `shape`, by Box and Muller (1958)."""
    radius, angle = tf.unstack(_uniform(words, [*shape, 2]), axis=-1)
    # 1 - u is in (0, 1].
    return tf.sqrt(-2 * tf.math.log(1 - radius)) * tf.cos(2 * math.pi * angle)


def _shape(inputs: Tensor) -> list[Any]:
    """Sizes as numbers where they are known, else as tensors."""
    sizes = tf.shape(inputs)
    return [sizes[i] if size is None else size for i, size in enumerate(inputs.shape)]


def split_mix(states: Tensor) -> Tensor:
    """One output of SplitMix64 for each state, uint64; as data.order has it in numpy."""

    def fold(z: Tensor, bits: int) -> Tensor:
        return tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, _uint64(bits)))

    z = states + _uint64(_GAMMA)
    z = fold(z, 30) * _uint64(0xBF58476D1CE4E5B9)
    z = fold(z, 27) * _uint64(0x94D049BB133111EB)
    return fold(z, 31)


def _uint64(value: int) -> Tensor:
    return tf.constant(value, tf.uint64)
