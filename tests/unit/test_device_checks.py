"""The doctor finds devices whose sums or copies are wrong. Logical CPUs stand in for GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from strategies.cluster.tf_config import Cluster, Task
from strategies.mirrored import MirroredExecutor
from tests.commands import run_python
from trainer.doctor.devices import check_devices, copies, known_vector, wrong_sums
from trainer.doctor.findings import device_findings
from trainer.doctor.table import text
from trainer.guards.run_lock import locked

CLUSTER = Cluster({"worker": {0: "a:2222"}}, Task("worker", 0))
DEVICES = ("CPU:0", "CPU:1")


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.Strategy:
    return MirroredExecutor.on(DEVICES).strategy


def test_right_sums_and_copies_have_no_finding(strategy: tf.distribute.Strategy) -> None:
    checked = check_devices(strategy)
    assert checked == {"replicas": 2, "wrong_sums": [], "copies": []}
    checked["copies"] = copies(DEVICES)
    assert list(device_findings(checked, CLUSTER)) == []
    printed = text({}, CLUSTER, [], checked)
    assert "over 2 replicas was right here" in printed
    pairs = [line.split()[:2] for line in printed.splitlines() if line.startswith("CPU")]
    assert pairs == [["CPU:0", "CPU:1"], ["CPU:1", "CPU:0"]]


@pytest.mark.parametrize("value", [1e6, float("nan")])
def test_vector_that_one_device_alters_is_found(
    value: float, strategy: tf.distribute.Strategy
) -> None:
    def altered(replica: Any) -> Any:
        vector = known_vector(replica)
        last = tf.one_hot(vector.shape[0] - 1, vector.shape[0], on_value=value)
        return tf.where(replica == 1, vector + last, vector)

    devices = wrong_sums(strategy, altered)
    assert devices == ["CPU:0", "CPU:1"]
    (finding,) = device_findings({"replicas": 2, "wrong_sums": devices}, CLUSTER)
    assert finding.address == "a:2222"
    for part in ("over 2 replicas is wrong on CPU:0, CPU:1", "NCCL_P2P_DISABLE=1", "ACS"):
        assert part in finding.text


@pytest.mark.slow
def test_error_of_the_devices_is_a_finding_beside_the_others(digits: Path, tmp_path: Path) -> None:
    flags = ("--replicas=2", "--num_gpus=1", "--json", f"--data_dir={digits}")
    with locked(str(tmp_path), 0.0, print):
        done = run_python("-m", "trainer.doctor", *flags, f"--model_dir={tmp_path}")
    assert done.returncode == 2, done.stderr
    printed = json.loads(done.stdout)
    first, *others = [finding["text"] for finding in printed["findings"]]
    assert "--num_gpus=1" in first
    assert any("is in use: " in text for text in others), others
    assert printed["tasks"]["worker 0"]["plan"]["memory_bytes"]


def test_copy_that_one_device_alters_is_found() -> None:
    def copied(vector: tf.Tensor) -> tf.Tensor:
        arrived = tf.identity(vector)
        return arrived + 1.0 if arrived.device.endswith("CPU:1") else arrived

    found = copies(DEVICES, copied)
    assert [pair["is_right"] for pair in found] == [False, True]
    (finding,) = device_findings({"copies": found}, CLUSTER)
    assert "a copy from CPU:0 to CPU:1 arrives with other values" in finding.text
