"""A perceptron of 12 hidden layers of 1,024 units, 49 MB of gradients; for benchmarks.network.

python -m trainer --strategy=multiworker --config=benchmarks/deep.py --data_dir=datasets/mnist
"""

from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    import keras

WIDTH, DEPTH = 1024, 12
# Weights and biases, of 4 bytes each.
GRADIENT_BYTES = 4 * (785 * WIDTH + (DEPTH - 1) * (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10)


def get_config() -> Config:
    """A report every 4 steps, and nothing else."""
    return Config(
        dataset="mnist",
        batch_size=1024,
        optimizer="sgd",
        learning_rate=0.001,
        train_steps=16,
        steps_per_call=4,
        log_every_steps=4,
        eval_every_steps=0,
        checkpoint_every_steps=0,
        export=False,
    )


def build_model(config: Config) -> "keras.Model":
    """Images float32 [B, 28, 28, 1] in [0, 1] -> logits [B, 10]."""
    import keras
    from keras import layers

    deep = [layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH)]
    images = keras.Input((28, 28, 1))
    return keras.Sequential([images, layers.Flatten(), *deep, layers.Dense(10)])
