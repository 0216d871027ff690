"""Softmax regression whose bias gradient a ps worker can be made to hold back; see gates.py.

The chief writes down what the staging area of synchronous parameter servers holds meanwhile.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.hooks import Hook

if TYPE_CHECKING:
    import keras

HELD_WORKER = 1


@dataclasses.dataclass
class HeldConfig(Config):
    """Config with a field more.

    Attributes:
        hold_dir: Where the files are that hold a gradient back, and what is seen of it.
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


def build_model(config: HeldConfig) -> "keras.Model":
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
            # The bias is on the ps that counts the steps, where a gradient is staged last.
            if hold := Hold.of(config.hold_dir):
                kernel = hold.gradient_of(kernel, "kernel", waits=False)
                bias = hold.gradient_of(bias, "bias", waits=True)
            return ops.matmul(images, kernel) + bias

    images = keras.Input((8, 8, 1))
    return keras.Model(images, Logits()(layers.Flatten()(images)))


class WriteDownStaging(Hook):
    """Once a worker holds its bias gradient back: what of it has arrived, in `staged.json`."""

    def __init__(self, hold_dir: Path) -> None:
        self._hold_dir = hold_dir

    def begin(self, step: int) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        import numpy as np
        import tensorflow as tf

        from strategies.ps import _KEPT

        seen = {}
        for name in ("kernel", "bias"):
            path = self._hold_dir / f"{name}-{HELD_WORKER}"
            while not path.exists() or not path.stat().st_size:
                time.sleep(0.01)
            seen[name] = tf.io.parse_tensor(path.read_bytes(), tf.float32).numpy()
        executor: Any = _KEPT[-1]
        staging = executor._rounds.staging
        of_kernel, of_bias = (staging._tags[area.device] for area in staging._gradients)
        while True:
            kernels, biases = (area.numpy() for area in staging._gradients)
            slots = [s for s, k in enumerate(kernels) if np.array_equal(k, seen["kernel"])]
            if slots:
                break
            time.sleep(0.01)
        (slot,) = slots
        staged = {
            "bias_is_there": bool(np.array_equal(biases[slot], seen["bias"])),
            "is_tagged_alike": of_kernel.numpy()[slot].tolist() == of_bias.numpy()[slot].tolist(),
        }
        (self._hold_dir / "staged.part").write_text(json.dumps(staged))
        (self._hold_dir / "staged.part").rename(self._hold_dir / "staged.json")


def build_hooks(config: HeldConfig, model_dir: str) -> Sequence[Hook]:
    return [WriteDownStaging(Path(config.hold_dir))] if config.hold_dir else []
