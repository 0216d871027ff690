"""constraints.txt pins each package of an installation, so that all installations are equal."""

import importlib.metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packages import PROJECT, installed_with, pins

CUDA = [
    required
    for required in map(Requirement, importlib.metadata.requires("tensorflow") or [])
    if required.marker is not None and required.marker.evaluate({"extra": "and-cuda"})
]


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"].keys() - {"wandb"}))
def test_each_package_that_an_extra_installs_is_pinned(extra: str) -> None:
    installed = installed_with({extra})
    assert "numpy" in installed, "of tensorflow"
    assert installed - pins().keys() == set()


def test_pins_are_versions_that_the_cuda_extra_of_tensorflow_takes() -> None:
    assert len(CUDA) > 10
    for required in CUDA:
        assert canonicalize_name(required.name) in installed_with({"cuda"})
        assert required.specifier.contains(pins()[canonicalize_name(required.name)]), required


def test_training_needs_no_package_of_the_extras() -> None:
    heavy = {"scikit-learn", "scipy", "tensorflow-datasets", "pyarrow", "pytest", "matplotlib"}
    assert heavy & installed_with() == set()
    assert heavy <= installed_with({"dev", "benchmarks"})
