"""PyTorch DistributedDataParallel over gloo: processes of one thread each.

    python -m benchmarks.peers.ddp --mnist_source=DIRECTORY_WITH_THE_IDX_FILES
    python -m benchmarks.peers.ddp --all_reduce_mb=10

Trains the 784-100-10 perceptron with Adam at 0.01 (fused), or only sums N MB of float32
repeatedly.
"""

import argparse
import time
from typing import Any

import torch
import torch.distributed
from torch import nn

from benchmarks.peers.common import (
    Window,
    batches_of,
    load_mnist,
    parser,
    print_result,
    run_tasks,
)
from strategies.cluster.ports import free_ports

# Total of all sums, whatever the size of one sum.
_ALL_REDUCE_MB = 1000


def train(options: argparse.Namespace, rank: int) -> float:
    """Steps a second."""
    images, labels = (
        torch.from_numpy(array)
        for array in batches_of(
            load_mnist(options.mnist_source), options.batch_size // options.workers
        )
    )
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    # The default bucket of 25 MB holds all gradients, which is best for a small model.
    model = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    loss_of = nn.CrossEntropyLoss()
    window, done = Window(options), 0
    while not window.is_over(done):
        number = (done * options.workers + rank) % len(labels)
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(images[number]), labels[number]).backward()
        optimizer.step()
        done += 1
    return window.rate


def all_reduce(num_mb: int) -> float:
    """Bytes a second."""
    tensor = torch.zeros(num_mb * 250_000)
    for _ in range(3):
        torch.distributed.all_reduce(tensor)
    number = _ALL_REDUCE_MB // num_mb
    began = time.perf_counter()
    for _ in range(number):
        torch.distributed.all_reduce(tensor)
    return number * num_mb * 1e6 / (time.perf_counter() - began)


def work(job: str, rank: int, answer: Any, options: argparse.Namespace, port: int) -> None:
    """Runs one process."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"tcp://localhost:{port}", rank=rank, world_size=options.workers
    )
    mb = options.all_reduce_mb
    rate = all_reduce(mb) if mb else train(options, rank)
    torch.distributed.barrier()
    if rank == 0:
        answer.send(rate)
    torch.distributed.barrier()


def main() -> None:
    """Prints the rate."""
    flags = parser(__doc__, 200)
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--model", choices=("mlp",), default="mlp")
    flags.add_argument("--all_reduce_mb", type=int, default=0, help="No training: this many MB.")
    options = flags.parse_args()
    tasks = [("worker", rank) for rank in range(options.workers)]
    rate = run_tasks(work, tasks, options, free_ports(1)[0])
    print_result("bytes_per_sec" if options.all_reduce_mb else "steps_per_sec", rate)


if __name__ == "__main__":
    main()
