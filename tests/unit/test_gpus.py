from pathlib import Path

import pytest
import tensorflow as tf

from data.system.errors import UsageError
from strategies import gpus
from strategies.cluster.gpus import choose_gpus, gpus_of_host
from strategies.cluster.tf_config import Cluster, Task
from strategies.gpus import capability_note, memory_limits
from strategies.transfer import Transfer

# Host a has two workers, host b one.
MULTIWORKER = {"worker": {0: "a:1", 1: "a:2", 2: "b:1"}, "evaluator": {0: "a:3"}}
LOCAL = {"worker": {0: "localhost:1", 1: "localhost:2", 2: "localhost:3"}}
PS = {"chief": {0: "a:1"}, "worker": {0: "a:2", 1: "a:3", 2: "b:1"}, "ps": {0: "a:4"}}
OF_SLURM = {"SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("jobs", "task", "listed", "others", "chosen"),
    [
        # Slurm has given all tasks of a host the same list: as many for each worker of all hosts.
        (MULTIWORKER, "worker-0", "0,1,2,3,4", OF_SLURM, "0,1"),
        (MULTIWORKER, "worker-1", "0,1,2,3,4", OF_SLURM, "2,3"),
        (MULTIWORKER, "worker-2", "0,1,2,3,4", OF_SLURM, "0,1"),
        (MULTIWORKER, "worker-1", "2,3", {**OF_SLURM, "SLURM_TRES_PER_TASK": "cpu=8"}, "3"),
        (MULTIWORKER, "worker-1", "2,3", {**OF_SLURM, "SLURM_GPU_BIND": "none"}, "3"),
        # Slurm has chosen for each task.
        (MULTIWORKER, "worker-1", "2,3", {**OF_SLURM, "SLURM_GPUS_PER_TASK": "2"}, "2,3"),
        (MULTIWORKER, "worker-1", "2,3", {**OF_SLURM, "SLURM_TRES_PER_TASK": "gres/gpu:2"}, "2,3"),
        (MULTIWORKER, "worker-1", "2,3", {**OF_SLURM, "SLURM_GPU_BIND": "closest"}, "2,3"),
        # A user's list for this task.
        (MULTIWORKER, "worker-1", "2,3", {}, "2,3"),
        (MULTIWORKER, "evaluator-0", "0,1,2", {}, "2"),
        # A local cluster; names as MIG has them, and what CUDA ignores; fewer GPUs than tasks.
        (LOCAL, "worker-1", "MIG-x, MIG-y,MIG-z,-1,4", {}, "MIG-y"),
        (LOCAL, "worker-2", "0,1", {}, "0"),
        (LOCAL, "worker-1", "5", {}, "5"),
        (LOCAL, "worker-0", "-1", {}, "-1"),
        (LOCAL, "worker-0", "", {}, ""),
        # One for each worker of ps; the others take none.
        (PS, "worker-0", "0,1,2,3", OF_SLURM, "0"),
        (PS, "worker-1", "0,1,2,3", OF_SLURM, "2"),
        (PS, "worker-1", "2,3", {}, "2"),
        (PS, "chief-0", "0,1", OF_SLURM, "0,1"),
        (PS, "chief-0", "0,1", {}, "0,1"),
    ],
)
def test_tasks_of_a_host_divide_its_gpus(
    jobs: dict[str, dict[int, str]], task: str, listed: str, others: dict[str, str], chosen: str
) -> None:
    job, index = task.split("-")
    env = {**others, "CUDA_VISIBLE_DEVICES": listed}
    cluster = Cluster(jobs, Task(job, int(index)))
    choose_gpus(cluster, is_launched=jobs is LOCAL, env=env)
    assert env == {**others, "CUDA_VISIBLE_DEVICES": chosen}


@pytest.mark.parametrize(
    ("jobs", "listed", "gpus_of"),
    [
        (LOCAL, "4,5,6", {"worker 0": ["4"], "worker 1": ["5"], "worker 2": ["6"]}),
        (LOCAL, "-1", {}),
        (PS, "0,1,2", {"worker 0": ["0"], "worker 1": ["1"]}),
    ],
)
def test_check_tells_the_gpus_of_each_task_of_this_host(
    jobs: dict[str, dict[int, str]], listed: str, gpus_of: dict[str, list[str]]
) -> None:
    env = {**OF_SLURM, "CUDA_VISIBLE_DEVICES": listed}
    cluster = Cluster(jobs, Task("worker", 0))
    assert gpus_of_host(cluster, is_launched=jobs is LOCAL, env=env) == gpus_of


@pytest.mark.parametrize("communication", ["auto", "nccl"])
def test_type_that_nccl_does_not_sum_is_refused(communication: str) -> None:
    for dtype in ("float32", "float16"):
        Transfer(communication, dtype).check_between_gpus()
    Transfer("ring", "bfloat16").check_between_gpus()
    with pytest.raises(UsageError, match="--wire_dtype=float16"):
        Transfer(communication, "bfloat16").check_between_gpus()


@pytest.mark.parametrize(
    ("found", "note"),
    [
        ((5, 2), "has compute capability 5.2, and TensorFlow needs 6.0 or more. Type --num_gpus=0"),
        ((6, 0), ""),
        ((8, 6), ""),
        ((9, 0), ""),
        ((10, 0), "--config.jit_compile=False"),
        ((12, 0), "newer than TensorFlow"),
        (None, ""),  # Unknown: AMD, for example.
    ],
)
def test_gpu_unknown_to_tensorflow_is_named(found: tuple[int, int] | None, note: str) -> None:
    built = tf.sysconfig.get_build_info()["cuda_compute_capabilities"]
    said = capability_note(found, [*built, "sm_90a", "unknown"])
    assert note in said
    assert bool(note) == bool(said)


def test_note_of_a_gpu_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"GPU:0": (9, 0), "GPU:1": (10, 0)}
    monkeypatch.setattr(
        tf.config.experimental,
        "get_device_details",
        lambda gpu: {"device_name": "B200", "compute_capability": found[gpu.name]},
    )
    devices = [tf.config.PhysicalDevice(name, "GPU") for name in found]
    (note,) = gpus.capability_notes(devices)
    assert note.startswith("GPU:1 (B200) has compute capability 10.0, which is newer")


@pytest.mark.parametrize(
    ("free_mib", "num_replicas", "limits"),
    [
        ([10_000], 2, [[4500, 4500]]),
        ([10_000, 20_000], 3, [[4500, 4500], [18_000]]),
        ([10_000, 20_000], 4, [[4500, 4500], [9000, 9000]]),
    ],
)
def test_replicas_are_divided_among_the_free_memory_of_gpus_or_are_refused(
    free_mib: list[int], num_replicas: int, limits: list[list[int]]
) -> None:
    assert memory_limits(free_mib, num_replicas) == limits
    with pytest.raises(UsageError, match=r"--replicas=8 on 2 GPU\(s\) leaves 450 MiB"):
        memory_limits([2000, 80_000], 8)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the only program that is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "nvidia-smi"


def test_free_memory_is_what_nvidia_smi_prints(nvidia_smi: Path) -> None:
    nvidia_smi.write_text('#!/bin/sh\ntest "$1" = --id=0,GPU-x && echo 24000 && echo 18000\n')
    nvidia_smi.chmod(0o700)
    assert gpus._free_mib(["0", "GPU-x"]) == [24000, 18000]


@pytest.mark.parametrize("command", ["echo N/A; echo 1", "echo 1", "exit 9", None])
def test_unknown_free_memory_is_refused(command: str | None, nvidia_smi: Path) -> None:
    if command:
        nvidia_smi.write_text(f"#!/bin/sh\n{command}\n")
        nvidia_smi.chmod(0o700)
    with pytest.raises(UsageError, match=r"(?s)--id=0,MIG-x .* does not print it .*--num_gpus=0"):
        gpus._free_mib(["0", "MIG-x"])


def test_peaks_are_those_of_the_gpus_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = (f"/job:{job}/replica:0/task:0/device:GPU:0" for job in ("localhost", "worker"))

    def memory_info(device: str) -> dict[str, int]:
        if device == there:
            raise ValueError("no device of this process")
        return {"current": 1, "peak": 5}

    devices = [tf.config.LogicalDevice(name, "GPU") for name in (here, there)]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: devices)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", memory_info)
    assert gpus.peak_bytes() == {"GPU:0": 5}
