"""Layers that would train something else under a strategy or with an option are refused."""

import contextlib
from collections.abc import Callable

import keras
import pytest
import tensorflow as tf
from keras import layers

from trainer.config import Config
from trainer.step.layer_options import Use, check_layers
from trainer.step.options import ConfigError, LocalStepsConfig

MIRRORED = Use("mirrored", 1, Config())
MULTIWORKER = Use("multiworker", 2, Config())
PS = Use("ps", 2, Config())
ONE_WORKER_OF_PS = Use("ps", 1, Config())
XLA = Use("mirrored", 1, Config(jit_compile=True))
ALONE = Use("multiworker", 2, Config(local_steps=LocalStepsConfig(every=10)))
PARTS = Use("mirrored", 1, Config(micro_batches=2))
SAME_BITS = Use("mirrored", 1, Config(virtual_replicas=4))


def norm(*, trainable: bool = True) -> keras.Layer:
    layer = layers.BatchNormalization(synchronized=True, name="here")
    layer.trainable = trainable
    return layer


def spectral() -> keras.Layer:
    return layers.SpectralNormalization(layers.Dense(2), name="here")


def stateful() -> keras.Layer:
    return layers.Bidirectional(layers.LSTM(2, stateful=True, name="here"))


def float8() -> keras.Layer:
    policy = keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", source_name="float32")
    return layers.Dense(2, dtype=policy, name="here")


class Counter(layers.Layer):
    """Counts examples."""

    def build(self, shape: object) -> None:
        self.count = self.add_weight(name="count", trainable=False, aggregation="sum")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs


@pytest.mark.parametrize(
    ("make", "use", "said"),
    [
        (lambda: Counter(name="here"), MIRRORED, "aggregation='sum'"),
        (lambda: layers.Dropout(0.5), MIRRORED, ""),
        (norm, MIRRORED, ""),
        (norm, MULTIWORKER, ""),
        (norm, ONE_WORKER_OF_PS, ""),
        (norm, PS, "synchronized=True.*--strategy=multiworker"),
        (lambda: norm(trainable=False), PS, ""),
        (norm, XLA, "synchronized=True.*jit_compile"),
        (norm, ALONE, "synchronized=True.*local_steps"),
        (norm, SAME_BITS, "synchronized=True.*virtual_replicas"),
        (layers.BatchNormalization, PS, ""),
        (spectral, MIRRORED, ""),
        (spectral, MULTIWORKER, ""),
        (spectral, ONE_WORKER_OF_PS, "assigns its kernel.*--strategy=mirrored"),
        (spectral, XLA, "assigns its kernel.*jit_compile"),
        (spectral, PARTS, "assigns its kernel.*micro_batches"),
        (spectral, SAME_BITS, "assigns its kernel.*virtual_replicas"),
        (stateful, MIRRORED, "stateful=True.*checkpoint"),
        (lambda: layers.Bidirectional(layers.LSTM(2)), PS, ""),
        (float8, MIRRORED, "float8.*mixed_bfloat16"),
    ],
)
def test_layer_is_refused_where_it_would_train_something_else(
    make: Callable[[], keras.Layer], use: Use, said: str
) -> None:
    layer = make()
    shape = (4, 3) if isinstance(layer, layers.Bidirectional) else (3,)
    inner = keras.Sequential([keras.Input(shape, batch_size=4), layer])
    model = keras.Sequential([keras.Input(shape, batch_size=4), inner])
    refused = pytest.raises(ConfigError, match=f"'.*here' of my.py .*{said}")
    with refused if said else contextlib.nullcontext():
        check_layers(model, "my.py", use)
