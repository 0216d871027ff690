"""A small convolutional network on handwritten digits: real scans, no download.

    python -m trainer --strategy=mirrored

1,437 images train, 360 test; 8 x 8 pixels of 17 grey levels. Takes about 10 s on 2 cores, and
reaches a test accuracy of about 0.98 (at least 0.96) under every strategy.
"""

from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    import keras


def get_config() -> Config:
    """A quick run: 1,000 steps of 64 examples, 44 epochs."""
    return Config(
        dataset="digits",
        batch_size=64,
        learning_rate=0.002,
        train_steps=1000,
        log_every_steps=100,
        eval_every_steps=500,
        checkpoint_every_steps=500,
        best_metric="accuracy",
    )


def build_model(config: Config) -> "keras.Model":
    """Images float32 [B, 8, 8, 1] in [0, 1] -> logits [B, 10]."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
