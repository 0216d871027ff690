"""Flags, data and processes of the peers. Needs only NumPy, so it runs in PyTorch's environment.

Each peer runs as `python -m benchmarks.peers.NAME ...` and prints one JSON line at its end. Its
data is in memory, shuffled once, and its batches are slices: the fastest input that is possible.
"""

import argparse
import gzip
import json
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]

# The files of the project that define the networks.
CONFIGS = {
    "mlp": "configs/mnist_replica.py",
    "cnn": "benchmarks/lenet.py",
    "resnet20": "configs/cifar10_resnet.py",
}


def parser(description: str | None, batch_size: int) -> argparse.ArgumentParser:
    """The flags of every peer. PyTorch's environment has no absl."""
    flags = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--mnist_source", help="Directory with the IDX files of MNIST.")
    flags.add_argument("--batch_size", type=int, default=batch_size, help="Examples a step.")
    flags.add_argument("--steps", type=int, default=2000, help="Steps to measure.")
    flags.add_argument(
        "--warmup_steps", type=int, default=500, help="Steps before the measurement."
    )
    return flags


def load_mnist(directory: str) -> Arrays:
    """The training examples, shuffled: images float32 [60000, 784] in [0, 1], labels [60000]."""
    images = _bytes_of(directory, "train-images-idx3-ubyte")[16:].reshape(-1, 784)
    labels = _bytes_of(directory, "train-labels-idx1-ubyte")[8:]
    order = np.random.default_rng(0).permutation(len(labels))
    return images[order].astype(np.float32) / np.float32(255), labels[order].astype(np.int64)


def _bytes_of(directory: str, name: str) -> npt.NDArray[np.uint8]:
    path = Path(directory, name)
    content = (
        path.read_bytes()
        if path.exists()
        else gzip.decompress(path.with_name(f"{name}.gz").read_bytes())
    )
    return np.frombuffer(content, np.uint8)


def random_images(number: int) -> Arrays:
    """Random images, for models whose rate does not depend on them."""
    random = np.random.default_rng(0)
    return random.random((number, 784), np.float32), random.integers(0, 10, number)


def batches_of(arrays: Arrays, batch_size: int) -> Arrays:
    """The examples in full batches: images [number, B, ...], labels [number, B]."""
    images, labels = arrays
    num_used = len(labels) // batch_size * batch_size
    return (
        images[:num_used].reshape(-1, batch_size, *images.shape[1:]),
        labels[:num_used].reshape(-1, batch_size),
    )


class Window:
    """The rate of the steps after the warm-up.

    window = Window(options)
    while not window.is_over(step_done()): ...
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Begins at the first step from `warmup_steps` on, ends `steps` later."""
        self._first, self._steps = options.warmup_steps, options.steps
        self._began: tuple[int, float] | None = None
        self.rate = 0.0

    def is_over(self, step: int) -> bool:
        """Whether `step` steps are all; call it after each of them, or of some."""
        now = time.perf_counter()
        if self._began is None:
            if step >= self._first:
                self._began = step, now
            return False
        first, began = self._began
        if step < first + self._steps:
            return False
        self.rate = (step - first) / (now - began)
        return True


def run_tasks(target: Callable[..., None], tasks: Sequence[tuple[str, int]], *args: Any) -> float:
    """Runs `target(job, index, answer, *args)` in a process each; the first that is answered.

    `answer` is the writing end of a pipe. The processes are ended then.

    Raises:
        RuntimeError: a process ended before, with another exit code than 0.
    """
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    processes = [
        context.Process(target=target, args=(job, index, writer, *args), daemon=True)
        for job, index in tasks
    ]
    try:
        for process in processes:
            process.start()
        while True:
            running = [process.sentinel for process in processes if process.is_alive()]
            multiprocessing.connection.wait([reader, *running])
            if reader.poll():
                return float(reader.recv())
            failed = [process.exitcode for process in processes if process.exitcode]
            if failed or not running:
                raise RuntimeError(f"A task ended with exit code {failed or 0} before the rate")
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def print_result(name: str, value: float) -> None:
    """Prints the JSON line."""
    print(json.dumps({name: value}), flush=True)
