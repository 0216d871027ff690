"""Digits with averages that the forward pass changes, averages of weights, and several buckets.

Steps differ in all of them, so a state between two steps equals no state of an undisturbed run.
"""

from typing import Any

from trainer.config import Config
from trainer.step.options import EmaConfig


def get_config() -> Config:
    return Config(
        optimizer="adam",
        learning_rate=0.001,
        batch_size=48,
        train_steps=300,
        log_every_steps=20,
        checkpoint_every_steps=0,
        eval_every_steps=0,
        ema=EmaConfig(decay=0.9),
        export=False,
    )


def build_model(config: Config) -> Any:
    """Images float32 [B, 8, 8, 1] in [0, 1] -> logits [B, 10]; 1.6 MB of weights."""
    import keras
    from keras import layers

    in_each_step = config.local_steps.every == 0

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(512, activation="relu"),
            layers.BatchNormalization(momentum=0.9, synchronized=in_each_step),
            layers.Dense(512, activation="relu"),
            layers.BatchNormalization(momentum=0.9, synchronized=in_each_step),
            layers.Dropout(0.25),
            layers.Dense(200, activation="relu"),
            layers.Dense(10),
        ]
    )
