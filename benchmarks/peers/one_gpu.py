"""One GPU without this program: a loop by hand, or Keras' `fit` with its defaults.

    python -m benchmarks.peers.one_gpu --way=hand --config=benchmarks/resnet50.py
    python -m benchmarks.peers.one_gpu --way=fit --config=configs/text_lm.py \
        --fields='{"width": 768, "precision": "mixed_bfloat16"}'

Trains the model of a config file on random bytes. In the loop by hand, XLA compiles the complete
step, and its batches are on the GPU before it begins: it has no input. `fit` reads a tf.data
pipeline, written as in TensorFlow's guides, and compiles what Keras chooses. Prints the median rate
of the last half of the windows, and the seconds from the start of the process to the end of the
first window, which includes compilation.
"""

import argparse
import itertools
import json
import time
from typing import Any

import numpy as np
import psutil

from benchmarks.pairs import steady

_NUM_BATCHES = 4


def main() -> None:
    """Prints the figures as one JSON line."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--way", choices=("hand", "fit"), required=True)
    flags.add_argument("--config", required=True, help="The config file.")
    flags.add_argument("--fields", type=json.loads, default={}, help="Fields of the config, JSON.")
    flags.add_argument("--length", type=int, default=256, help="Of a sequence, if it has any.")
    flags.add_argument("--records", help="fit: directory of TFRecords of JPEGs to read instead.")
    flags.add_argument("--num_windows", type=int, default=8, help="Windows to measure.")
    flags.add_argument("--window_steps", type=int, default=20, help="Steps of a window.")
    options = flags.parse_args()

    import keras
    import tensorflow as tf

    from trainer.config import load_recipe

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    recipe = load_recipe(options.config)
    config = recipe.config
    for name, value in options.fields.items():
        setattr(config, name, value)
    keras.config.set_dtype_policy(config.precision)
    model = recipe.build_model(config)
    optimizer = keras.optimizers.get(config.optimizer)
    if recipe.build_optimizer:
        optimizer = recipe.build_optimizer(config)
    optimizer.learning_rate = config.learning_rate
    optimizer.global_clipnorm = config.clip.global_norm or None
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = (
        _random(256, model.input_shape, options.length, config.batch_size, np.uint8),
        _random(
            model.output_shape[-1],
            model.output_shape[:-1],
            options.length,
            config.batch_size,
            np.int32,
        ),
    )
    size = options.num_windows, options.window_steps
    if options.way == "hand":
        ends = _by_hand(model, optimizer, loss, data, *size)
    else:
        batches = tf.data.Dataset.from_tensor_slices(data).repeat()
        if options.records:
            batches = _jpegs(options.records, config.batch_size)
        ends = _fit(model, optimizer, loss, batches, *size)
    examples = options.window_steps * config.batch_size
    found = {
        "examples_per_sec": steady([examples / (b - a) for a, b in itertools.pairwise(ends)]),
        "first_report_secs": ends[0] - psutil.Process().create_time(),
    }
    print(json.dumps(found), flush=True)


def _random(most: int, shape: tuple[int | None, ...], length: int, batch: int, dtype: Any) -> Any:
    """Integers below `most`: [_NUM_BATCHES, batch, ...]. `shape` begins with that of a batch."""
    sizes = [size or length for size in shape[1:]]
    return np.random.default_rng(0).integers(0, most, (_NUM_BATCHES, batch, *sizes), dtype)


def _widened(model: Any, inputs: Any) -> Any:
    """The bytes `inputs` as `model` takes them: numbers of tokens, or floats in [0, 1]."""
    import tensorflow as tf

    dtype = model.inputs[0].dtype
    return tf.cast(inputs, dtype) if dtype == "int32" else tf.cast(inputs, dtype) / 255.0


def _by_hand(model: Any, optimizer: Any, loss: Any, data: Any, windows: int, steps: int) -> Any:
    """Returns the time at the end of each window."""
    import tensorflow as tf

    optimizer.build(model.trainable_variables)
    with tf.device("GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"):
        batches = itertools.cycle([list(map(tf.identity, b)) for b in zip(*data, strict=True)])

    @tf.function(jit_compile=True)
    def step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(labels, model(_widened(model, inputs), training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    ends = []
    for _ in range(windows):
        for _ in range(steps):
            value = step(*next(batches))
        value.numpy()  # Waits for the GPU.
        ends.append(time.time())
    return ends


def _jpegs(directory: str, batch_size: int) -> Any:
    """Endless batches of shuffled images, decoded in parallel."""
    import tensorflow as tf

    spec = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def decode(record: Any) -> Any:
        example = tf.io.parse_single_example(record, spec)
        return tf.io.decode_jpeg(example["image"], channels=3), example["label"]

    records = tf.data.TFRecordDataset(tf.io.gfile.glob(f"{directory}/*-train.tfrecord-*"))
    examples = records.shuffle(1024).repeat().map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    return examples.batch(batch_size, drop_remainder=True)


def _fit(model: Any, optimizer: Any, loss: Any, batches: Any, windows: int, steps: int) -> Any:
    """Returns the time at the end of each window, which is an epoch."""
    import keras
    import tensorflow as tf

    ends = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ends.append(time.time())

    model.compile(optimizer, loss)
    batches = batches.map(lambda x, y: (_widened(model, x), y), num_parallel_calls=tf.data.AUTOTUNE)
    model.fit(
        batches.prefetch(tf.data.AUTOTUNE),
        epochs=windows,
        steps_per_epoch=steps,
        callbacks=[Clock()],
        verbose=0,
    )
    return ends


if __name__ == "__main__":
    main()
