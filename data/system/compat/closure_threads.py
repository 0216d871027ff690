"""Gives each thread of a ClusterCoordinator its own executor, so that no worker blocks another.

    with own_executors():
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

After each closure, such a thread of TensorFlow 2.21 (`Closure.execute_on`) waits until the executor
that it had before has nothing to do. For all of them that is the executor of the process, which
also tells workers which tensors to free. A worker that does not answer that message (its host is
disconnected, or its process is stopped) would block the threads of all workers until it is given
up. Can be deleted when `context.executor_scope` no longer waits at its end.
"""

import contextlib
from collections.abc import Iterator

from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context, executor


@contextlib.contextmanager
def own_executors() -> Iterator[None]:
    """The threads that run closures, of a coordinator that is made within it, have executors."""
    worker_class = cluster_coordinator.Worker
    process_queue = worker_class._process_queue

    def with_executor(worker: cluster_coordinator.Worker) -> None:
        with context.executor_scope(executor.new_executor(enable_async=False)):
            process_queue(worker)

    worker_class._process_queue = with_executor
    try:
        yield
    finally:
        worker_class._process_queue = process_queue
