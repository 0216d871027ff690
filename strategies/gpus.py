"""The devices of a process, and how many replicas they carry.

    devices = replica_devices(0, use_gpus(None))        # ["GPU:0", "GPU:1"]

Both must be called before TensorFlow has initialised a device. `cluster/gpus.py` divides the GPUs
of a host among its tasks.
"""

import contextlib
import itertools
import logging
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence

import tensorflow as tf

from data.system.errors import UsageError
from data.system.extras import install_command

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
_LEAST_MIB = 512  # cuDNN and cuBLAS need some hundred for themselves.


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """The names of the GPUs that this process may use, as CUDA numbers them."""
    if (listed := env.get(VISIBLE)) is not None:
        names = [name.strip() for name in listed.split(",")]
        # CUDA ignores what follows an unknown name; "-1" and "" are used to hide all.
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))
    try:
        found = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    except OSError:
        found = []
    return [str(index) for index in range(len(found))]


def use_gpus(num_gpus: int | None) -> int:
    """Makes `num_gpus` of the visible GPUs usable (None: all); returns their number.

    Their memory is taken as it is needed.

    Raises:
        UsageError: there are fewer GPUs.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if num_gpus is not None:
        if num_gpus > len(gpus):
            raise UsageError(
                f"--num_gpus={num_gpus}, but TensorFlow sees {len(gpus)} GPU(s) here. "
                f"Use fewer, or install what NVIDIA's GPUs need: {install_command('cuda')}"
            )
        gpus = gpus[:num_gpus]
        tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        if not tf.config.get_logical_device_configuration(gpu):
            tf.config.experimental.set_memory_growth(gpu, True)
    for note in capability_notes(gpus):
        log.warning("%s", note)
    return len(gpus)


def capability_notes(gpus: Sequence[tf.config.PhysicalDevice]) -> list[str]:
    """What the user should know of `gpus`, each with its name."""
    built = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", [])
    notes = []
    for gpu in gpus:
        details = tf.config.experimental.get_device_details(gpu)
        if note := capability_note(details.get("compute_capability"), built):
            notes.append(f"{gpu.name} ({details.get('device_name', 'unknown')}) {note}")
    return notes


def capability_note(found: tuple[int, int] | None, built: Sequence[str]) -> str:
    """What the user should know of a GPU of compute capability `found`; "" if nothing.

    `built` are those of TensorFlow's build: "sm_89" has kernels, "compute_90" is compiled by the
    driver when a process starts.
    """
    # 8.9 is 89, and 12.0 is 120.
    known = [int(number) for name in built for number in re.findall(r"_(\d+)", name)]
    if not found or not known:
        return ""
    has = f"has compute capability {found[0]}.{found[1]}"
    if 10 * found[0] + found[1] < min(known):
        return f"{has}, and TensorFlow needs {min(known) / 10} or more. Type --num_gpus=0."
    if found[0] > max(known) // 10:
        return (
            f"{has}, which is newer than TensorFlow. Its kernels are compiled at the first start, "
            "which takes minutes. If XLA fails, type --config.jit_compile=False."
        )
    return ""


def peak_bytes() -> dict[str, int]:
    """The most memory that was in use so far on each GPU of this process, by its name: "GPU:0"."""
    peaks = {}
    for device in tf.config.list_logical_devices("GPU"):
        with contextlib.suppress(ValueError):  # Of a worker, which the chief of ps sees, too.
            peak = tf.config.experimental.get_memory_info(device.name)["peak"]
            peaks[device.name.rpartition("device:")[2]] = int(peak)
    return peaks


def replica_devices(num_replicas: int, num_gpus: int) -> list[str]:
    """The devices of this process's replicas; 0 replicas means one for each GPU, or one CPU.

    With more replicas than GPUs, each GPU is divided into logical GPUs; without GPUs, the CPU is.

    Raises:
        UsageError: the free memory of the GPUs is unknown, or too small for the replicas.
    """
    num_replicas = num_replicas or num_gpus or 1
    if 0 < num_gpus < num_replicas:
        _divide_gpus(num_replicas)
    elif num_replicas > 1 and not num_gpus:
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(num_replicas)]
        tf.config.set_logical_device_configuration(cpu, logical)
    return [f"{'GPU' if num_gpus else 'CPU'}:{i}" for i in range(num_replicas)]


def _divide_gpus(num_replicas: int) -> None:
    gpus = tf.config.get_visible_devices("GPU")
    if any(map(tf.config.get_logical_device_configuration, gpus)):
        return  # An earlier run in this process has divided them.
    limits = memory_limits(_free_mib(visible_gpus(os.environ)[: len(gpus)]), num_replicas)
    for gpu, of_gpu in zip(gpus, limits, strict=True):
        logical = [tf.config.LogicalDeviceConfiguration(memory_limit=mib) for mib in of_gpu]
        tf.config.set_logical_device_configuration(gpu, logical)
    log.warning(
        "--replicas=%d on %d GPU(s): replicas share a GPU, with %d MiB of memory or more for each. "
        "This tests the program with several replicas. It does not test NCCL, which cannot run "
        "inside one GPU, and it is not faster.",
        num_replicas,
        len(gpus),
        min(map(min, limits)),
    )


def memory_limits(free_mib: Sequence[int], num_replicas: int) -> list[list[int]]:
    """For each GPU, the memory limits of its logical GPUs in MiB; the replicas are divided evenly.

    `free_mib` is the free memory of each GPU. A tenth of it is left for CUDA and its libraries.

    Raises:
        UsageError: a logical GPU would have less than _LEAST_MIB.
    """
    each, remaining = divmod(num_replicas, len(free_mib))
    numbers = [each + (index < remaining) for index in range(len(free_mib))]
    limits = [
        [int(0.9 * free) // number] * number for free, number in zip(free_mib, numbers, strict=True)
    ]
    if (least := min(map(min, limits))) < _LEAST_MIB:
        raise UsageError(
            f"--replicas={num_replicas} on {len(free_mib)} GPU(s) leaves {least} MiB of memory for "
            f"a replica, which needs {_LEAST_MIB} MiB or more. Use fewer replicas, end other "
            "programs on the GPU (nvidia-smi shows them), or type --num_gpus=0."
        )
    return limits


def _free_mib(names: Sequence[str]) -> list[int]:
    """The free memory of the GPUs with these names. TensorFlow tells it too late."""
    query = ("--query-gpu=memory.free", "--format=csv,noheader,nounits")
    command = ["nvidia-smi", f"--id={','.join(names)}", *query]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        return [int(line) for _, line in zip(names, done.stdout.splitlines(), strict=True)]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(
            f"More --replicas than GPUs need the free memory of each GPU, but "
            f"{shlex.join(command)} does not print it ({error}). Use at most one replica a GPU, or "
            "--num_gpus=0 for replicas on the CPU."
        ) from error
