"""Short messages between the chief and the servers of parameter servers, over TensorFlow itself.

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

import contextlib
import threading

import tensorflow as tf
from typing_extensions import override

from strategies.cluster.tf_config import Cluster, Task


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
