"""ResNet-20 on CIFAR-10, as in He et al., "Deep Residual Learning for Image Recognition", 2015.

    python -m data.prepare cifar10 --source=DIRECTORY_WITH_THE_BATCHES
    python -m trainer --strategy=mirrored --config=configs/cifar10_resnet.py

Section 4.2: SGD with momentum 0.9, batches of 128, weight decay 0.0001, a rate of 0.1 divided by 10
at 32,000 and 48,000 of 64,000 steps, images shifted by up to 4 pixels and mirrored at random. The
paper reaches a test accuracy of 0.9125. The accuracy of this file was not measured: CIFAR-10
must be downloaded from its authors' site; the file was tested on generated images in the same
format. A step takes about 0.5 s on 2 cores, the whole run about nine hours.

Batch normalisation is local: each replica normalises over its part of the batch, as the paper's
two GPUs did. `--config.synchronized=True` normalises over the whole batch, under mirrored and
multiworker.
"""

import dataclasses
from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

# Mean and standard deviation of the training images, per colour.
_MEAN = (0.4914, 0.4822, 0.4465)
_STDDEV = (0.2470, 0.2435, 0.2616)
_SHIFT = 4


@dataclasses.dataclass
class ResNetConfig(Config):
    """Config with two fields more.

    Attributes:
        blocks_per_stage: The network has 6 * blocks_per_stage + 2 layers.
        synchronized: True normalises over the batch of all replicas.
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
    # The paper adds 0.0001 * w to the gradient; the gradient of l2 * w ** 2 is 2 * l2 * w.
    config.penalty.l2 = 0.0001 / 2
    return config


def build_optimizer(config: ResNetConfig) -> "keras.Optimizer":
    """SGD with momentum."""
    import keras

    return keras.optimizers.SGD(config.learning_rate, momentum=0.9)


def augment(
    images: "tf.Tensor", labels: "tf.Tensor", seeds: "tf.Tensor"
) -> "tuple[tf.Tensor, tf.Tensor]":
    """Shifts images [B, H, W, 3] by up to 4 pixels in each direction, and mirrors half of them.

    `seeds` is int [B, 2], two random numbers per example.
    """
    import tensorflow as tf

    height, width = images.shape[1], images.shape[2]
    pad = [_SHIFT, _SHIFT]
    padded = tf.pad(images - _MEAN, [[0, 0], pad, pad, [0, 0]]) + _MEAN
    # A seed is a hash, so its bits are random numbers already.
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
    from keras import KerasTensor, layers

    def convolution(x: KerasTensor, filters: int, stride: int) -> KerasTensor:
        x = layers.Conv2D(
            filters, 3, stride, padding="same", use_bias=False, kernel_initializer="he_normal"
        )(x)
        return layers.BatchNormalization(
            momentum=0.9, epsilon=1e-5, synchronized=config.synchronized
        )(x)

    def block(x: KerasTensor, filters: int, stride: int) -> KerasTensor:
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
