"""Two logical CPUs stand in for two GPUs, in all unit tests that use TensorFlow."""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def two_logical_cpus() -> None:
    """Before TensorFlow's first op, as it must be; where no test imports TensorFlow, nothing."""
    if "tensorflow" not in sys.modules:
        return
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
