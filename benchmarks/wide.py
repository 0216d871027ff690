"""The digits with a dense model of ten million parameters, for benchmarks.checkpointing.

python -m trainer --strategy=mirrored --config=benchmarks/wide.py
"""

from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    import keras

_WIDTH = 3130


def get_config() -> Config:
    """Batches of 100, a checkpoint every 100 steps."""
    return Config(batch_size=100, train_steps=500, checkpoint_every_steps=100, export=False)


def build_model(config: Config) -> "keras.Model":
    """Images float32 [B, 8, 8, 1] in [0, 1] -> logits [B, 10]; 10,034,790 parameters."""
    import keras
    from keras import layers

    wide = [layers.Dense(_WIDTH, activation="relu") for _ in range(2)]
    images = keras.Input((8, 8, 1))
    return keras.Sequential([images, layers.Flatten(), *wide, layers.Dense(10)])
