"""The environment of all tests, set before any of them imports TensorFlow."""

import os
import sys

import pytest
from hypothesis import settings

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The same devices everywhere. Set it to the GPUs' indices to run the suite on them.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# A shell that is a task of some cluster must not make the tests join it.
os.environ.pop("TF_CONFIG", None)

# An example's time says more about the machine's other load than about the code.
settings.register_profile("trainer", deadline=None)
settings.load_profile("trainer")


@pytest.fixture(scope="session", autouse=True)
def two_logical_cpus() -> None:
    """They stand in for two GPUs. Before TensorFlow's first op, as it must be, whoever runs it.

    Nothing where no test imports TensorFlow.
    """
    if "tensorflow" not in sys.modules:
        return
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
