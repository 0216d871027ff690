"""Training on one GPU: the same losses as on the CPU, little memory, and nothing lost."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from data.prepare.preparing import prepare
from tests.cluster.runs import Run, largest_difference, start, train
from tests.cluster.test_classics import write_cifar10

ONE = "mirrored-1"
IN_MEMORY = "--config.data.cache_bytes=1000000000"
# TensorFloat-32 would round the inputs of products to 10 bits.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
STEPS = 60
OF_TABLES = ("ResourceGather", "ResourceSparse", "ResourceScatter", "LookupTable", "Unique")


def flags(steps: int = STEPS) -> tuple[str, ...]:
    return (
        "--config=configs/digits.py",
        "--batch_size=60",
        f"--train_steps={steps}",
        "--config.log_every_steps=20",
        "--config.export=False",
    )


def losses(run: Run) -> list[float]:
    """The losses of training, of evaluation, and the accuracy of the latter."""
    training = {line["step"]: line["loss"] for line in run.metrics("train")}
    return [*training.values(), run.result["eval"]["loss"], run.result["eval"]["accuracy"]]


@pytest.fixture(scope="module")
def on_gpu(gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with default flags, on the GPU."""
    model_dir = tmp_path_factory.mktemp("gpu") / "run"
    return train(ONE, model_dir, *flags(), env=gpu | EXACT)


@pytest.mark.parametrize(
    ("topology", "flag"),
    [
        ("mirrored-1", "--num_gpus=0"),
        ("mirrored-1", IN_MEMORY),
        ("mirrored-1", "--config.jit_compile=True"),
        ("mirrored-1", "--config.jit_compile=False"),
        # NCCL refuses two processes on one GPU.
        ("multiworker-2", "--communication=ring"),
        ("ps-sync-3+1", "--wire_dtype=float32"),
    ],
)
def test_losses_are_those_of_one_process_on_the_gpu(
    topology: str, flag: str, on_gpu: Run, gpu: dict[str, str], tmp_path: Path
) -> None:
    run = train(topology, tmp_path / "run", *flags(), flag, env=gpu | EXACT)
    assert losses(run) == pytest.approx(losses(on_gpu), rel=5e-3)
    assert losses(run)[0] > 1.2 * losses(run)[2], "it has learned something"


@pytest.mark.parametrize(
    ("topology", "flag"),
    [
        ("mirrored-1", "--num_gpus=1"),
        ("mirrored-2", "--num_gpus=1"),
        ("multiworker-2", "--communication=ring"),
        ("ps-sync-3+1", "--num_gpus=1"),
    ],
)
def test_tables_are_on_the_cpu_and_have_the_rows_of_a_run_without_gpus(
    topology: str, flag: str, gpu: dict[str, str], tmp_path: Path
) -> None:
    words = ("--config=tests/cluster/configs/tables.py", "--batch_size=60")
    others = ("--train_steps=20", "--config.export=False", "--log_device_placement")
    run = train(topology, tmp_path / "run", *words, *others, flag, env=gpu | EXACT)
    alone = train(ONE, tmp_path / "alone", *words, *others, "--num_gpus=0")
    ours, theirs = run.variables(), alone.variables()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(ours[name], value, atol=1e-4, err_msg=name)
    placed = "\n".join(path.read_text() for path in run.model_dir.rglob("*placement.txt"))
    found = set(re.findall(r"^\S+: \((\w+)\): \S*device:([CG]PU):\d$", placed, re.M))
    assert {device for op, device in found if op.startswith(OF_TABLES)} == {"CPU"}
    assert ("MatMul", "GPU") in found


def test_resnet_has_the_losses_of_the_cpu(gpu: dict[str, str], tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    prepare("cifar10", str(tmp_path / "data"), str(tmp_path))
    words = (
        "--config=configs/cifar10_resnet.py",
        f"--data_dir={tmp_path / 'data'}",
        "--train_steps=6",
        "--batch_size=12",
        "--config.eval_batch_size=12",
        "--config.log_every_steps=2",
        "--config.export=False",
    )
    on_gpu, on_cpu = (
        train(ONE, tmp_path / flag, *words, flag, env=gpu | EXACT)
        for flag in ("--num_gpus=1", "--num_gpus=0")
    )
    assert losses(on_gpu)[:-1] == pytest.approx(losses(on_cpu)[:-1], rel=1e-3)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_16_bits_reach_nearly_the_same_loss(
    precision: str, on_gpu: Run, gpu: dict[str, str], tmp_path: Path
) -> None:
    words = (*flags(), f"--config.precision={precision}")
    run = train(ONE, tmp_path / "run", *words, env=gpu)
    assert losses(run) == pytest.approx(losses(on_gpu), rel=0.2)
    assert losses(run) != losses(on_gpu)


@pytest.mark.parametrize("placed", [IN_MEMORY, "--config.data.cache_bytes=0"])
def test_batches_go_to_the_gpu_as_bytes(placed: str, gpu: dict[str, str], tmp_path: Path) -> None:
    words = (*flags(steps=4), placed, "--log_device_placement")
    train(ONE, tmp_path / "run", *words, env=gpu)
    placement = (tmp_path / "run" / "placement.txt").read_text()
    in_loop = re.findall(r"^\S*while\S*: \((\w+)\): \S*device:([CG]PU):0$", placement, re.M)
    assert "GPU" in {device for _, device in in_loop}, "the loop computes on the GPU"
    assert ("Dequantize", "CPU") not in in_loop, "bytes would come back to the CPU for this op"


def test_two_logical_gpus_train_as_one(gpu: dict[str, str], tmp_path: Path) -> None:
    one, two = (
        train(
            name,
            tmp_path / name,
            *flags(),
            "--deterministic",
            "--config.jit_compile=False",
            env=gpu,
        )
        for name in ("mirrored-1", "mirrored-2")
    )
    assert "--replicas=2 on 1 GPU(s)" in two.stderr
    assert largest_difference(one.weights(), two.weights()) < 1e-5
    assert losses(one) == pytest.approx(losses(two), rel=1e-5)


def test_only_workers_take_memory_of_the_gpu_and_not_all_of_it(
    gpu: dict[str, str], tmp_path: Path
) -> None:
    before, total = (queried(f"--query-gpu=memory.{name}", gpu)[0] for name in ("used", "total"))
    words = (*flags(), "--train_steps=1000000")
    with start("ps-2+1", tmp_path / "run", *words, env=gpu) as process:
        process.wait_for_step(100)
        used = queried("--query-gpu=memory.used", gpu)[0]
        by_pid = dict(pairs(queried("--query-compute-apps=pid,used_memory", {})))
        pids = {
            name: process.task(name).pid for name in ("chief 0", "worker 0", "worker 1", "ps 0")
        } | {"launcher": process.popen.pid}
    assert 0 < used - before < total / 4
    if not by_pid:
        pytest.skip("nvidia-smi names no processes here; the memory of all together is small")
    found = {name for name, pid in pids.items() if pid in by_pid}
    assert found == {"worker 0", "worker 1"}


def queried(query: str, gpu: dict[str, str]) -> list[int]:
    """The numbers that nvidia-smi prints."""
    of = [f"--id={gpu['CUDA_VISIBLE_DEVICES']}"] if gpu else []
    command = ["nvidia-smi", *of, query, "--format=csv,noheader,nounits"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [int(word) for word in re.findall(r"\d+", printed)]


def pairs(numbers: list[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))
