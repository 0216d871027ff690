"""tables.py, with two replicas a worker, on logical CPUs of their own, which stand in for GPUs."""

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import (  # noqa: TID251
    CollectiveAllReduceExtended,
)

from tests.cluster.configs.tables import build_model as build_model
from tests.cluster.configs.tables import get_config as get_config

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
)


def other_cpus(_: object, __: object, worker: str) -> tuple[tuple[str, ...], str]:
    """The local devices of a worker, which would be its GPUs, and their kind."""
    return tuple(f"{worker}/device:CPU:{index}" for index in (1, 2)), "CPU"


CollectiveAllReduceExtended._initialize_local_devices = other_cpus
