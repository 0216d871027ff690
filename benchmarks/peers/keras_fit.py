"""`model.fit` at its best: XLA, 50 steps a call, batches cut beforehand.

python -m benchmarks.peers.keras_fit --mnist_source=DIRECTORY_WITH_THE_IDX_FILES
"""

import math
import time
from typing import Any

from benchmarks.peers.common import CONFIGS, batches_of, load_mnist, parser, print_result

_STEPS_PER_EXECUTION = 50


def main() -> None:
    """Prints the rate."""
    options = parser(__doc__, 100).parse_args()

    import keras
    import tensorflow as tf

    from trainer.config import load_recipe

    recipe = load_recipe(CONFIGS["mlp"])
    model = recipe.build_model(recipe.config)
    model.compile(
        optimizer=keras.optimizers.Adam(recipe.config.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=_STEPS_PER_EXECUTION,
        jit_compile=True,
    )
    images, labels = load_mnist(options.mnist_source)
    batches = batches_of((images.reshape(-1, 28, 28, 1), labels), options.batch_size)
    dataset = tf.data.Dataset.from_tensor_slices(batches).repeat().prefetch(tf.data.AUTOTUNE)
    ends: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())

    # An epoch has the length of the warm-up: only on_epoch_end can read the clock.
    epoch_steps = -(-options.warmup_steps // _STEPS_PER_EXECUTION) * _STEPS_PER_EXECUTION
    num_epochs = 1 + math.ceil(options.steps / epoch_steps)
    model.fit(
        dataset, epochs=num_epochs, steps_per_epoch=epoch_steps, verbose=0, callbacks=[Clock()]
    )
    print_result("steps_per_sec", epoch_steps * (num_epochs - 1) / (ends[-1] - ends[0]))


if __name__ == "__main__":
    main()
