"""`python -m benchmarks.all_reduce`: the rate at which --strategy=multiworker sums tensors.

    python -m benchmarks.all_reduce --mb=10

Two processes with one thread each sum MB megabytes of float32 over a ring, repeatedly in one graph,
as a training step does. Prints one JSON line at the end.
"""

import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from benchmarks.peers.common import print_result, run_tasks
from data.system.flags import parse_flags
from strategies.cluster.ports import free_ports
from strategies.cluster.tf_config import parse_hosts
from strategies.transfer import Transfer

_MB = flags.DEFINE_integer("mb", 10, "Millions of bytes summed at a time.", lower_bound=1)
_WORKERS = flags.DEFINE_integer(
    "workers", 2, "Workers of a cluster on this machine.", lower_bound=2
)

# Total of all sums, whatever the size of one sum.
_TOTAL_MB = 3000


def work(job: str, index: int, answer: Any, addresses: str, mb: int) -> None:
    """Runs one process."""
    from data.system.compat.freed_memory import keep_freed_memory
    from trainer.tf_setup import set_environment

    set_environment()
    keep_freed_memory()

    import tensorflow as tf

    from strategies.gradients.all_reduce import all_reduced
    from strategies.multiworker import MultiWorkerExecutor

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    cluster = parse_hosts({job: addresses}, job, index, "multiworker")
    executor = MultiWorkerExecutor.connect(cluster, Transfer("ring"))
    strategy = executor.strategy

    @tf.function
    def run(num_times: Any) -> Any:
        # The sum of zeros is zero, so the tensor needs no reset between two sums.
        summed = strategy.run(lambda: tf.zeros([mb * 250_000]))
        for _ in tf.range(num_times):
            # A loop variable has no device, and an all-reduce needs one.
            summed = strategy.run(lambda t: all_reduced([tf.identity(t)])[0], args=(summed,))
        return strategy.run(lambda t: t[0], args=(summed,))

    run(tf.constant(3))
    number = max(1, _TOTAL_MB // mb)
    began = time.perf_counter()
    run(tf.constant(number))
    secs = time.perf_counter() - began
    executor.close()
    if index == 0:
        answer.send(number * mb * 1e6 / secs)


def main(argv: Sequence[str]) -> None:
    """Prints the rate."""
    addresses = ",".join(f"localhost:{port}" for port in free_ports(_WORKERS.value))
    tasks = [("worker", index) for index in range(_WORKERS.value)]
    print_result("bytes_per_sec", run_tasks(work, tasks, addresses, _MB.value))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.all_reduce"))
