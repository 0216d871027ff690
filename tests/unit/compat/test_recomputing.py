"""Layers that compute their activations again train as the same layers that do not."""

import contextlib
import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from typing_extensions import override

from data.system.compat import recomputing
from tests.unit.comparing import assert_close
from tests.unit.compat.messages import delete
from tests.unit.test_layer_losses import replicas
from tests.unit.test_learner import dtype_policy, learner_of
from trainer.embeddings.layer import ShardedEmbedding
from trainer.learner import Learner
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.options import ConfigError, Options

BATCH = 8


class Block(layers.Layer):
    """Has a mask, draws, state, and a penalty; computes them again where it is asked to."""

    def __init__(self, *, again: bool = False, synchronized: bool = False) -> None:
        super().__init__()
        self.again = again
        self.dense = layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")
        self.norm = layers.BatchNormalization(synchronized=synchronized)
        self.drop = layers.Dropout(0.5)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.norm.build((*shape[:-1], 4))

    def call(self, inputs: Any) -> Any:
        return tf.recompute_grad(self.compute)(inputs) if self.again else self.compute(inputs)

    def compute(self, inputs: Any) -> Any:
        """Keras tells the inner layers that this is training."""
        values = self.norm(self.dense(inputs))
        self.add_loss(0.1 * tf.reduce_mean(values**2))
        return self.drop(tf.tanh(values))


def batch() -> tuple[tf.Tensor, ...]:
    random = np.random.default_rng(1)
    x = random.normal(size=[BATCH, 3]).astype(np.float32)
    seeds = random.integers(1 << 30, size=[BATCH, 2], dtype=np.int32)
    return tf.constant(x), tf.constant(np.arange(BATCH) % 5), tf.constant(seeds)


def make(
    kind: str,
    num: int = 1,
    *,
    synchronized: bool = False,
    jit: bool = False,
    learner: type[Learner] = Learner,
) -> Learner:
    keras.utils.set_random_seed(1)
    scope = keras.RematScope("full") if kind == "scope" else contextlib.nullcontext()
    with replicas(num).scope():
        with scope:
            body = [Block(again=kind == "function", synchronized=synchronized), layers.Dense(4)]
        model = keras.Sequential([keras.Input((3,)), *body, layers.Dropout(0.5), layers.Dense(5)])
        loss, options = sparse_categorical_crossentropy, Options(jit_compile=jit)
        sgd = keras.optimizers.SGD(0.1)
        return learner(model, sgd, loss, {}, batch_size=BATCH, options=options)


def step_of(learner: Learner, how: str) -> list[np.ndarray]:
    """Returns the gradients and the new state of the layers."""
    if how == "at values":
        with learner.keeping_state() as state:
            values = [tf.convert_to_tensor(v) for v in learner.gradient_inputs]
            found = tf.function(lambda b: (learner.gradients_at(b, values), dict(state)))
            (gradients, _), new = found(batch())
        return [*gradients, *(new[key] for key in sorted(new))]
    gradients, _ = tf.function(learner.gradients)(batch())
    return [*map(tf.convert_to_tensor, gradients), *learner.layer_state]


@pytest.mark.parametrize("how", ["plain", "XLA", "at values"])
@pytest.mark.parametrize("kind", ["scope", "function"])
def test_recomputed_gradients_and_state_are_those_without(kind: str, how: str) -> None:
    found, expected = (
        [np.asarray(v) for v in step_of(make(k, jit=how == "XLA"), how)] for k in (kind, "no")
    )
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("how", ["plain", "XLA"])
def test_recomputed_layers_compute_in_the_precision_of_the_policy(how: str) -> None:
    with dtype_policy("mixed_bfloat16"):
        found, expected = (
            [np.asarray(v, np.float32) for v in step_of(make(kind, jit=how == "XLA"), how)]
            for kind in ("scope", "no")
        )
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, atol=0.02, rtol=0.1)  # Of bfloat16.


class OwnTape(Learner):
    """Differentiates itself, as in configs/custom_step.py. It adds no penalties."""

    @override
    def gradients(self, batch: Any, *, training: bool = True) -> Any:
        inputs, labels, seeds = batch
        with tf.GradientTape() as tape:
            outputs = self.forward(inputs, seeds, training=training)
            losses = self.objective.losses(labels, outputs)
            loss = tf.reduce_sum(losses) / self.batch_size
        return tape.gradient(loss, self.variables), self.measure(labels, outputs, losses)


@pytest.mark.parametrize("kind", ["scope", "function"])
def test_own_gradients_have_the_masks_and_change_state_once(kind: str) -> None:
    found, expected = (
        [np.asarray(v) for v in step_of(make(k, learner=OwnTape), "plain")] for k in (kind, "no")
    )
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


def test_layers_that_remove_masks_have_them_again() -> None:
    """MultiHeadAttention removes the mask of its inputs."""
    ids = tf.constant(np.random.default_rng(1).integers(0, 4, (BATCH, 6)))
    found = []
    for scope in (keras.RematScope("full"), contextlib.nullcontext()):
        keras.utils.set_random_seed(1)
        with scope:
            inputs = keras.Input((6,), dtype="int64")
            embedded = layers.Embedding(4, 3, mask_zero=True)(inputs)
            outputs = layers.MultiHeadAttention(2, 3)(embedded, embedded)
            outputs = layers.Dense(5)(keras.ops.sum(outputs, axis=1))
        learner = learner_of(keras.Model(inputs, outputs))
        gradients, _ = learner.gradients((ids, tf.range(BATCH) % 5))
        found.append(list(map(tf.convert_to_tensor, gradients)))
    assert_close(*found)


def test_recomputed_layers_communicate_as_others_on_two_replicas() -> None:
    """Their batch statistics are those of both replicas, in both computations."""
    found, expected = (
        [np.asarray(v) for v in replica_of(make(kind, 2, synchronized=True))]
        for kind in ("scope", "no")
    )
    assert_close(found, expected)


def replica_of(learner: Learner) -> list[tf.Tensor]:
    x, labels, seeds = batch()
    parts = [(x[:5], labels[:5], seeds[:5]), (x[5:], labels[5:], seeds[5:])]
    strategy = replicas(2)
    shares = strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )
    run = tf.function(lambda b: strategy.run(lambda one: learner.gradients(one)[0], (b,)))
    found = [strategy.experimental_local_results(g) for g in run(shares)]
    return [*itertools.chain.from_iterable(found), *learner.layer_state]


def test_original_still_draws_other_masks() -> None:
    drop = keras.layers.Dropout(0.5, seed=1)
    compute = recomputing._original(lambda x: drop(x, training=True))

    @tf.function
    def gradient(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = compute(x)
        return y, tape.gradient(y, x)

    outputs, gradients = gradient(tf.ones([100]))
    assert (outputs.numpy() != gradients.numpy()).any(), delete("recomputing")


def test_model_computes_outside_of_a_step_as_without() -> None:
    """Evaluation, and `fit` of Keras, which passes keyword arguments."""
    learner, other = make("scope"), make("no")
    inputs, labels, _ = batch()
    totals = [m.evaluate((inputs, labels, tf.ones([BATCH]))) for m in (learner, other)]
    assert_close([totals[0]], [totals[1]])
    before = learner.model.get_weights()[0].copy()
    learner.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    learner.model.fit(inputs, labels, verbose=0)
    assert (learner.model.get_weights()[0] != before).any()


def test_layer_that_assigns_its_kernel_is_refused_beside_one_that_recomputes() -> None:
    layer = layers.SpectralNormalization(layers.Dense(4), name="here")
    model = keras.Sequential([keras.Input((3,)), Block(again=True), layer, layers.Dense(5)])
    with pytest.raises(ConfigError, match=r"SpectralNormalization 'here' .* Leave one of them out"):
        learner_of(model)


def test_table_in_a_layer_that_recomputes_has_its_gradient() -> None:
    found = []
    for scope in (keras.RematScope("full"), contextlib.nullcontext()):
        keras.utils.set_random_seed(1)
        with replicas(1).scope():
            with scope:
                table = ShardedEmbedding(7, 3, optimizer="sgd")
                body = [table, layers.Flatten(), layers.Dense(4, activation="tanh")]
            learner = learner_of(keras.Sequential([keras.Input((2,), dtype="int64"), *body]))
        batch = tf.constant([[1, 2], [3, 1]] * 4), tf.constant([0, 1, 2, 3] * 2)
        found.append([tf.convert_to_tensor(g) for g in learner.gradients(batch)[0]])
    assert len(found[0]) > 2
    assert_close(*found)


@pytest.mark.parametrize("in_scope", [False, True])
def test_complex_and_ragged_arguments_have_their_gradients(in_scope: bool) -> None:
    variable = keras.Variable([1.0, 2.0])
    found = []
    for wrapped in (tf.recompute_grad, lambda function: function):
        square: Any = wrapped(lambda z, ragged: z * z + tf.cast(tf.reduce_sum(ragged**2), z.dtype))
        value = tf.constant([1.0, 2.0])
        scope = keras.StatelessScope([(variable, value)]) if in_scope else contextlib.nullcontext()
        with scope, tf.GradientTape() as tape:
            tape.watch(value)
            frequencies = tf.signal.fft(tf.cast(value, tf.complex64))
            ragged = tf.RaggedTensor.from_row_lengths(value, [1, 1]) if in_scope else value
            loss = tf.reduce_sum(tf.abs(square(frequencies, ragged)))
        found.append([tape.gradient(loss, value)])
    assert_close(*found)
