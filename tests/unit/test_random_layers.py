"""What random layers draw is a function of seed, layer and example: of nothing else."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.order import Order, _mix
from tests.unit.comparing import assert_close
from tests.unit.replicas import replicas
from trainer.learner import Learner
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.options import Options
from trainer.step.random_layers import bind, drawing, split_mix

BATCH = 12
BY_EXAMPLE = {
    "Dropout": lambda: keras.layers.Dropout(0.3),
    "Dropout of steps": lambda: keras.layers.Dropout(0.3, noise_shape=(None, None, 1)),
    "SpatialDropout1D": lambda: keras.layers.SpatialDropout1D(0.3),
    "AlphaDropout": lambda: keras.layers.AlphaDropout(0.3),
    "GaussianDropout": lambda: keras.layers.GaussianDropout(0.3),
    "GaussianNoise": lambda: keras.layers.GaussianNoise(0.3),
    "attention": lambda: SelfAttention(),
    "folded": lambda: FoldedDropout(),
}


@keras.saving.register_keras_serializable("tests")
class SelfAttention(keras.layers.Layer):
    """Has a Dropout layer inside."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.5)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.attention(inputs, inputs, training=training)


@keras.saving.register_keras_serializable("tests")
class FoldedDropout(keras.layers.Layer):
    """Drops from [B * T, D]."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, inputs: Any, training: bool = False) -> Any:
        shape = keras.ops.shape(inputs)
        folded = keras.ops.reshape(inputs, (-1, shape[-1]))
        return keras.ops.reshape(self.dropout(folded, training=training), shape)


class OwnNoise(keras.layers.Layer):
    """A user's layer, written as Keras says."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = [keras.random.SeedGenerator(3)]

    def call(self, inputs: Any, training: bool = False) -> Any:
        shape = keras.ops.shape(inputs)
        noise = keras.random.normal(shape, seed=self.generators[0])
        return inputs + noise + keras.random.normal(shape, seed=self.generators[0])


def model_of(*layers: keras.layers.Layer, shape: tuple[int | None, ...] = (40, 16)) -> keras.Model:
    model = keras.Sequential([keras.Input(shape), *layers])
    assert bind(model)
    return model


def seeds_of(first_batch: int = 0, *, seed: int = 0) -> np.ndarray:
    order = Order((1000,), 100, BATCH, lanes=BATCH, window_batches=4, seed=seed, shuffle=True)
    seeds: np.ndarray = order.seeds(first_batch, 1)[0]
    return seeds


@functools.lru_cache(maxsize=2)  # A shape is traced once for each model.
def drawing_call(model: keras.Model) -> Any:
    @tf.function
    def call(inputs: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        with drawing(seeds):
            return model(inputs, training=True)

    return call


def drawn(model: keras.Model, inputs: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    return np.array(drawing_call(model)(tf.constant(inputs), tf.constant(seeds)))


@pytest.fixture
def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(BATCH, 40, 16)).astype(np.float32)


def test_bits_of_tensorflow_and_numpy_are_equal() -> None:
    states = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)
    assert np.array_equal(split_mix(tf.constant(states)), _mix(states))


@pytest.mark.slow
@pytest.mark.parametrize("make", BY_EXAMPLE.values(), ids=BY_EXAMPLE)
def test_draws_depend_neither_on_the_parts_of_a_batch_nor_on_known_sizes(
    make: Callable[[], keras.layers.Layer], inputs: np.ndarray
) -> None:
    model, seeds = model_of(make(), shape=(None, 16)), seeds_of()
    whole = drawn(model, inputs, seeds)
    specs = tf.TensorSpec([None, None, 16]), tf.TensorSpec([None, 2], tf.int32)
    unsized = tf.function(drawing_call(model).python_function, input_signature=specs)
    np.testing.assert_allclose(unsized(inputs, seeds), whole, rtol=1e-5, atol=1e-6)
    cuts = ((0, 1), (1, 5), (5, BATCH))
    parts = [drawn(model, inputs[a:b], seeds[a:b]) for a, b in cuts]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-6)
    assert np.abs(whole - drawn(model, inputs, seeds_of(1))).max() > 0.1, "of another batch"
    assert np.abs(whole - drawn(model, inputs, seeds_of(seed=1))).max() > 0.1, "of another seed"
    equal_inputs = np.repeat(inputs[:1], BATCH, axis=0)
    rows = drawn(model, equal_inputs, seeds)
    assert len({row.tobytes() for row in rows}) == BATCH, "each example has another mask"


LARGE = (BATCH, 50, 40, 25)  # 600,000 numbers: a standard error of at most 0.0013.


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_elements_independently_at_its_rate_and_scales_them(rate: float) -> None:
    model = model_of(keras.layers.Dropout(rate), keras.layers.Dropout(0.0), shape=LARGE[1:])
    outputs = drawn(model, np.ones(LARGE, np.float32), seeds_of())
    is_kept = outputs > 0
    np.testing.assert_allclose(outputs[is_kept], 1 / (1 - rate), rtol=1e-6)
    assert np.mean(is_kept) == pytest.approx(1 - rate, abs=0.005)
    centred = is_kept - np.mean(is_kept)
    for axis in range(4):
        ahead = np.roll(centred, 1, axis)
        assert abs(np.mean(centred * ahead)) / np.var(is_kept) < 0.01, f"along axis {axis}"


def test_spatial_dropout_drops_whole_channels() -> None:
    for data_format, shape, axes in (
        ("channels_last", (BATCH, 3, 4, 50), (1, 2)),
        ("channels_first", (BATCH, 50, 3, 4), (2, 3)),
    ):
        layer = keras.layers.SpatialDropout2D(0.5, data_format=data_format)
        outputs = drawn(model_of(layer, shape=shape[1:]), np.ones(shape, np.float32), seeds_of())
        assert np.array_equal(outputs.min(axis=axes), outputs.max(axis=axes))
        assert np.mean(outputs > 0) == pytest.approx(0.5, abs=0.1)


def test_noise_is_normal_with_the_variance_of_keras() -> None:
    ones = np.ones(LARGE, np.float32)
    for layer in (keras.layers.GaussianNoise(0.5), keras.layers.GaussianDropout(0.2)):
        noise = drawn(model_of(layer, shape=LARGE[1:]), ones, seeds_of()) - 1
        assert np.mean(noise) == pytest.approx(0, abs=0.005)
        assert np.std(noise) == pytest.approx(0.5, abs=0.005)
        kurtosis = np.mean(noise**4) / np.var(noise) ** 2
        assert kurtosis == pytest.approx(3, abs=0.05)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    inputs = np.random.default_rng(0).normal(size=LARGE).astype(np.float32)
    outputs = drawn(model_of(keras.layers.AlphaDropout(0.3), shape=LARGE[1:]), inputs, seeds_of())
    assert np.mean(outputs) == pytest.approx(0, abs=0.01)
    assert np.std(outputs) == pytest.approx(1, abs=0.01)


def masks(*layers: keras.layers.Layer) -> list[np.ndarray]:
    """What each of `layers`, one after the other on the same ones, leaves of them."""
    ones = keras.Input((400,))
    model = keras.Model(ones, [layer(ones) for layer in layers])
    bind(model)
    with drawing(tf.constant(seeds_of())):
        outputs = model(np.ones((BATCH, 400), np.float32), training=True)
    return [np.array(output) > 0 for output in tf.nest.flatten(outputs)]


def test_layers_and_calls_of_one_layer_draw_differently() -> None:
    twice = keras.layers.Dropout(0.5)
    found = masks(twice, twice, keras.layers.Dropout(0.5), keras.layers.Dropout(0.5))
    for i, left in enumerate(found):
        for right in found[:i]:
            assert np.mean(left == right) == pytest.approx(0.5, abs=0.05)


def test_draws_depend_on_the_seed_of_a_layer() -> None:
    (with_seed,), (again,), (with_another,) = (
        masks(keras.layers.Dropout(0.5, seed=seed)) for seed in (1, 1, 2)
    )
    assert np.array_equal(with_seed, again)
    assert np.mean(with_seed == with_another) == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda: OwnNoise(), lambda: keras.layers.LSTM(4, dropout=0.5, recurrent_dropout=0.5)],
    ids=["own", "lstm"],
)
def test_other_layers_draw_by_the_first_example_of_a_part(
    make: Callable[[], keras.layers.Layer], inputs: np.ndarray
) -> None:
    model, seeds = model_of(make()), seeds_of()
    states = [v.numpy() for v in model.non_trainable_variables]
    assert len(states) > 0
    once, again = drawn(model, inputs, seeds), drawn(model, inputs, seeds)
    assert np.array_equal(once, again)
    assert np.abs(once - drawn(model, inputs, seeds[1:])[:BATCH]).max() > 0.01
    for variable, before in zip(model.non_trainable_variables, states, strict=True):
        assert np.array_equal(variable.numpy(), before), "nothing to save, nothing to race for"


def test_two_draws_of_a_users_layer_are_different() -> None:
    zeros = np.zeros((BATCH, 50, 40), np.float32)
    outputs = drawn(model_of(OwnNoise(), shape=(50, 40)), zeros, seeds_of())
    assert np.std(outputs) == pytest.approx(np.sqrt(2), abs=0.05), "2 if they were the same"


def test_layers_without_seeds_draw_like_keras(inputs: np.ndarray) -> None:
    keras.utils.set_random_seed(0)
    model = model_of(keras.layers.Dropout(0.5))
    keras.utils.set_random_seed(0)
    stock = keras.Sequential([keras.Input((40, 16)), keras.layers.Dropout(0.5)])
    for _ in range(2):
        assert np.array_equal(model(inputs, training=True), stock(inputs, training=True))
    with drawing(tf.constant(seeds_of())):
        assert np.array_equal(model(inputs, training=False), inputs)
    assert not bind(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))


def test_bound_model_is_saved_like_an_unbound_one(inputs: np.ndarray, tmp_path: Path) -> None:
    model = model_of(keras.layers.Dropout(0.5), keras.layers.Dense(3))
    drawn(model, inputs, seeds_of())
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is keras.layers.Dropout
    np.testing.assert_allclose(loaded(inputs), model(inputs), atol=1e-6)


def weights_after_steps(num_replicas: int, *, keras_seed: int, options: Options) -> Any:
    random = np.random.default_rng(0)
    batch = random.normal(size=(BATCH, 8)), random.integers(0, 5, BATCH)
    cuts = [0, BATCH] if num_replicas == 1 else [0, 5, BATCH]
    strategy = replicas(num_replicas)
    with strategy.scope():
        keras.utils.set_random_seed(keras_seed)
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(32, kernel_initializer="ones", activation="tanh"),
                keras.layers.Dropout(0.5),
                keras.layers.GaussianNoise(0.5),
                keras.layers.Dense(5, kernel_initializer="zeros"),
            ]
        )
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        loss = sparse_categorical_crossentropy
        learner = Learner(model, optimizer, loss, {}, batch_size=BATCH, options=options)
    assert learner.needs_seeds
    gradients = tf.function(lambda part: learner.gradients(part)[0])
    for step in range(5):
        shares = [
            tuple(tf.constant(part[begin:end]) for part in (*batch, seeds_of(step)))
            for begin, end in itertools.pairwise(cuts)
        ]
        summed = [sum(parts) for parts in zip(*map(gradients, shares), strict=True)]
        strategy.run(learner.apply, args=(summed,))
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [Options(), Options(jit_compile=True), Options(micro_batches=3)],
    ids=["plain", "compiled", "in parts"],
)
def test_parts_end_in_the_weights_of_one_batch_for_any_keras_seed(options: Options) -> None:
    alone, seeded, shared = (
        weights_after_steps(num_replicas, keras_seed=keras_seed, options=how)
        for num_replicas, keras_seed, how in ((1, 0, Options()), (1, 1, options), (2, 0, options))
    )
    assert np.abs(alone[-1]).max() > 0.01
    for others in (seeded, shared):
        assert_close(alone, others, atol=1e-5)
