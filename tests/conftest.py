"""The environment of all tests, set before any of them imports TensorFlow."""

import functools
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.cluster.runs import Run, TrainOnce

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# No GPUs, so that all machines have the same devices. Set the GPUs' indices to test on GPUs.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# If this shell belongs to a cluster, the tests must not join that cluster.
os.environ.pop("TF_CONFIG", None)
# A pod of Kubernetes is more patient than the tests.
os.environ.pop("KUBERNETES_SERVICE_HOST", None)

# The time of one hypothesis example depends on the load of the machine, not on the code.
settings.register_profile("trainer", deadline=None)
settings.load_profile("trainer")

# The tests of one process trace many graphs, and TensorFlow warns of it in whichever is the fifth.
logging.getLogger("tensorflow").addFilter(lambda record: "retracing" not in record.getMessage())

UNIT_TESTS = Path(__file__).resolve().parent / "unit"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks unit tests as quick, except slow ones. Other tests have it in their own file."""
    for item in items:
        if item.path.is_relative_to(UNIT_TESTS) and not item.get_closest_marker("slow"):
            item.add_marker("quick")


@pytest.fixture(scope="session", autouse=True)
def two_logical_cpus() -> None:
    """Divides the CPU into two logical devices, which stand in for two GPUs.

    This must happen before TensorFlow's first op. It does nothing if no test imports TensorFlow.
    """
    if "tensorflow" not in sys.modules:
        return
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.fixture(scope="module")
def train_once(tmp_path_factory: pytest.TempPathFactory) -> "TrainOnce":
    """As `train` without a directory: equal commands of a module share a run."""
    from tests.cluster.runs import train

    @functools.cache
    def run(topology: str, *flags: str) -> "Run":
        return train(topology, tmp_path_factory.mktemp(topology) / "run", *flags)

    return run


@pytest.fixture(scope="session")
def digits() -> Path:
    from tests.cluster import runs

    return runs.digits()


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NUM_NUMBERED records in each split, each of which holds its number."""
    import tensorflow as tf

    from tests.cluster.runs import NUM_NUMBERED
    from tests.shards import write_shards

    def example(number: int) -> bytes:
        feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
        features = tf.train.Features(feature={"number": feature})
        serialized: bytes = tf.train.Example(features=features).SerializeToString()
        return serialized

    directory = tmp_path_factory.mktemp("numbered")
    for split in ("train", "test"):
        examples = map(example, range(NUM_NUMBERED))
        write_shards(examples, str(directory), "numbered", split, 2, NUM_NUMBERED)
    return directory
