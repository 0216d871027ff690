"""Data that the cluster tests train on, prepared once."""

import os
from pathlib import Path

import pytest

from tests.cluster.runs import ROOT


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits as TFRecords."""
    from data.prepare import prepare

    directory = tmp_path_factory.mktemp("datasets") / "digits"
    prepare("digits", str(directory))
    return directory


@pytest.fixture(scope="session")
def mnist_source() -> Path:
    """A directory with MNIST's four IDX files, which this repository does not carry."""
    default = ROOT.parent / "shared" / "data" / "mnist"
    source = Path(os.environ.get("TRAINER_MNIST", default))
    if not list(source.glob("train-images-idx3-ubyte*")):
        pytest.skip(f"{source} has no MNIST files; TRAINER_MNIST=DIRECTORY says where they are")
    return source
