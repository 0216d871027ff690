"""The examples and the config that all models here share.

write_examples(Path("data"))        # train and test
features = parsed(serialized)       # each config file chooses inputs and labels
"""

import dataclasses
from pathlib import Path

import numpy as np
import tensorflow as tf

from data.tfrecord.examples import example_bytes
from tests.shards import write_shards
from trainer.config import Config

BATCH, TRAIN, TEST = 24, 240, 50
SIZE, CLASSES, LENGTH = 32, 10, 24
WORDS = [b"red", b"green", b"blue", b"grey"]


@dataclasses.dataclass
class ModelConfig(Config):
    """Adds the name of one of several models of a file."""

    model: str = ""


def config(learning_rate: float = 0.05, model: str = "") -> ModelConfig:
    """30 steps of SGD, 3 epochs."""
    return ModelConfig(
        model=model,
        optimizer="sgd",
        learning_rate=learning_rate,
        batch_size=BATCH,
        train_steps=30,
        log_every_steps=10,
    )


def write_examples(directory: Path) -> None:
    """Noise, in which the class can be found in each feature."""
    random = np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("test", TEST)):
        examples = []
        for label in random.integers(0, CLASSES, count).tolist():
            colour = np.array([label * 12, 60, label * 9])
            pixels = random.integers(0, 128, (SIZE, SIZE, 3)) + colour
            tokens = np.arange(LENGTH + 1) * (label + 1) + random.integers(0, 3)
            example = {
                "image": pixels.astype(np.uint8).tobytes(),
                "tokens": (tokens % 32).astype(np.uint8).tobytes(),
                "numbers": random.normal(label / 5, 1.0, 4).tolist(),
                "word": WORDS[label % 4],
                "label": label,
            }
            examples.append(example_bytes(example))
        write_shards(examples, str(directory), "models", split, 2, count)


def parsed(serialized: tf.Tensor) -> dict[str, tf.Tensor]:
    """string [n] -> image [n, 32, 32, 3] in [0, 1], tokens int32 [n, 25], numbers, word, label."""
    spec = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "tokens": tf.io.FixedLenFeature([], tf.string),
        "numbers": tf.io.FixedLenFeature([4], tf.float32),
        "word": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    example = tf.io.parse_example(serialized, spec)
    pixels = tf.io.decode_raw(example["image"], tf.uint8, fixed_length=SIZE * SIZE * 3)
    tokens = tf.io.decode_raw(example["tokens"], tf.uint8, fixed_length=LENGTH + 1)
    return {
        **example,
        "image": tf.cast(tf.reshape(pixels, [-1, SIZE, SIZE, 3]), tf.float32) / 255,
        "tokens": tf.cast(tokens, tf.int32),
    }
