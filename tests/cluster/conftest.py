"""Data that the cluster tests train on, prepared once."""

import os
from pathlib import Path

import pytest
import tensorflow as tf

from data.prepare.writing import write_shards
from tests.cluster.runs import NUM_NUMBERED, ROOT


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits as TFRecords."""
    from data.prepare.preparing import prepare

    directory = tmp_path_factory.mktemp("datasets") / "digits"
    prepare("digits", str(directory))
    return directory


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NUM_NUMBERED records, each of which holds its number."""
    directory = tmp_path_factory.mktemp("numbered")
    for split in ("train", "test"):
        write_shards(
            (_example(i) for i in range(NUM_NUMBERED)),
            str(directory),
            "numbered",
            split,
            num_shards=2,
            num_examples=NUM_NUMBERED,
        )
    return directory


def _example(number: int) -> bytes:
    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
    features = tf.train.Features(feature={"number": feature})
    serialized: bytes = tf.train.Example(features=features).SerializeToString()
    return serialized


@pytest.fixture(scope="session")
def mnist_source() -> Path:
    """A directory with MNIST's four IDX files, which this repository does not contain."""
    default = ROOT.parent / "shared" / "data" / "mnist"
    source = Path(os.environ.get("TRAINER_MNIST", default))
    if not list(source.glob("train-images-idx3-ubyte*")):
        pytest.skip(f"{source} has no MNIST files; TRAINER_MNIST=DIRECTORY says where they are")
    return source
