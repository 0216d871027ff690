"""`config.jit_compile`: XLA compiles what gains by it, and what it can."""

from pathlib import Path

import pytest

from strategies.mirrored import MirroredExecutor
from tests.unit.test_config_file import digits, written
from trainer.config import ConfigError, load_recipe
from trainer.config_checks import check
from trainer.inputs import open_inputs
from trainer.session import build_session

__all__ = ["digits"]  # A fixture.

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


@pytest.mark.parametrize(
    ("jit_compile", "layer", "more", "compiles", "note"),
    [
        ("", "", "", False, ""),
        ("", ATTENTION, "", True, ""),
        ("jit_compile='auto'", ATTENTION, "", True, ""),
        ("jit_compile=False", ATTENTION, "", False, ""),
        ("jit_compile=True", "", "", True, ""),
        ("", ATTENTION, ONE_HOT, True, ""),
        ("", ATTENTION, LOSS, False, "faster: XLA lacks the operation AsString. With --config.jit"),
        ("", ATTENTION, OTHER_SHAPES, False, "faster: its examples have different shapes"),
        ("", ATTENTION, OWN_STEP, False, "faster: its Learner overrides `gradients`"),
        ("", IN_SYNC, "", False, "is synchronized=True"),
        ("", SPECTRAL, "", False, "assigns its kernel"),
    ],
)
def test_what_gains_by_xla_is_compiled_if_it_can_be(
    jit_compile: str,
    layer: str,
    more: str,
    compiles: bool,
    note: str,
    digits: Path,
    tmp_path: Path,
) -> None:
    source = MODEL.format(jit_compile=jit_compile, layer=layer)
    recipe = load_recipe(written(tmp_path, source + more))
    check(recipe.config)
    recipe.config.data_dir = str(digits)
    build = MirroredExecutor.on(["CPU:0"]).build
    learner = build_session(recipe, open_inputs(recipe), build).learner
    assert learner.compiles is compiles
    notes = [text for text in learner.notes if "XLA" in text]
    assert len(notes) == bool(note)
    assert note in "".join(notes)


def test_what_xla_must_compile_and_cannot_is_refused(digits: Path, tmp_path: Path) -> None:
    source = MODEL.format(jit_compile="jit_compile=True", layer="")
    recipe = load_recipe(written(tmp_path, source + LOSS))
    recipe.config.data_dir = str(digits)
    with pytest.raises(ConfigError, match=r"jit_compile=True.* XLA lacks the operation AsString"):
        build_session(recipe, open_inputs(recipe), MirroredExecutor.on(["CPU:0"]).build)


@pytest.mark.parametrize("value", ["'on'", "1", "None", "0"])
def test_other_values_are_refused(value: str, tmp_path: Path) -> None:
    source = MODEL.format(jit_compile=f"jit_compile={value}", layer="")
    with pytest.raises(ConfigError, match=r"config\.jit_compile must be auto, True or False"):
        check(load_recipe(written(tmp_path, source)).config)
