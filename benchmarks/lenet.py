"""LeNet-5 on MNIST: two convolutions, 61,706 parameters; for benchmarks.run.

    python -m trainer --strategy=mirrored --config=benchmarks/lenet.py --data_dir=datasets/mnist

The layers of LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998, with
the activations of today.
"""

from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    import keras


def get_config() -> Config:
    """3,000 steps of 100 examples: 5 epochs."""
    return Config(
        dataset="mnist",
        batch_size=100,
        learning_rate=0.001,
        train_steps=3000,
        log_every_steps=100,
        checkpoint_every_steps=1000,
    )


def build_model(config: Config) -> "keras.Model":
    """Images float32 [B, 28, 28, 1] in [0, 1] -> logits [B, 10]."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(6, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(120, activation="relu"),
            layers.Dense(84, activation="relu"),
            layers.Dense(10),
        ]
    )
