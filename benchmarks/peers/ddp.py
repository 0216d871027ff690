"""PyTorch DistributedDataParallel over gloo: processes of one thread each.

    python -m benchmarks.peers.ddp --mnist_source=DIRECTORY_WITH_THE_IDX_FILES
    python -m benchmarks.peers.ddp --all_reduce_mb=10
    python -m benchmarks.peers.ddp --model=deep --rank=0 --address=10.0.0.1:2222

Trains the 784-100-10 perceptron with Adam at 0.01 (fused), or only sums N MB of float32
repeatedly. `--model=deep` trains the perceptron of benchmarks/deep.py with SGD on random images.
With `--rank` this process is one of the processes, and the others are on other hosts.
"""

import argparse
import itertools
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
    random_images,
    run_tasks,
)
from strategies.cluster.ports import free_ports

# Total of all sums, whatever the size of one sum.
_ALL_REDUCE_MB = 1000


def train(options: argparse.Namespace, rank: int) -> float:
    """Steps a second."""
    examples = options.batch_size // options.workers
    is_deep = options.model == "deep"
    arrays = random_images(2 * examples) if is_deep else load_mnist(options.mnist_source)
    images, labels = (torch.from_numpy(array) for array in batches_of(arrays, examples))
    torch.manual_seed(0)
    widths = [784, *[1024] * 12] if is_deep else [784, 100]
    hidden = [
        layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())
    ]
    network = nn.Sequential(*hidden, nn.Linear(widths[-1], 10))
    # The default bucket of 25 MB holds all gradients of the small model, which is best for it.
    model = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    if is_deep:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
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


def rate_of(rank: int, options: argparse.Namespace, address: str) -> float:
    """The rate of process `rank`, which meets the others at `address`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"tcp://{address}", rank=rank, world_size=options.workers
    )
    mb = options.all_reduce_mb
    rate = all_reduce(mb) if mb else train(options, rank)
    torch.distributed.barrier()
    return rate


def work(job: str, rank: int, answer: Any, options: argparse.Namespace, address: str) -> None:
    """Runs one process of a cluster on this machine."""
    rate = rate_of(rank, options, address)
    if rank == 0:
        answer.send(rate)
    torch.distributed.barrier()


def main() -> None:
    """Prints the rate."""
    flags = parser(__doc__, 200)
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--model", choices=("mlp", "deep"), default="mlp")
    flags.add_argument("--all_reduce_mb", type=int, default=0, help="No training: this many MB.")
    flags.add_argument("--rank", type=int, help="The rank of this process, with --address.")
    flags.add_argument("--address", help="host:port of rank 0.")
    options = flags.parse_args()
    if options.rank is None:
        tasks = [("worker", rank) for rank in range(options.workers)]
        rate = run_tasks(work, tasks, options, f"localhost:{free_ports(1)[0]}")
    else:
        rate = rate_of(options.rank, options, options.address)
    print_result("bytes_per_sec" if options.all_reduce_mb else "steps_per_sec", rate)


if __name__ == "__main__":
    main()
