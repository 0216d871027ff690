"""`config.jit_compile`: XLA compiles what gains by it, and what it can."""

import re
from pathlib import Path

import pytest

from strategies.metrics import means
from strategies.mirrored import MirroredExecutor
from strategies.position import Position
from strategies.step_errors import DataFaultError
from tests.unit.comparing import assert_close
from tests.unit.test_config_file import written
from trainer.compilation import choose_compilation
from trainer.config import ConfigError, load_recipe
from trainer.config_checks import check
from trainer.inputs import Inputs, data_errors_explained, open_inputs
from trainer.learner import Learner
from trainer.session import build_session

MODEL = """
    from trainer.config import Config

    def get_config():
        return Config(batch_size=8, train_steps=3, {jit_compile})

    def build_model(config):
        import keras
        from keras import layers
        inputs = keras.Input((8, 8, 1))
        x = layers.Reshape((8, 8))(inputs)
        {layer}
        return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))
"""
ATTENTION = "x = layers.MultiHeadAttention(2, 4)(x, x)"
IN_SYNC = f"{ATTENTION}; x = layers.BatchNormalization(synchronized=True)(x)"
SPECTRAL = f"{ATTENTION}; x = layers.SpectralNormalization(layers.Dense(8))(x)"
# XLA lacks the operation of this loss.
LOSS = """
    def loss(labels, outputs):
        import tensorflow as tf
        words = tf.strings.as_string(labels)
        labels = tf.strings.to_number(words, tf.int32)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
"""
# Has an operation that XLA lacks.
CONSTRAINT = """
    def constraint(kernel):
        import tensorflow as tf
        values = tf.reshape(kernel, [1, 8, 8, 1])
        pooled = tf.raw_ops.FractionalMaxPool(value=values, pooling_ratio=[1.0, 1.0, 1.0, 1.0])
        return tf.reshape(pooled.output, [8, 8])
"""
EVALUATED = """
    def evaluated():
        import keras, tensorflow as tf
        class Evaluated(keras.layers.Layer):
            def call(self, x, training=False):
                if training:
                    return x
                return tf.strings.to_number(tf.strings.as_string(x))
        return Evaluated()
"""
OTHER_SHAPES = """
    def parse(serialized):
        import tensorflow as tf
        images = tf.zeros([tf.size(serialized), 8, tf.random.uniform([], 8, 9, tf.int32), 1])
        return images, tf.zeros([tf.size(serialized)], tf.int32)
"""
# The loss takes what augment returns.
ONE_HOT = """
    def augment(images, labels, seeds):
        import tensorflow as tf
        return images, tf.one_hot(labels, 10)

    def loss(labels, outputs):
        import tensorflow as tf
        return tf.nn.softmax_cross_entropy_with_logits(labels, outputs)

    metrics = {}
"""
OWN_STEP = """
    def build_learner(config, **parts):
        from trainer.learner import Learner
        class Own(Learner):
            def gradients(self, batch):
                return super().gradients(batch)
        return Own(**parts)
"""


def started(
    tmp_path: Path, digits: Path, source: str, *, is_cluster: bool = False
) -> tuple[MirroredExecutor, Learner, Inputs]:
    recipe = load_recipe(written(tmp_path, source))
    check(recipe.config)
    recipe.config.data_dir = str(digits)
    executor = MirroredExecutor.on(["CPU:0"])
    inputs, _, learner = build_session(recipe, open_inputs(recipe), executor.build)
    choose_compilation(learner, recipe, inputs.train, is_cluster=is_cluster)
    executor.start(learner, inputs.train, inputs.evaluation, Position())
    return executor, learner, inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "layer", "more", "compiles", "note"),
    [
        ("", "", "", False, ""),
        ("", ATTENTION, "", True, ""),
        ("jit_compile=False", ATTENTION, "", False, ""),
        ("jit_compile=True", "", "", True, ""),
        ("", ATTENTION, ONE_HOT, True, ""),
        ("", ATTENTION, OTHER_SHAPES, False, "not used: the examples have different shapes"),
        ("", ATTENTION, OWN_STEP, False, "not used: this Learner overrides `gradients`"),
        ("", IN_SYNC, "", False, "is synchronized=True"),
        ("", SPECTRAL, "", False, "assigns its kernel"),
    ],
)
def test_what_gains_by_xla_is_compiled(
    option: str, layer: str, more: str, compiles: bool, note: str, digits: Path, tmp_path: Path
) -> None:
    source = MODEL.format(jit_compile=option, layer=layer) + more
    executor, learner, _ = started(tmp_path, digits, source)
    assert learner.compiles is compiles
    notes = [text for text in learner.notes if "XLA" in text]
    assert len(notes) == bool(note)
    assert note in "".join(notes)
    executor.run(1)
    assert learner.compiles is compiles


def test_nothing_is_compiled_in_a_cluster(digits: Path, tmp_path: Path) -> None:
    source = MODEL.format(jit_compile="", layer=ATTENTION)
    assert not started(tmp_path, digits, source, is_cluster=True)[1].compiles


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "more", "op"),
    [
        (ATTENTION, LOSS, "AsString"),
        (f"{ATTENTION}; x = layers.Dense(8, kernel_constraint=constraint)(x)", CONSTRAINT, "Pool"),
        (f"{ATTENTION}; x = evaluated()(x)", EVALUATED, "AsString"),
    ],
    ids=["in the gradient", "in the update", "in the evaluation"],
)
def test_step_that_xla_cannot_compile_is_run_without_it(
    layer: str, more: str, op: str, digits: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, results = [], []
    for option in ("", "jit_compile=False"):
        source = MODEL.format(jit_compile=option, layer=layer) + more
        executor, learner, _ = started(tmp_path / (option or "auto"), digits, source)
        assert learner.compiles is (not option)
        metrics = [executor.run(2), executor.run(1), executor.evaluate()]
        assert executor.position.next_batch == 3
        assert not learner.compiles
        weights.append(learner.weights())
        results.append([means(each) for each in metrics])
    (line,) = (r.getMessage() for r in caplog.records if "XLA" in r.getMessage())
    assert re.search(rf"XLA is not used: it lacks the operation \w*{op}\.", line)
    for found, wanted in zip(*results, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
    assert_close(*weights, atol=1e-5)


def test_what_xla_must_compile_and_cannot_is_explained(digits: Path, tmp_path: Path) -> None:
    source = MODEL.format(jit_compile="jit_compile=True", layer="") + LOSS
    executor, _, inputs = started(tmp_path, digits, source)
    message = r"XLA cannot compile .* it lacks the operation AsString.*jit_compile=False"
    with pytest.raises(DataFaultError) as error:
        executor.run(1)
    assert error.value.__cause__ is not None
    with pytest.raises(ConfigError, match=message), data_errors_explained(inputs):
        raise error.value.__cause__


@pytest.mark.parametrize("value", ["'on'", "1", "None", "0"])
def test_other_values_are_refused(value: str, tmp_path: Path) -> None:
    source = MODEL.format(jit_compile=f"jit_compile={value}", layer="")
    with pytest.raises(ConfigError, match=r"config\.jit_compile must be auto, True or False"):
        check(load_recipe(written(tmp_path, source)).config)
