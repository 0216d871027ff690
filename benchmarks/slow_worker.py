"""configs/digits.py with a delay of `delay_ms` for each gradient of ps worker 0.

    python -m trainer --strategy=ps --sync_replicas --workers=3 --replicas_to_aggregate=2 \
        --config=benchmarks/slow_worker.py

For benchmarks.stragglers.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from configs import digits
from trainer.config import Config

if TYPE_CHECKING:
    import keras


@dataclasses.dataclass
class SlowWorkerConfig(Config):
    """Config with one more field.

    Attributes:
        delay_ms: Delay of each gradient of worker 0; 0 for workers of equal speed.
    """

    delay_ms: int = 200


def get_config() -> SlowWorkerConfig:
    """300 steps of 60 examples of the digits."""
    return SlowWorkerConfig(
        dataset="digits", batch_size=60, learning_rate=0.002, train_steps=300, export=False
    )


def build_model(config: SlowWorkerConfig) -> "keras.Model":
    """Images float32 [B, 8, 8, 1] in [0, 1] -> logits [B, 10]."""
    import keras
    from keras import layers

    from benchmarks.delay import late_on_worker

    class Late(layers.Layer):
        def call(self, images: Any) -> Any:
            return late_on_worker(0, images, config.delay_ms) if config.delay_ms else images

    images = keras.Input((8, 8, 1))
    return keras.Sequential([images, Late(), *digits.build_model(config).layers])
