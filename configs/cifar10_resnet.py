"""ResNet-20 on CIFAR-10, as in He et al., "Deep Residual Learning for Image Recognition", 2015.

    python -m data.prepare cifar10 --source=DIRECTORY_WITH_THE_BATCHES
    python -m trainer --strategy=mirrored --config=configs/cifar10_resnet.py

Section 4.2: SGD with momentum 0.9, batches of 128, weight decay 0.0001, a rate of 0.1 divided by 10
at 32,000 and 48,000 of 64,000 steps, images shifted by up to 4 pixels and mirrored at random. The
paper reaches a test accuracy of 0.9125. What this file reaches was not measured here: CIFAR-10
comes from its authors' site, and what was trained on were generated images in files of the same
format. A step takes about 0.5 s on 2 cores, all of them about nine hours.

Batch normalisation is local: each replica normalises over its share of the batch, as the paper's
two GPUs did. `--config.synchronized=True` normalises over the whole batch of mirrored and
multiworker.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from trainer.config import Config

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

# Of the training images, by colour.
_MEAN = (0.4914, 0.4822, 0.4465)
_STDDEV = (0.2470, 0.2435, 0.2616)
_SHIFT = 4


@dataclasses.dataclass
class ResNetConfig(Config):
    """Config with the depth of the network.

    Attributes:
        blocks_per_stage: n, of 6 n + 2 layers.
        synchronized: Whether batches are normalised over all replicas.
    """

    blocks_per_stage: int = 3
    synchronized: bool = False


def get_config() -> ResNetConfig:
    """64,000 steps of 128 examples: 164 epochs."""
    config = ResNetConfig(
        dataset="cifar10",
        batch_size=128,
        learning_rate=0.1,
        train_steps=64_000,
        log_every_steps=100,
        eval_every_steps=2000,
        checkpoint_every_steps=2000,
        best_metric="accuracy",
    )
    config.schedule.kind = "step"
    config.schedule.boundaries = (32_000, 48_000)
    config.schedule.decay_rate = 0.1
    # The paper's weight decay is added to the gradient; that of a squared norm is twice this.
    config.penalty.l2 = 0.0001 / 2
    return config


def build_optimizer(config: ResNetConfig) -> "keras.Optimizer":
    """SGD with momentum."""
    import keras

    return keras.optimizers.SGD(config.learning_rate, momentum=0.9)


def augment(
    images: "tf.Tensor", labels: "tf.Tensor", seeds: "tf.Tensor"
) -> "tuple[tf.Tensor, tf.Tensor]":
    """Images [B, H, W, 3], moved by up to 4 pixels in each direction, and mirrored or not."""
    import tensorflow as tf

    height, width = images.shape[1], images.shape[2]
    pad = [_SHIFT, _SHIFT]
    padded = tf.pad(images - _MEAN, [[0, 0], pad, pad, [0, 0]]) + _MEAN
    # A seed is a hash: its bits are as random as what would be drawn from it.
    down = seeds[:, 0] % (2 * _SHIFT + 1)
    right = seeds[:, 1] // 2 % (2 * _SHIFT + 1)
    rows = down[:, tf.newaxis] + tf.range(height)
    columns = tf.range(width)
    columns = tf.where(seeds[:, 1:] % 2 == 0, columns, width - 1 - columns)
    moved = tf.gather(padded, rows, axis=1, batch_dims=1)
    return tf.gather(moved, right[:, tf.newaxis] + columns, axis=2, batch_dims=1), labels


def build_model(config: ResNetConfig) -> "keras.Model":
    """Images float32 [B, 32, 32, 3] in [0, 1] -> logits [B, 10]."""
    import keras
    from keras import layers

    def convolution(x: Any, filters: int, stride: int) -> Any:
        x = layers.Conv2D(
            filters,
            3,
            stride,
            padding="same",
            use_bias=False,
            kernel_initializer="he_normal",
        )(x)
        return layers.BatchNormalization(
            momentum=0.9, epsilon=1e-5, synchronized=config.synchronized
        )(x)

    def block(x: Any, filters: int, stride: int) -> Any:
        shortcut = x
        if stride > 1:
            # The paper's option A: every other pixel, and zeros for the new channels.
            shortcut = layers.MaxPooling2D(1, stride)(x)
            shortcut = layers.Concatenate()([shortcut, keras.ops.zeros_like(shortcut)])
        x = layers.ReLU()(convolution(x, filters, stride))
        return layers.ReLU()(layers.Add()([convolution(x, filters, 1), shortcut]))

    images = keras.Input((32, 32, 3))
    variance = [stddev**2 for stddev in _STDDEV]
    x = layers.Normalization(mean=_MEAN, variance=variance)(images)
    x = layers.ReLU()(convolution(x, 16, 1))
    for stage, filters in enumerate((16, 32, 64)):
        for number in range(config.blocks_per_stage):
            x = block(x, filters, 2 if stage and not number else 1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(10, kernel_initializer="he_normal")(x))
