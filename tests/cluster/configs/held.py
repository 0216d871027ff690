"""Softmax regression, in which a ps worker can be made to hold its bias gradient; see gates.py.

The chief writes to a file what the gradient buffers of synchronous parameter servers hold then.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.hooks.base import Hook

HELD_WORKER = 1


@dataclasses.dataclass
class HeldConfig(Config):
    """Config of a run with a held gradient.

    Attributes:
        hold_dir: Directory of the files that hold the gradient, and of the values that were seen.
    """

    hold_dir: str = ""


def get_config() -> HeldConfig:
    return HeldConfig(
        batch_size=48,
        optimizer="sgd",
        learning_rate=0.1,
        train_steps=60,
        steps_per_call=5,
        log_every_steps=5,
        checkpoint_every_steps=0,
        export=False,
    )


def build_model(config: HeldConfig) -> Any:
    """Images [B, 8, 8, 1] -> logits [B, 10]."""
    import keras
    from keras import layers, ops

    from tests.cluster.gates import Hold

    class Logits(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = self.add_weight(shape=(64, 10), initializer="glorot_uniform")
            self.bias = self.add_weight(shape=(10,), initializer="zeros")

        def call(self, images: Any) -> Any:
            kernel, bias = self.kernel, self.bias
            # The bias is on the ps that counts the steps, whose buffer is written last.
            if hold := Hold.of(config.hold_dir):
                kernel = hold.gradient_of(kernel, "kernel", waits=False)
                bias = hold.gradient_of(bias, "bias", waits=True)
            return ops.matmul(images, kernel) + bias

    images = keras.Input((8, 8, 1))
    return keras.Model(images, Logits()(layers.Flatten()(images)))


class WriteBuffers(Hook):
    """Writes to `staged.json` which gradients have arrived, once a worker holds one."""

    def __init__(self, hold_dir: Path) -> None:
        self._hold_dir = hold_dir

    def begin(self, step: int) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        import numpy as np
        import tensorflow as tf

        from strategies.ps.executor import _KEEP_ALIVE

        seen = {}
        for name in ("kernel", "bias"):
            path = self._hold_dir / f"{name}-{HELD_WORKER}"
            while not path.exists() or not path.stat().st_size:
                time.sleep(0.01)
            seen[name] = tf.io.parse_tensor(path.read_bytes(), tf.float32).numpy()
        executor: Any = _KEEP_ALIVE[-1]
        buffers = executor._buffers
        of_kernel, of_bias = (buffers._tags[buffer.device] for buffer in buffers._gradients)
        while True:
            kernels, biases = (buffer.numpy() for buffer in buffers._gradients)
            slots = [s for s, k in enumerate(kernels) if np.array_equal(k, seen["kernel"])]
            if slots:
                break
            time.sleep(0.01)
        (slot,) = slots
        staged = {
            "bias_is_there": bool(np.array_equal(biases[slot], seen["bias"])),
            "has_equal_tags": of_kernel.numpy()[slot].tolist() == of_bias.numpy()[slot].tolist(),
        }
        (self._hold_dir / "staged.part").write_text(json.dumps(staged))
        (self._hold_dir / "staged.part").rename(self._hold_dir / "staged.json")


def build_hooks(config: HeldConfig, model_dir: str) -> Sequence[Hook]:
    return [WriteBuffers(Path(config.hold_dir))] if config.hold_dir else []
