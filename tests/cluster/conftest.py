"""Data that the cluster tests train on, prepared once."""

import os
from pathlib import Path

import pytest

from tests.cluster.runs import ROOT


@pytest.fixture(scope="session")
def mnist_source() -> Path:
    """A directory with MNIST's four IDX files, which this repository does not contain."""
    default = ROOT.parent / "shared" / "data" / "mnist"
    source = Path(os.environ.get("TRAINER_MNIST", default))
    if not list(source.glob("train-images-idx3-ubyte*")):
        pytest.skip(f"{source} has no MNIST files; TRAINER_MNIST=DIRECTORY says where they are")
    return source
