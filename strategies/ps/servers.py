"""Worker and ps tasks: TensorFlow's servers, from their start until the chief ends them.

    serve(cluster, 0, 600, num_gpus=0, op_threads=0, ...)      # never returns
    start_server(cluster, num_threads, num_gpus)    # in worker 0 of a cluster without a chief
    ask_chief_to_stop(cluster)          # in a worker or ps task that is asked to end
    report_loss(cluster, "no answer")   # in a worker that cannot continue

The chief calls check_versions, listen_for_stop, listen_for_losses and end_servers. The chief and
the servers send each other short messages, over TensorFlow itself:

    end = Mailbox(cluster, task, "end")         # a queue on the server of `task`
    end.put("75", timeout_secs=5)               # from any task that can connect to `task`
    text = end.take()                           # blocks

| mailbox | server | who puts | who takes |
| --- | --- | --- | --- |
| `end` | each worker and ps | the chief: the exit code to end with | that server |
| `stop` | ps 0 | a server that is asked to end | the chief |
| `losses` | each worker | that worker: why it ends | the chief |
| `versions` | each worker and ps | that server, and each chief again: its versions | each chief |

Each call has its own session. The server has no eager context of a chief that it could use; and in
the chief, an eager call that waits would block other eager calls.
"""

import concurrent.futures
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import tensorflow as tf
from typing_extensions import override

from data.system.cores import num_cores
from strategies.cluster.tf_config import Cluster, ClusterError, Task
from strategies.cluster.watching import watch_chief, watch_servers

log = logging.getLogger(__name__)

# The time-out of a message. A server on a busy machine may answer late.
_MESSAGE_SECS = 5.0
# The time-out of the first message: a server answers before it has sent its versions.
_START_SECS = 60.0
# How long it may take until a running chief has taken a message.
_TAKEN_SECS = 5.0
_POLL_SECS = 0.1
_LISTEN_AGAIN_SECS = 1.0
_SHUTDOWN_GRACE_SECS = 0.2

# A closure holds one of these threads until its end, and needs at least one more thread to run its
# ops. A second closure, of a chief that has died, may hold another thread.
_MIN_THREADS_BETWEEN_OPS = 4

# Until the process ends: TensorFlow cannot stop a server, and logs an error if one is deleted.
_KEEP_ALIVE: list[tf.distribute.Server] = []

_MAX_CONNECTIONS = 32


class Mailbox:
    """A queue of strings that lives as long as the process that serves it.

    Methods raise tf.errors.OpError if the server does not answer within `timeout_secs`.
    """

    def __init__(self, cluster: Cluster, server: Task, name: str) -> None:
        """The mailbox `name` of `server`, a worker or ps task of `cluster`; does not connect."""
        self._target = f"grpc://{cluster.address_of(server)}"
        # Without a filter the session would wait for all tasks that the server knows of.
        self._filter = f"/job:{server.job}/task:{server.index}"
        self._graph = tf.Graph()
        device = f"/job:{server.job}/replica:0/task:{server.index}/device:CPU:0"
        with self._graph.as_default(), tf.device(device):
            queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.string], shared_name=name)
            self._text = tf.compat.v1.placeholder(tf.string, [])
            self._put = tf.raw_ops.QueueEnqueueV2(handle=queue, components=[self._text])
            self._take = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.string])[0]
            self._size = tf.raw_ops.QueueSizeV2(handle=queue)

    def put(self, text: str, timeout_secs: float) -> bool:
        """Adds `text`; returns True once the server has received it.

        Returns False if the server has not answered within `timeout_secs`. The message may still
        arrive later.
        """
        is_received = threading.Event()

        def put() -> None:
            with contextlib.suppress(tf.errors.OpError), self._session(timeout_secs) as session:
                session.run(self._put, {self._text: text})
                is_received.set()

        # On a thread: closing a session waits for its server, which the message may have ended.
        threading.Thread(target=put, name="message", daemon=True).start()
        return is_received.wait(timeout_secs)

    def take(self, timeout_secs: float | None = None) -> str:
        """Waits for the next message; without a time-out it waits even if the server has ended."""
        with self._session(timeout_secs) as session:
            text: bytes = session.run(self._take)
        return text.decode()

    def size(self, timeout_secs: float) -> int:
        """The number of messages that were not taken yet."""
        with self._session(timeout_secs) as session:
            return int(session.run(self._size))

    def clear(self, timeout_secs: float) -> None:
        """Removes all messages."""
        with self._session(timeout_secs) as session:
            for _ in range(int(session.run(self._size))):
                session.run(self._take)

    def _session(self, timeout_secs: float | None) -> tf.compat.v1.Session:
        config = tf.compat.v1.ConfigProto(device_filters=[self._filter])
        if timeout_secs is not None:
            config.operation_timeout_in_ms = int(timeout_secs * 1000)
        return _Session(self._target, graph=self._graph, config=config)


class _Session(tf.compat.v1.Session):
    @override
    def close(self) -> None:
        """Raises no error if the server does not know the session: it has ended or was restarted.

        TensorFlow may call this in a thread, which would print a traceback.
        """
        with contextlib.suppress(tf.errors.OpError):
            super().close()


def start_server(
    cluster: Cluster, num_threads: int = 0, num_gpus: int = 0, op_threads: int | None = None
) -> tf.distribute.Server:
    """Serves as this task from now on, on TensorFlow's threads and the first `num_gpus` GPUs.

    An op uses `op_threads` threads, by default `num_threads`; 0 means one for each core. So many
    ops run at the same time as `num_threads` says, but at least four. (Servers ignore tf.config,
    also for their GPUs.)

    Raises:
        ClusterError: the port was taken after `check_own_address` had tested it.
    """
    between_ops = max(_MIN_THREADS_BETWEEN_OPS, num_threads or num_cores())
    # Without the chief: it sends its own address when it connects.
    jobs = {task.job: dict(cluster.jobs[task.job]) for task in cluster.trainers}
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(jobs),
            job_name=cluster.task.job,
            task_index=cluster.task.index,
            protocol="grpc",
            config=tf.compat.v1.ConfigProto(
                intra_op_parallelism_threads=num_threads if op_threads is None else op_threads,
                inter_op_parallelism_threads=between_ops,
                device_count={"GPU": num_gpus},
                # Otherwise a server takes all memory of each of its GPUs when it starts.
                gpu_options=tf.compat.v1.GPUOptions(allow_growth=True),
            ),
        )
    except tf.errors.OpError as error:
        raise ClusterError(f"{cluster.task} cannot serve at {cluster.address}: {error}") from error
    _KEEP_ALIVE.append(server)
    log.info("%s serves at %s", cluster.task, cluster.address)
    return server


def serve(
    cluster: Cluster,
    num_threads: int,
    chief_timeout_secs: float | None,
    *,
    num_gpus: int,
    op_threads: int,
    versions: Mapping[str, str],
    silence_secs: float,
    on_gone: Callable[[str], None],
    on_end: Callable[[int], None],
) -> NoReturn:
    """Calls `start_server`, and serves until the chief sends an exit code.

    `on_end` is called with this code, and must end the process. `on_gone` is called with a message
    if the chief cannot be reached for `chief_timeout_secs` (None means no limit), or if a ps cannot
    be reached for `silence_secs` from here, a worker (0 means no limit). Both are called on another
    thread. `versions` are the versions of this task.
    """
    server = start_server(cluster, num_threads, num_gpus, op_threads)
    Mailbox(cluster, cluster.task, "versions").put(json.dumps(dict(versions)), _START_SECS)
    if chief_timeout_secs is not None:
        watch_chief(cluster, chief_timeout_secs, on_gone)

    def leave_without(ps: Task) -> None:
        message = f"{ps} ({cluster.address_of(ps)}) does not answer {cluster.task}"
        report_loss(cluster, f"{message}: ending. The others continue without {cluster.task}.")
        on_gone(message)

    if silence_secs and cluster.task.job == "worker":
        watch_servers(cluster, silence_secs, leave_without)

    def wait_for_end() -> None:
        exit_code = int(Mailbox(cluster, cluster.task, "end").take())
        # Otherwise the chief would not learn that the message was taken.
        time.sleep(_SHUTDOWN_GRACE_SECS)
        on_end(exit_code)

    threading.Thread(target=wait_for_end, name="end", daemon=True).start()
    server.join()
    raise AssertionError("tf.distribute.Server.join returned")


def check_versions(cluster: Cluster, tasks: Sequence[Task], versions: Mapping[str, str]) -> None:
    """Returns if each of `tasks` runs the same `versions` as this task, the chief.

    Raises:
        ClusterError: a task runs other versions; the message names them.
        tf.errors.OpError: a task cannot be reached.
    """

    def ask(task: Task) -> dict[str, str]:
        mailbox = Mailbox(cluster, task, "versions")
        text = mailbox.take(_START_SECS)
        mailbox.put(text, _MESSAGE_SECS)  # For the next chief.
        theirs: dict[str, str] = json.loads(text)
        return theirs

    with concurrent.futures.ThreadPoolExecutor(_MAX_CONNECTIONS) as pool:
        for task, theirs in zip(tasks, pool.map(ask, tasks), strict=True):
            different = [
                f"{name} ({theirs.get(name)} there, {versions.get(name)} here)"
                for name in sorted({*versions, *theirs})
                if theirs.get(name) != versions.get(name)
            ]
            if different:
                raise ClusterError(
                    f"{task} ({cluster.address_of(task)}) and {cluster.task} differ in "
                    f"{', '.join(different)}. Install the same versions in all tasks, and start "
                    "them again."
                )


def end_servers(cluster: Cluster, exit_code: int) -> list[Task]:
    """Ends each other worker and ps with `exit_code`; returns the tasks that did not receive it."""

    def end(task: Task) -> bool:
        return Mailbox(cluster, task, "end").put(str(exit_code), _MESSAGE_SECS)

    tasks = cluster.other_trainers
    # In parallel, because each task may take seconds to answer.
    with concurrent.futures.ThreadPoolExecutor(_MAX_CONNECTIONS) as pool:
        are_received = pool.map(end, tasks)
        return [task for task, ok in zip(tasks, are_received, strict=True) if not ok]


def ask_chief_to_stop(cluster: Cluster) -> bool:
    """Asks the chief to save and end the run; returns True if a chief has received it."""
    mailbox = _stop_mailbox(cluster)
    if not mailbox.put(str(cluster.task), _MESSAGE_SECS):
        return False
    # If the ps that has the mailbox is lost, so is the run.
    with contextlib.suppress(tf.errors.OpError):
        if _is_emptied(mailbox):
            return True
        mailbox.clear(_MESSAGE_SECS)  # Otherwise the next chief would receive it.
    return False


def _is_emptied(mailbox: Mailbox) -> bool:
    """Waits a few seconds for the chief to take all messages; returns False if it does not."""
    deadline = time.monotonic() + _TAKEN_SECS
    while time.monotonic() < deadline:
        if not mailbox.size(_MESSAGE_SECS):
            return True
        time.sleep(_POLL_SECS)
    return False


def listen_for_stop(cluster: Cluster, on_stop: Callable[[str], None]) -> None:
    """In the chief: calls `on_stop` with the name of each task that asks, on another thread.

    Raises:
        tf.errors.OpError: ps 0 cannot be reached.
    """
    mailbox = _stop_mailbox(cluster)
    mailbox.clear(_MESSAGE_SECS)  # Requests to an earlier chief.

    def listen() -> None:
        with contextlib.suppress(tf.errors.OpError):  # The executor notices a lost ps itself.
            while True:
                on_stop(mailbox.take())

    threading.Thread(target=listen, name="stop", daemon=True).start()


def report_loss(cluster: Cluster, message: str) -> None:
    """In a worker that is about to end: waits a few seconds for the chief to log `message`."""
    # On this worker's own server, because it may not reach any other.
    mailbox = Mailbox(cluster, cluster.task, "losses")
    mailbox.put(message, _MESSAGE_SECS)
    with contextlib.suppress(tf.errors.OpError):
        _is_emptied(mailbox)
    time.sleep(_SHUTDOWN_GRACE_SECS)  # The answer to the chief is still on its way.


def listen_for_losses(cluster: Cluster) -> None:
    """In the chief: logs the messages of workers that end, on other threads."""

    def listen(worker: Task) -> None:
        mailbox = Mailbox(cluster, worker, "losses")
        while True:
            # The worker is lost itself if it does not answer.
            with contextlib.suppress(tf.errors.OpError):
                log.warning("%s: %s", worker, mailbox.take())
            time.sleep(_LISTEN_AGAIN_SECS)

    for index in cluster.jobs["worker"]:
        worker = Task("worker", index)
        threading.Thread(target=listen, args=[worker], name=f"hear {worker}", daemon=True).start()


def _stop_mailbox(cluster: Cluster) -> Mailbox:
    """On the first ps: servers know its address, but may not know the chief's."""
    return Mailbox(cluster, Task("ps", min(cluster.jobs["ps"])), "stop")
