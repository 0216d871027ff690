import pytest
import tensorflow as tf

from strategies.cluster.tf_config import Cluster, Task
from strategies.gpus import DeviceError, capability_note, choose_gpus, refuse_wire_dtype
from strategies.transfer import Transfer

# Two hosts, of which the first has three tasks.
MULTIWORKER = {"worker": {0: "a:1", 1: "a:2", 2: "b:1"}, "evaluator": {0: "a:3"}}
PS = {"chief": {0: "a:1"}, "worker": {0: "a:2", 1: "a:3", 2: "b:1"}, "ps": {0: "a:4"}}


@pytest.mark.parametrize(
    ("jobs", "task", "env", "wanted", "chosen"),
    [
        # As many for each task of the host; the rest stays free.
        (MULTIWORKER, "worker-0", {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}, None, "0,1"),
        (MULTIWORKER, "worker-1", {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}, None, "2,3"),
        (MULTIWORKER, "evaluator-0", {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}, None, "4,5"),
        (MULTIWORKER, "worker-2", {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None, "0,1,2,3"),
        # A list of names, as MIG has them, and what CUDA ignores.
        (
            MULTIWORKER,
            "worker-1",
            {"CUDA_VISIBLE_DEVICES": "MIG-x, MIG-y,MIG-z,-1,4"},
            None,
            "MIG-y",
        ),
        # More tasks than GPUs: they share.
        (MULTIWORKER, "worker-1", {"CUDA_VISIBLE_DEVICES": "5"}, None, "5"),
        (MULTIWORKER, "evaluator-0", {"CUDA_VISIBLE_DEVICES": "0,1"}, None, "0"),
        (MULTIWORKER, "worker-0", {"CUDA_VISIBLE_DEVICES": "-1"}, None, "-1"),
        (MULTIWORKER, "worker-0", {"CUDA_VISIBLE_DEVICES": ""}, None, ""),
        # A list of this task's own.
        (MULTIWORKER, "worker-1", {"CUDA_VISIBLE_DEVICES": "2,3"}, 2, "2,3"),
        (
            MULTIWORKER,
            "worker-1",
            {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_PER_TASK": "2"},
            None,
            "2,3",
        ),
        # One for each worker of ps; the others take none.
        (PS, "worker-0", {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None, "0"),
        (PS, "worker-1", {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None, "2"),
        (PS, "worker-2", {"CUDA_VISIBLE_DEVICES": "0,1"}, None, "0"),
        (PS, "chief-0", {"CUDA_VISIBLE_DEVICES": "0,1"}, None, "0,1"),
    ],
)
def test_tasks_of_a_host_divide_its_gpus(
    jobs: dict[str, dict[int, str]],
    task: str,
    env: dict[str, str],
    wanted: int | None,
    chosen: str,
) -> None:
    job, index = task.split("-")
    cluster, found = Cluster(jobs, Task(job, int(index))), dict(env)
    choose_gpus(cluster, is_ps="ps" in jobs, wanted=wanted, env=found)
    assert found == env | {"CUDA_VISIBLE_DEVICES": chosen}


@pytest.mark.parametrize("communication", ["auto", "nccl"])
def test_type_that_nccl_does_not_sum_is_refused(communication: str) -> None:
    for dtype in ("float32", "float16"):
        refuse_wire_dtype(Transfer(communication, dtype))
    refuse_wire_dtype(Transfer("ring", "bfloat16"))
    with pytest.raises(DeviceError, match="--wire_dtype=float16"):
        refuse_wire_dtype(Transfer(communication, "bfloat16"))


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
def test_gpu_that_this_tensorflow_does_not_know_is_named(
    found: tuple[int, int] | None, note: str
) -> None:
    said = capability_note(found, tf.sysconfig.get_build_info()["cuda_compute_capabilities"])
    assert note in said
    assert bool(note) == bool(said)
