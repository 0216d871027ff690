"""`compute_loss` of a model is its loss, exact on several replicas and with padded batches."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.comparing import assert_close
from tests.unit.replicas import replicas, updater
from tests.unit.test_learner import BATCH
from trainer.learner import Learner
from trainer.step.keras_losses import ModelLoss
from trainer.step.losses import sparse_categorical_crossentropy


class Own(keras.Model):
    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> tf.Tensor:
        losses = sparse_categorical_crossentropy(y, y_pred)
        if sample_weight is not None:
            losses *= sample_weight
        return tf.reduce_mean(losses) + sum(self.losses)


@pytest.fixture
def batch() -> Any:
    random = np.random.default_rng(0)
    images = random.normal(size=(BATCH, 3)).astype(np.float32)
    weights = random.random(BATCH).astype(np.float32)
    return images, random.integers(0, 5, BATCH), weights


def learner_of(kind: type[keras.Model]) -> Learner:
    keras.utils.set_random_seed(1)
    x = keras.Input((3,))
    model = kind(x, keras.layers.Dense(5, kernel_regularizer="l2")(x))
    loss = ModelLoss(model) if kind is Own else sparse_categorical_crossentropy
    return Learner(model, keras.optimizers.SGD(0.5), loss, {}, batch_size=BATCH)


def trained(kind: type[keras.Model], batch: Any, num_replicas: int) -> list[np.ndarray]:
    with replicas(num_replicas).scope():
        learner = learner_of(kind)
    for _ in range(3):
        updater(learner, num_replicas)(batch)
    return [value.copy() for value in learner.model.get_weights()]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_weights_are_those_of_the_same_loss_as_a_function(num_replicas: int, batch: Any) -> None:
    expected = trained(keras.Model, batch, 1)
    assert_close(trained(Own, batch, num_replicas), expected)


@pytest.mark.parametrize("num_padded", [0, 3, BATCH])
def test_padding_does_not_count_in_an_evaluation(num_padded: int, batch: Any) -> None:
    learner = learner_of(Own)
    images, labels, _ = batch
    counts = np.ones(BATCH, np.float32)
    counts[BATCH - num_padded :] = 0
    images[BATCH - num_padded :] = np.inf
    metrics = learner.to_metrics(learner.evaluate((images, labels, counts)).numpy())
    total, count = metrics["loss"]
    assert count == BATCH - num_padded
    if count:
        kept = slice(BATCH - num_padded)
        exact = learner.model.compute_loss(
            y=labels[kept], y_pred=learner.model(images[kept]), training=False
        )
        assert total / count == pytest.approx(float(exact), rel=1e-5)
    else:
        assert total == 0
