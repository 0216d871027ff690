"""DLRM on the clicks of Criteo, as the RecZoo project has prepared them: Criteo_x1.

    python -m data.prepare csv:criteo_x1 --source=Criteo_x1 --label=label
    python -m trainer --config=configs/criteo_x1.py --strategy=ps --ps=2

Criteo_x1 is the directory of the unpacked https://huggingface.co/datasets/reczoo/Criteo_x1. It has
33 million training examples in train.csv and 4.6 million in test.csv (valid.csv is not used): the
label, 13 numbers that are scaled already, and 26 columns of ids, which are whole numbers. No list
of the ids is needed: the table has dynamic ids. The model is that of configs/dlrm.py.
"""

from typing import TYPE_CHECKING

from configs import dlrm
from configs.dlrm import loss, metrics
from trainer.config import DataConfig

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

__all__ = ["loss", "metrics"]

NUMBERS = [f"I{number}" for number in range(1, dlrm.NUM_DENSE + 1)]
COLUMNS = [f"C{number}" for number in range(1, dlrm.NUM_COLUMNS + 1)]


def get_config() -> dlrm.DlrmConfig:
    """One epoch of 4,096 examples: most models of clicks overfit in the second."""
    config = dlrm.get_config()
    config.dataset = "criteo_x1"
    config.batch_size = 4096
    config.train_steps = 8057
    config.log_every_steps = 100
    config.eval_every_steps = 2000
    config.data = DataConfig()
    return config


def parse(serialized: "tf.Tensor") -> tuple[dict[str, "tf.Tensor"], "tf.Tensor"]:
    """Examples, string [n] -> numbers float32 [n, 13] and categorical int64 [n, 26]; labels [n].

    An id times 26, plus the number of its column: equal ids of two columns are different.
    """
    import tensorflow as tf

    spec = {
        **{name: tf.io.FixedLenFeature([], tf.float32) for name in NUMBERS},
        **{name: tf.io.FixedLenFeature([], tf.int64) for name in COLUMNS},
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    example = tf.io.parse_example(serialized, spec)
    ids = tf.stack([example[name] for name in COLUMNS], axis=1)
    ids = ids * len(COLUMNS) + tf.range(len(COLUMNS), dtype=tf.int64)
    numbers = tf.stack([example[name] for name in NUMBERS], axis=1)
    return {"numbers": numbers, "categorical": ids}, example["label"]


def build_model(config: dlrm.DlrmConfig) -> "keras.Model":
    """Inputs numbers [B, 13] and categorical [B, 26] -> the probability of a click, [B, 1]."""
    return dlrm.model_of(config, sizes=None)
