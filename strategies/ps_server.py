"""Worker and ps tasks: TensorFlow's servers, from their start to the end that the chief gives them.

serve(cluster, chief_timeout_secs=600, on_gone=end)     # in worker and ps tasks; never returns
start_server(cluster)                                   # worker 0, where no chief is named
end_server(task)                                        # in the chief
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from strategies.cluster import Cluster, ClusterError, Task
from strategies.peers import watch_chief

log = logging.getLogger(__name__)

# Until the process ends: TensorFlow's servers cannot be stopped, and say so when they are dropped.
_KEPT: list[Any] = []


def start_server(cluster: Cluster) -> Any:
    """Serves as this task from now on, on threads of TensorFlow's; returns the tf Server.

    Raises:
        ClusterError: the port was taken since `check_own_address` looked at it.
    """
    # The chief brings its own address along when it connects.
    jobs = {task.job: dict(cluster.jobs[task.job]) for task in cluster.trainers}
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(jobs),
            job_name=cluster.task.job,
            task_index=cluster.task.index,
            protocol="grpc",
        )
    except tf.errors.OpError as error:
        raise ClusterError(f"{cluster.task} cannot serve at {cluster.address}: {error}") from error
    _KEPT.append(server)
    log.info("%s serves at %s", cluster.task, cluster.address)
    return server


def serve(
    cluster: Cluster, chief_timeout_secs: float | None, on_gone: Callable[[str], None]
) -> NoReturn:
    """Serves as this task, until the chief ends this process with code 0.

    If the chief cannot be reached for `chief_timeout_secs`, `on_gone` is called with a message, on
    another thread; None waits for ever.
    """
    server = start_server(cluster)
    if chief_timeout_secs is not None:
        watch_chief(cluster, chief_timeout_secs, on_gone)
    server.join()
    raise AssertionError("tf.distribute.Server.join returned")


def end_server(task: Task) -> None:
    """Ends `task` with exit code 0. It answers no more, so the call itself never succeeds."""
    # Eagerly: inside a tf.function the op would be pruned away.
    with (
        contextlib.suppress(tf.errors.OpError),
        tf.device(f"/job:{task.job}/replica:0/task:{task.index}/device:CPU:0"),
    ):
        tf.raw_ops.Abort(error_msg="the chief is done", exit_without_error=True)
