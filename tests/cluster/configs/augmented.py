"""Softmax regression on randomly mirrored and shifted digits, differently in each epoch."""

from typing import Any

from tests.cluster.configs import linear
from trainer.config import Config


def get_config() -> Config:
    config = linear.get_config()
    config.optimizer = "sgd"
    config.learning_rate = 0.1
    return config


def build_model(config: Config) -> Any:
    return linear.build_model(config)


def augment(images: Any, labels: Any, seeds: Any) -> Any:
    """Images [B, H, W, C], mirrored or not, and moved by one pixel at most in each direction."""
    import tensorflow as tf

    def one(drawn: Any) -> Any:
        image, seed = drawn
        image = tf.image.stateless_random_flip_left_right(image, seed)
        around = tf.pad(image, [[1, 1], [1, 1], [0, 0]])
        # Another draw of the same example needs another seed, made from its own.
        seed = tf.random.experimental.stateless_fold_in(seed, 1)
        return tf.image.stateless_random_crop(around, image.shape, seed)

    spec = tf.TensorSpec(images.shape[1:], images.dtype)
    return tf.map_fn(one, (images, seeds), fn_output_signature=spec), labels
