"""Fixtures of several unit tests."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from data.tfrecord.split import Split
    from tests.unit.toy import Toy


@pytest.fixture(scope="session")
def split(tmp_path_factory: pytest.TempPathFactory) -> "Split":
    """The records of a Toy, which tests must not change."""
    from tests.unit.toy import write_split  # It imports TensorFlow.

    return write_split(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def toy(split: "Split", tmp_path: Path) -> "Toy":
    """A run in `tmp_path` that has started."""
    from tests.unit.toy import Toy

    toy = Toy(split, tmp_path)
    toy.start()
    return toy
