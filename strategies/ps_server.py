"""Worker and ps tasks: TensorFlow's servers, from their start to the end that the chief gives them.

serve(cluster, 0, chief_timeout_secs=600, on_gone=end, on_end=end_with) # never returns
start_server(cluster, num_threads)  # worker 0, where no chief is named
ask_chief_to_stop(cluster)          # in a worker or ps task that is to end
listen_for_stop(cluster, on_stop)   # in the chief: hears the latter
end_servers(cluster, tasks, 0)      # in the chief
"""

import concurrent.futures
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from data.cores import num_cores
from strategies.cluster import Cluster, ClusterError, Task
from strategies.mailbox import Mailbox
from strategies.peers import watch_chief

log = logging.getLogger(__name__)

# For one message. On a busy machine a server may take its time.
_MESSAGE_SECS = 5.0
# For the first: a server answers before it has said what it runs.
_START_SECS = 60.0
# How long a chief that is there takes to hear.
_HEAR_SECS = 5.0
_LOOK_SECS = 0.1
_FAREWELL_SECS = 0.2

# A closure holds one of these threads until its end, and does not get there if no other one is left
# to run its ops. A second closure, of a chief that is no more, may hold one beside it.
_MIN_THREADS_BETWEEN_OPS = 4

# Until the process ends: TensorFlow's servers cannot be stopped, and say so when they are dropped.
_KEPT: list[Any] = []

_END = "end"
_VERSIONS = "versions"
_MOST_AT_ONCE = 32


def start_server(cluster: Cluster, num_threads: int = 0) -> Any:
    """Serves as this task from now on, on threads of TensorFlow's; returns the tf Server.

    An op has `num_threads`; 0 are as many as there are cores. So many ops run beside each other,
    or four. (Of tf.config.threading servers know nothing.)

    Raises:
        ClusterError: the port was taken since `check_own_address` looked at it.
    """
    between_ops = max(_MIN_THREADS_BETWEEN_OPS, num_threads or num_cores())
    # The chief brings its own address along when it connects.
    jobs = {task.job: dict(cluster.jobs[task.job]) for task in cluster.trainers}
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(jobs),
            job_name=cluster.task.job,
            task_index=cluster.task.index,
            protocol="grpc",
            config=tf.compat.v1.ConfigProto(
                intra_op_parallelism_threads=num_threads,
                inter_op_parallelism_threads=between_ops,
            ),
        )
    except tf.errors.OpError as error:
        raise ClusterError(f"{cluster.task} cannot serve at {cluster.address}: {error}") from error
    _KEPT.append(server)
    log.info("%s serves at %s", cluster.task, cluster.address)
    return server


def serve(
    cluster: Cluster,
    num_threads: int,
    chief_timeout_secs: float | None,
    *,
    versions: Mapping[str, str],
    on_gone: Callable[[str], None],
    on_end: Callable[[int], None],
) -> NoReturn:
    """`start_server`, until the chief says with which exit code to end: then `on_end` ends it.

    If the chief cannot be reached for `chief_timeout_secs`, `on_gone` is called with a message;
    None waits for ever. Both are called on another thread. `versions` are what this task runs.
    """
    server = start_server(cluster, num_threads)
    Mailbox(cluster, cluster.task, _VERSIONS).put(json.dumps(dict(versions)), _START_SECS)
    if chief_timeout_secs is not None:
        watch_chief(cluster, chief_timeout_secs, on_gone)

    def wait_for_end() -> None:
        exit_code = int(Mailbox(cluster, cluster.task, _END).take())
        time.sleep(_FAREWELL_SECS)  # Or the chief would not hear that the message was taken.
        on_end(exit_code)

    threading.Thread(target=wait_for_end, name="end", daemon=True).start()
    server.join()
    raise AssertionError("tf.distribute.Server.join returned")


def check_versions(cluster: Cluster, tasks: Sequence[Task], versions: Mapping[str, str]) -> None:
    """Returns if each of `tasks` runs the same `versions` as this one, the chief.

    Raises:
        ClusterError: one does not; says in what.
        tf.errors.OpError: one cannot be reached.
    """

    def ask(task: Task) -> dict[str, str]:
        mailbox = Mailbox(cluster, task, _VERSIONS)
        text = mailbox.take(_START_SECS)
        mailbox.put(text, _MESSAGE_SECS)  # For the chief that may come after this one.
        theirs: dict[str, str] = json.loads(text)
        return theirs

    with concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        for task, theirs in zip(tasks, pool.map(ask, tasks), strict=True):
            different = [
                f"{name} ({theirs.get(name)} there, {versions.get(name)} here)"
                for name in sorted({*versions, *theirs})
                if theirs.get(name) != versions.get(name)
            ]
            if different:
                raise ClusterError(
                    f"{task} ({cluster.address_of(task)}) and {cluster.task} differ in "
                    f"{', '.join(different)}. Install the same everywhere, and start them again."
                )


def end_servers(cluster: Cluster, tasks: Sequence[Task], exit_code: int) -> list[Task]:
    """Ends each of `tasks` with `exit_code`; returns those that did not hear of it."""

    def end(task: Task) -> bool:
        return Mailbox(cluster, task, _END).put(str(exit_code), _MESSAGE_SECS)

    # At once, as each may take its time.
    with concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        heard = list(pool.map(end, tasks))
    return [task for task, has_heard in zip(tasks, heard, strict=True) if not has_heard]


def ask_chief_to_stop(cluster: Cluster) -> bool:
    """Asks for the end of the run, its state saved; whether there is a chief who has heard it."""
    mailbox = _stop_mailbox(cluster)
    if not mailbox.put(str(cluster.task), _MESSAGE_SECS):
        return False
    deadline = time.monotonic() + _HEAR_SECS
    try:
        while time.monotonic() < deadline:
            if not mailbox.size(_MESSAGE_SECS):
                return True
            time.sleep(_LOOK_SECS)
        # Or the next chief would hear it.
        mailbox.clear(_MESSAGE_SECS)
    except tf.errors.OpError:  # The ps that keeps it is gone, and so is the run.
        pass
    return False


def listen_for_stop(cluster: Cluster, on_stop: Callable[[str], None]) -> None:
    """In the chief: calls `on_stop` with the name of each task that asks, on another thread.

    Returns at once.

    Raises:
        tf.errors.OpError: ps 0 cannot be reached.
    """
    mailbox = _stop_mailbox(cluster)
    mailbox.clear(_MESSAGE_SECS)  # What a former chief did not hear.

    def listen() -> None:
        with contextlib.suppress(tf.errors.OpError):  # The executor finds out itself.
            while True:
                on_stop(mailbox.take())

    threading.Thread(target=listen, name="stop", daemon=True).start()


def _stop_mailbox(cluster: Cluster) -> Mailbox:
    """Kept by the first ps: a server knows that one's address, and not always the chief's."""
    return Mailbox(cluster, Task("ps", min(cluster.jobs["ps"])), "stop")
