"""A language model of bytes: a small Transformer that predicts each byte from those before it.

    python -m data.prepare text:mine --source=DIRECTORY_WITH_TEXT_FILES
    python -m trainer --config=configs/text_lm.py --data_dir=datasets/mine

Records are sequences of 256 bytes, and the byte that follows each is its label. They are cut out of
all documents, one after the other, so a sequence may hold the end of one document, byte 0, and the
beginning of the next. The loss of an example is the mean over its bytes, in nats; `bits_per_byte`
is the same in bits, and `perplexity` is its exponential.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras

from data.features import ExampleParse
from data.tfrecord.fixed_layout import Column
from trainer.config import Config
from trainer.step.options import ClipConfig, ScheduleConfig

if TYPE_CHECKING:
    import tensorflow as tf

LENGTH = 256  # Of a sequence; as --length of data.prepare.


@dataclasses.dataclass
class TextConfig(Config):
    """The size of the Transformer.

    Attributes:
        width: The size of a byte's vector.
        blocks: The number of layers with attention.
        heads: The number of heads of each; divides width.
        dropout: The part of the values that dropout sets to 0.
    """

    width: int = 128
    blocks: int = 4
    heads: int = 4
    dropout: float = 0.1


def get_config() -> TextConfig:
    """4,000 steps of 32 sequences, 33 million bytes."""
    return TextConfig(
        dataset="text",
        batch_size=32,
        optimizer="adamw",
        learning_rate=0.001,
        train_steps=4000,
        eval_every_steps=1000,
        best_metric="bits_per_byte",
        schedule=ScheduleConfig(kind="cosine", warmup_steps=200),
        clip=ClipConfig(global_norm=1.0),
    )


def decode(raw: "Mapping[str, tf.Tensor]") -> "tuple[tf.Tensor, tf.Tensor]":
    """Records -> sequences, and the byte after each of their bytes, uint8 [n, LENGTH]."""
    import tensorflow as tf

    values = raw["bytes"]
    if values.dtype == tf.string:
        lengths = tf.strings.length(values) - 1
        message = (
            f"A sequence does not have LENGTH = {LENGTH} of the config file: data.prepare needs "
            f"--length={LENGTH}; or change LENGTH to the length here:"
        )
        fits = tf.reduce_all(lengths == LENGTH)
        with tf.control_dependencies([tf.debugging.Assert(fits, [message, lengths])]):
            values = tf.io.decode_raw(values, tf.uint8, fixed_length=LENGTH + 1)
    return values[:, :-1], values[:, 1:]


def to_int32(inputs: "tf.Tensor", labels: "tf.Tensor") -> "tuple[tf.Tensor, tf.Tensor]":
    """Done in the step, so that a cache and queues hold bytes."""
    import tensorflow as tf

    return tf.cast(inputs, tf.int32), tf.cast(labels, tf.int32)


parse = ExampleParse({"bytes": Column("bytes", num_bytes=LENGTH + 1)}, decode, to_int32)


def build_model(config: TextConfig) -> keras.Model:
    """Bytes int32 [B, T], T <= LENGTH -> logits of the next byte, float32 [B, T, 256]."""
    from keras import layers

    tokens = keras.Input((None,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(256, config.width)(tokens)
    x = x + layers.Embedding(LENGTH, config.width)(positions)
    for _ in range(config.blocks):
        normed = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(config.heads, config.width // config.heads)
        mixed = attention(normed, normed, use_causal_mask=True)
        x = x + layers.Dropout(config.dropout)(mixed)
        hidden = layers.Dense(4 * config.width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(config.dropout)(layers.Dense(config.width)(hidden))
    logits = layers.Dense(256, dtype="float32")(layers.LayerNormalization()(x))
    return keras.Model(tokens, logits)


def loss(labels: "tf.Tensor", outputs: "tf.Tensor") -> "tf.Tensor":
    """The mean cross entropy of the bytes of each sequence, in nats, [B]."""
    import tensorflow as tf

    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=outputs)
    return tf.reduce_mean(losses, axis=-1)


def bits_per_byte(labels: "tf.Tensor", outputs: "tf.Tensor") -> "tf.Tensor":
    """The loss in bits, [B]."""
    return loss(labels, outputs) / math.log(2)


@keras.saving.register_keras_serializable("text_lm")
class Perplexity(keras.metrics.Mean):
    """The exponential of the mean loss."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the losses of sequences."""
        super().update_state(loss(y_true, y_pred), sample_weight)

    def result(self) -> Any:
        """The exponential."""
        return keras.ops.exp(super().result())


metrics = {"bits_per_byte": bits_per_byte, "perplexity": Perplexity(name="perplexity")}
