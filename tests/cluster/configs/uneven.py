"""The linear model of straggler.py; worker 1 is slow, and each task records what it trains.

A task adds the numbers of the examples of each training step to the file `$TRAINED.INDEX`.
"""

import json
import os
import time
from typing import Any

from tests.cluster.configs import straggler
from tests.cluster.configs.straggler import loss, parse
from trainer.config import Config

__all__ = ["build_model", "get_config", "loss", "parse"]

SLOW_SECS = 0.1  # Of a step of worker 1.


def get_config() -> Config:
    config = straggler.get_config()
    config.train_steps = 150
    config.log_every_steps = 1
    return config


def build_model(config: Config) -> Any:
    import keras
    import tensorflow as tf

    index = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)

    def record(numbers: Any) -> Any:
        with open(f"{os.environ['TRAINED']}.{index}", "a") as file:
            file.write(" ".join(str(round(1000 * n)) for n in numbers[:, 0].tolist()) + "\n")
        time.sleep(SLOW_SECS * (index == 1))
        return numbers

    class Recorded(keras.layers.Layer):
        def call(self, inputs: Any, training: bool = False) -> Any:
            if not training or isinstance(inputs, keras.KerasTensor):
                return inputs
            # In the process of a worker. A test wants to know which examples came.
            same = tf.numpy_function(record, [inputs], inputs.dtype)  # noqa: TID251
            return tf.ensure_shape(same, inputs.shape)

    return keras.Sequential([keras.Input((1,)), Recorded(), keras.layers.Dense(1)])
