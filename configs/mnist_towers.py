"""The classic multi-GPU tower program: a 784-500-10 perceptron on MNIST, with averaged weights.

    python -m data.prepare mnist_towers --layout=image_raw --source=DIRECTORY_WITH_THE_IDX_FILES
    python -m trainer --strategy=mirrored --replicas=2 --config=configs/mnist_towers.py

TensorFlow 1 trained this network on several GPUs, a tower on each, from the records that its
convert_to_records.py wrote: L2 of 0.0001, SGD at 0.5 that falls by 1% an epoch, and a moving
average of the weights, which is evaluated and exported. 10,000 steps take about 50 s on 2 shared
cores, and reach a test accuracy of 0.983 (at least 0.98).
"""

from configs.mnist_replica import MnistReplicaConfig, build_model
from data.features import image_raw_parse

__all__ = ["build_model"]

# The records hold `image_raw`, `pixels` and `label`.
parse = image_raw_parse((28, 28, 1))


def get_config() -> MnistReplicaConfig:
    """10,000 steps of 100 examples: 17 epochs."""
    config = MnistReplicaConfig(
        hidden_units=500,
        dataset="mnist_towers",
        batch_size=100,
        optimizer="sgd",
        learning_rate=0.5,
        train_steps=10_000,
        log_every_steps=1000,
        checkpoint_every_steps=1000,
        histogram_every_steps=1000,
    )
    config.schedule.kind = "exponential"
    config.schedule.decay_rate = 0.99
    config.schedule.decay_steps = 600  # An epoch.
    # TensorFlow 1's l2_loss halved the sum of squares.
    config.penalty.l2 = 0.0001 / 2
    config.ema.decay = 0.99
    config.ema.warmup = True
    return config
