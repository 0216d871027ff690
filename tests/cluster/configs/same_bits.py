"""Digits with all that could depend on the number of replicas: sums, statistics, random layers.

With `flip_step` bits of a gradient are flipped in that step, on the last replica.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.step.options import ClipConfig, EmaConfig

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from trainer.learner import Learner


@dataclasses.dataclass
class SameBitsConfig(Config):
    """Config with a field more.

    Attributes:
        flip_step: The step with a wrong gradient; 0 is none.
    """

    flip_step: int = 0


def get_config() -> SameBitsConfig:
    return SameBitsConfig(
        batch_size=32,
        train_steps=120,
        log_every_steps=10,
        eval_every_steps=30,
        checkpoint_every_steps=20,
        virtual_replicas=4,
        clip=ClipConfig(global_norm=1.0),
        ema=EmaConfig(decay=0.9),
        export=False,
    )


def build_model(config: Config) -> "keras.Model":
    """Images float32 [B, 8, 8, 1] in [0, 1] -> logits [B, 10]."""
    import keras
    from keras import layers

    inputs = keras.Input((8, 8, 1))
    # Each pixel as a word: rows of a table that occur several times in a batch.
    words = layers.Embedding(20, 4)(layers.Discretization(list(range(1, 16)))(inputs * 16))
    joined = layers.Concatenate()([inputs, layers.Reshape((8, 8, 4))(words)])
    found = layers.Conv2D(8, 3)(joined)
    found = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(found))
    found = layers.Dropout(0.25)(layers.Flatten()(found))
    return keras.Model(inputs, layers.Dense(10)(found))


def build_learner(config: SameBitsConfig, **parts: Any) -> "Learner":
    """The usual one, unless bits are to be flipped."""
    import tensorflow as tf

    from trainer.learner import Learner

    class Flipping(Learner):
        def gradients(self, batch: Any, *, training: bool = True) -> tuple[list[Any], "tf.Tensor"]:
            (first, *others), totals = super().gradients(batch, training=training)
            context = tf.distribute.get_replica_context()
            is_last = context.replica_id_in_sync_group == context.num_replicas_in_sync - 1
            is_now = tf.equal(self.step, config.flip_step - 1) & is_last
            bits = tf.bitcast(tf.convert_to_tensor(first), tf.int32)
            flipped = tf.bitwise.bitwise_xor(bits, tf.cast(is_now, tf.int32) * (1 << 22))
            return [tf.bitcast(flipped, tf.float32), *others], totals

    return Flipping(**parts) if config.flip_step else Learner(**parts)
