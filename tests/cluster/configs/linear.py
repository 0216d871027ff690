"""Softmax regression on the digits: the quickest model, for tests of what is not the model."""

from typing import Any

from trainer.config import Config


def get_config() -> Config:
    return Config(
        batch_size=48,
        learning_rate=0.01,
        train_steps=200,
        steps_per_call=10,
        log_every_steps=20,
        checkpoint_every_steps=0,
        export=False,
    )


def build_model(config: Config) -> Any:
    """Images [B, 8, 8, 1] -> logits [B, 10]."""
    import keras
    from keras import layers

    images = keras.Input((8, 8, 1))
    return keras.Sequential([images, layers.Flatten(), layers.Dense(10)])
