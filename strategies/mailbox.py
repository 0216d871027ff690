"""Short messages between the chief and the servers of parameter servers, over TensorFlow itself.

    end = Mailbox(cluster, task, "end")         # the queue `end`, kept by the server of `task`
    end.put("75", timeout_secs=5)               # from any task that reaches it
    text = end.take()                           # blocks

| mailbox | is kept by | who puts | who takes |
| --- | --- | --- | --- |
| `end` | each server | the chief: the exit code to end with | that server |
| `stop` | ps 0 | a server that is asked to end | the chief |
| `versions` | each server | that server, and again each chief: what it runs | each chief |

A mailbox is a queue on the server's device, as programs of TensorFlow 1 had them to end their
parameter servers. Each call has a session of its own, and not only because the server has no chief
whose eager context it could use: an eager call that waits would hold up the chief's others.
"""

import contextlib
import threading

import tensorflow as tf

from strategies.cluster import Cluster, Task


class Mailbox:
    """A queue of strings that lives as long as the process that serves it."""

    def __init__(self, cluster: Cluster, keeper: Task, name: str) -> None:
        """The mailbox `name` of `keeper`, a worker or ps task of `cluster`; connects to nobody."""
        self._target = f"grpc://{cluster.address_of(keeper)}"
        # Without a filter the session would wait for all tasks that the server knows of.
        self._filter = f"/job:{keeper.job}/task:{keeper.index}"
        self._graph = tf.Graph()
        device = f"/job:{keeper.job}/replica:0/task:{keeper.index}/device:CPU:0"
        with self._graph.as_default(), tf.device(device):
            queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.string], shared_name=name)
            self._text = tf.compat.v1.placeholder(tf.string, [])
            self._put = tf.raw_ops.QueueEnqueueV2(handle=queue, components=[self._text])
            self._take = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.string])[0]
            self._size = tf.raw_ops.QueueSizeV2(handle=queue)

    def put(self, text: str, timeout_secs: float) -> bool:
        """Adds `text`; whether the keeper took it in `timeout_secs`."""
        was_taken = threading.Event()

        def put() -> None:
            with contextlib.suppress(tf.errors.OpError), self._session(timeout_secs) as session:
                session.run(self._put, {self._text: text})
                was_taken.set()

        # On a thread, because a session waits at its close for a keeper whom the message has ended.
        threading.Thread(target=put, name="message", daemon=True).start()
        return was_taken.wait(timeout_secs)

    def take(self, timeout_secs: float | None = None) -> str:
        """Waits for the next message; without a time-out for ever, also if the keeper goes.

        Raises:
            tf.errors.OpError: the keeper cannot be reached, or there is none in `timeout_secs`.
        """
        with self._session(timeout_secs) as session:
            text: bytes = session.run(self._take)
        return text.decode()

    def size(self, timeout_secs: float) -> int:
        """How many messages nobody has taken.

        Raises:
            tf.errors.OpError: the keeper cannot be reached in `timeout_secs`.
        """
        with self._session(timeout_secs) as session:
            return int(session.run(self._size))

    def clear(self, timeout_secs: float) -> None:
        """Throws away what is there.

        Raises:
            tf.errors.OpError: the keeper cannot be reached in `timeout_secs`.
        """
        with self._session(timeout_secs) as session:
            for _ in range(int(session.run(self._size))):
                session.run(self._take)

    def _session(self, timeout_secs: float | None = None) -> tf.compat.v1.Session:
        config = tf.compat.v1.ConfigProto(device_filters=[self._filter])
        if timeout_secs is not None:
            config.operation_timeout_in_ms = int(timeout_secs * 1000)
        return tf.compat.v1.Session(self._target, graph=self._graph, config=config)
