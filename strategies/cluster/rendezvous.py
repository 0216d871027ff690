"""The workers of multiworker meet before TensorFlow connects them, and watch each other meanwhile.

    processes = wait_for_peers(cluster)
    with connecting(cluster, 150, on_lost, processes):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()

TensorFlow connects all workers in one call. It waits there without a message, and without an end if
a worker has died, or was started again and so waits for processes that are newer. So each process
has an id, and all agree on the ids before the call:

1. A process that waits sends its id to whoever connects to its port.
2. A process that has the ids of all others also sends a digest of them.
3. A process leaves when each other one has sent the same digest, or has left after its id was seen.

A process that dies may be started again. The next process at its address has another id: processes
that wait take the new id, and processes that have left end, to meet again.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from strategies.cluster.peers import (
    Identification,
    Identity,
    UnknownHostError,
    greeting_at,
    identify,
    port_of,
    wait_until_all_are_there,
)
from strategies.cluster.ports import held
from strategies.cluster.tf_config import Cluster, ClusterError, Task
from strategies.cluster.watching import silence_of, watch_peers

# The ids of the processes of other tasks.
Processes: TypeAlias = Mapping[Task, str]
# Returns a context that watches the other tasks of a cluster while TensorFlow connects them. Under
# ps there are no ids of processes.
Connecting: TypeAlias = Callable[[Cluster, Processes], contextlib.AbstractContextManager[None]]

# The first word of a greeting.
_PROGRAM = "tf-distribution-trainer"
_ID_BYTES = 8
_WATCH_SECS = 1.0
_LINGER_SECS = 3.0


class Greeting(NamedTuple):
    """What a process sends to whoever connects, while it waits for the others."""

    task: Task
    process: str
    generation: int | None = None  # Of an elastic cluster.
    met: str | None = None  # A digest of all processes, once this one has seen each of them.
    num_gpus: int = 0  # That this process uses.

    def encoded(self) -> bytes:
        """The bytes that `decoded` takes."""
        task, *others = self
        return json.dumps([_PROGRAM, task.job, task.index, *others]).encode()

    @classmethod
    def decoded(cls, sent: bytes) -> "Greeting | None":
        """The greeting in `sent`; None if another program has sent it."""
        with contextlib.suppress(ValueError, TypeError):  # Not JSON, or another value.
            program, job, index, *others = json.loads(sent)
            if program == _PROGRAM:
                return cls(Task(job, index), *others)
        return None


def digest_of(processes: Processes) -> str:
    """A digest that is equal in processes with equal `processes`."""
    lines = sorted(f"{task.job} {task.index} {process}" for task, process in processes.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[: 2 * _ID_BYTES]


def wait_for_peers(cluster: Cluster, num_gpus: int = 0) -> Processes:
    """Returns once this process and all other training tasks have met, with their ids.

    A process of an earlier start, which has not waited for this one, is not counted; in an elastic
    cluster neither is one of another generation. It ends when it sees that this task was started
    again (`connecting`), or when an all-reduce fails.

    Raises the errors of `wait_for_servers`, and ClusterError if a process uses another number of
    GPUs than `num_gpus`: TensorFlow needs the same number in all.
    """
    meeting = _Meeting(cluster, num_gpus)
    is_there = Identification(cluster, meeting.identify)
    with held(port_of(cluster.address), lambda: meeting.greeting().encoded()):
        while True:
            before = meeting.processes()
            wait_until_all_are_there(cluster, cluster.other_trainers, is_there)
            if meeting.processes() == before:
                meeting.check_gpus()
                return before


class _Meeting:
    """Which processes this one has seen. Several threads use it."""

    def __init__(self, cluster: Cluster, num_gpus: int = 0) -> None:
        self._cluster = cluster
        self._num_gpus = dict.fromkeys(cluster.trainers, 0) | {cluster.task: num_gpus}
        self._process = os.urandom(_ID_BYTES).hex()
        self._by_address = {cluster.address_of(task): task for task in cluster.other_trainers}
        self._seen: dict[Task, str] = {}

    def processes(self) -> Processes:
        return dict(self._seen)

    def greeting(self) -> Greeting:
        task = self._cluster.task
        processes = {**self._seen, task: self._process}
        has_seen_all = len(processes) > len(self._by_address)
        met = digest_of(processes) if has_seen_all else None
        num_gpus = self._num_gpus[task]
        return Greeting(task, self._process, self._cluster.generation, met, num_gpus)

    def check_gpus(self) -> None:
        """Raises ClusterError if the processes that were seen use different numbers of GPUs."""
        if len(numbers := set(self._num_gpus.values())) > 1:
            listed = ", ".join(f"{task}: {num}" for task, num in self._num_gpus.items())
            time.sleep(_LINGER_SECS)  # Other processes may not have seen this one.
            raise ClusterError(
                f"The workers use different numbers of GPUs ({listed}), but TensorFlow needs the "
                f"same number in all. Type --num_gpus={min(numbers)} in all of them, or set "
                "CUDA_VISIBLE_DEVICES."
            )

    def identify(self, address: str) -> Identity:
        """The task at `address`; None if nothing is there, or a process that has not met this one.

        The other values are as `peers.identify` returns them.
        """
        task = self._by_address[address]
        sent = greeting_at(address)
        if sent is None:
            return None
        greeting = Greeting.decoded(sent)
        if greeting is None:
            found = identify(address)
            # The server of a process that was not seen is of an earlier start.
            return None if found == task and task not in self._seen else found
        if greeting.generation != self._cluster.generation:
            self._seen.pop(task, None)
            return None
        if greeting.task != task:
            return greeting.task
        self._seen[task] = greeting.process
        self._num_gpus[task] = greeting.num_gpus
        own = self.greeting().met
        return task if own is not None and own == greeting.met else None


@contextlib.contextmanager
def connecting(
    cluster: Cluster, timeout_secs: float, on_lost: Callable[[str], None], processes: Processes
) -> Iterator[None]:
    """Within it, TensorFlow connects the tasks of `cluster`, which all have identified themselves.

    Calls `on_lost` with a message, on another thread, if another task does not answer for
    `timeout_secs` (0: never), if all do and the context lasts eight times as long, or if another
    process waits in the place of one of `processes`.
    """
    is_over = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(is_over.set)
        if processes:
            watch_restarts(cluster, processes, on_lost, is_over)
        if timeout_secs:
            watch_peers(cluster, timeout_secs, lambda t: on_lost(silence_of(cluster, [t])), is_over)
            limit_secs = 8 * timeout_secs  # The tasks may answer, and one lacks what another needs.
            message = (
                f"the tasks answer, but could not connect to each other for {limit_secs:.0f} s"
            )
            overdue = threading.Timer(limit_secs, on_lost, [message])
            overdue.daemon = True
            overdue.start()
            stack.callback(overdue.cancel)
        yield


def watch_restarts(
    cluster: Cluster, processes: Processes, on_lost: Callable[[str], None], is_over: threading.Event
) -> None:
    """Calls `on_lost` when another process than that in `processes` waits at a task's address.

    Returns immediately; the call comes on another thread. Ends when `is_over` is set.
    """

    def watch() -> None:
        while not is_over.wait(_WATCH_SECS):
            for task, process in processes.items():
                with contextlib.suppress(UnknownHostError):
                    greeting = Greeting.decoded(greeting_at(cluster.address_of(task)) or b"")
                    if greeting and greeting.process != process and not is_over.is_set():
                        on_lost(f"{task} was started again")
                        return

    threading.Thread(target=watch, name="watch restarts", daemon=True).start()
