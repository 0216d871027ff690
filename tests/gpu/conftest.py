"""Skips the tests of this folder where there is no GPU; the process of pytest itself uses none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.system.extras import install_command

_COUNT = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips without a look at TensorFlow's devices, which other tests set up as they need them."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: no /dev/nvidia0"))


@pytest.fixture(scope="session")
def gpu() -> dict[str, str]:
    """The environment of a process that sees one GPU. tests/conftest.py has hidden all of them."""
    visible = os.environ["CUDA_VISIBLE_DEVICES"].partition(",")[0]
    env = {"CUDA_VISIBLE_DEVICES": "0" if visible == "-1" else visible}
    command = [sys.executable, "-c", _COUNT]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=True, timeout=100
    )
    if int(done.stdout) != 1:
        pytest.skip(f"TensorFlow does not see the GPU: {install_command('cuda')}")
    return env
