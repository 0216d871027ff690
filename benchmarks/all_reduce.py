"""`python -m benchmarks.all_reduce`: how fast the transport of --strategy=multiworker sums.

    python -m benchmarks.all_reduce --mb=10

Two processes of one thread each sum MB megabytes of float32 over a ring, again and again in one
graph, as a step of the program does with more than 1 MiB; what is smaller two workers exchange
(strategies/exchange.py). Prints one JSON line at the end.
"""

import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from benchmarks.peers.common import print_result, run_tasks
from data.flags import parse_flags
from strategies.cluster import parse_hosts
from strategies.ports import free_ports

_MB = flags.DEFINE_integer("mb", 10, "Millions of bytes summed at a time.", lower_bound=1)
_WORKERS = flags.DEFINE_integer("workers", 2, "Processes.", lower_bound=2)

# Bytes that are summed in all, however many at a time.
_TOTAL_MB = 3000


def work(job: str, index: int, answer: Any, addresses: str, mb: int) -> None:
    """One process."""
    from trainer.start import keep_freed_memory, set_environment

    set_environment()
    keep_freed_memory()

    import tensorflow as tf

    from strategies.multiworker import MultiWorkerExecutor
    from strategies.wire import Wire

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    cluster = parse_hosts({job: addresses}, job, index, "multiworker")
    executor = MultiWorkerExecutor.connect(cluster, "ring", 60.0)
    strategy, wire = executor.strategy, Wire()

    @tf.function
    def run(num_times: Any) -> Any:
        # The sum of zeros is zero: nothing else need be done between two of them.
        summed = strategy.run(lambda: tf.zeros([mb * 250_000]))
        for _ in tf.range(num_times):
            # What a loop carries is on no device, and an all-reduce asks for one.
            summed = strategy.run(lambda t: wire.all_reduced([tf.identity(t)])[0], args=(summed,))
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
