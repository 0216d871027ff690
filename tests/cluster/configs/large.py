"""A perceptron of 22 million weights (87 MB) with a residual connection, on the digits."""

from typing import Any

from trainer.config import Config


def get_config() -> Config:
    return Config(
        optimizer="sgd",
        learning_rate=0.01,
        batch_size=48,
        train_steps=6,
        steps_per_call=3,
        log_every_steps=3,
        checkpoint_every_steps=0,
        export=False,
    )


def build_model(config: Config) -> Any:
    """Images [B, 8, 8, 1] -> logits [B, 10]."""
    import keras
    from keras import layers

    images = keras.Input((8, 8, 1))
    first = layers.Dense(3300, activation="relu")(layers.Flatten()(images))
    second = layers.Dense(3300, activation="relu")(first)
    third = layers.Dense(3300, activation="relu")(layers.Add()([first, second]))
    outputs = layers.Dense(10)(layers.Add()([first, second, third]))
    return keras.Model(images, outputs)
