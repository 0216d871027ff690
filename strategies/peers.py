"""Other tasks, before and beside TensorFlow's own connections to them: who is there, who is not.

    check_own_address(cluster)
    wait_for_servers(cluster, unknown_host_secs=60)     # in the chief of parameter servers
    wait_for_peers(cluster, unknown_host_secs=60)       # in a worker of multiworker

TensorFlow waits for tasks without a word, holds the interpreter while it does, so that no signal is
handled, and waits for ever for one that will not come: a host that does not exist, a port where
something else listens. All of that is found out here.
"""

import contextlib
import errno
import ipaddress
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Literal

import grpc

from strategies.cluster import Cluster, ClusterError, Task
from strategies.ports import bind, held

log = logging.getLogger(__name__)

_POLL_SECS = 0.2
_REPORT_SECS = 10.0
# What accepts connections and answers with other words is no TensorFlow server. What says nothing
# may be one, on a machine that is busy or has just begun.
_STRANGER_SECS = 10.0
_SILENT_SECS = 60.0
_ANSWER_SECS = 2.0

_GET_STATUS = "/tensorflow.WorkerService/GetStatus"


class UnknownHostError(OSError):
    """The name of a host that cannot be resolved, now."""


def check_own_address(cluster: Cluster) -> None:
    """Returns if a server of this process could listen on its own address, and nobody else does.

    Raises:
        ClusterError: another process uses the port, is this task, here or on another machine, or
            this user may not open the port.
    """
    task, address = cluster.task, cluster.address
    try:
        bind(port_of(address)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            _refuse_twin(cluster)
            raise ClusterError(
                f"{task} should serve at {address}, but port {port_of(address)} of this machine is "
                "in use. End the process that uses it "
                f"(`ss -tlnp 'sport = :{port_of(address)}'` shows it; it may be a former run), or "
                "give this task another port, on every task alike."
            ) from None
        if error.errno == errno.EACCES:
            raise ClusterError(
                f"{task} should serve at {address}, but this user may not open port "
                f"{port_of(address)}. Give this task a port of 1024 or more, on every task alike."
            ) from None
        raise
    _refuse_twin(cluster)


def wait_for_servers(cluster: Cluster, unknown_host_secs: float) -> None:
    """Returns once every worker and ps task of `cluster` has just said that it is that task.

    Meanwhile the chief answers those who watch for it.

    Raises:
        ClusterError: something else listens at an address, or another task, or the name of a host
            is unknown for `unknown_host_secs`.
    """
    servers = [task for task in cluster.trainers if task.job in ("worker", "ps")]
    strange_since: dict[Task, float] = {}
    patience_secs = {"stranger": _STRANGER_SECS, "silent": _SILENT_SECS}

    def is_there(task: Task) -> bool:
        address = cluster.address_of(task)
        answer = identify(address)
        if answer == task:
            return True
        if isinstance(answer, Task):
            raise ClusterError(
                f"{task} should serve at {address}, but {answer} of another cluster answers there. "
                f"Start {task} with the same addresses as this task, or correct the address."
            )
        if answer is None:
            strange_since.pop(task, None)
        elif _secs_since(strange_since, task) > patience_secs[answer]:
            raise ClusterError(
                f"{task} should serve at {address}, but what listens there is no TensorFlow "
                "server. Correct the address, or end what uses the port and start the task."
            )
        return False

    # A task without a port of its own to hold is a worker that serves already.
    port = port_of(cluster.address)
    with contextlib.nullcontext() if cluster.is_server else held(port):
        # Once more all of them: the first may have gone while the last was waited for.
        while _wait(cluster, servers, is_there, unknown_host_secs):
            pass


def wait_for_peers(cluster: Cluster, unknown_host_secs: float) -> None:
    """Returns once every other task that trains answers; meanwhile this one answers them.

    Raises:
        ClusterError: the name of a host is unknown for `unknown_host_secs`.
    """
    peers = [task for task in cluster.trainers if task != cluster.task]
    with held(port_of(cluster.address)):
        _wait(cluster, peers, lambda t: _answers(cluster.address_of(t)), unknown_host_secs)


def watch_chief(cluster: Cluster, timeout_secs: float, on_gone: Callable[[str], None]) -> None:
    """Calls `on_gone` with a message, on another thread, if the chief is away for `timeout_secs`.

    Away is: its address takes no connection. From now on, so this is also how long it may take to
    start. Returns at once.
    """
    chief, address = cluster.chief, cluster.address_of(cluster.chief)

    def watch() -> None:
        last_seen = time.monotonic()
        while True:
            try:
                is_there = _answers(address)
            except UnknownHostError:
                is_there = False
            away_secs = time.monotonic() - last_seen
            if is_there:
                last_seen = time.monotonic()
            elif away_secs > timeout_secs:
                on_gone(f"{chief} ({address}) has not answered for {away_secs:.0f} s")
                return
            time.sleep(min(10.0, timeout_secs / 10))

    threading.Thread(target=watch, name="watch chief", daemon=True).start()


def port_of(address: str) -> int:
    """The port of `host:port`."""
    return int(address.rpartition(":")[2])


def host_of(address: str) -> str:
    """The host of `host:port`, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def own_host(towards: str) -> str:
    """A name or address of this machine that the tasks of the host of `towards` can reach.

    Raises:
        ClusterError: there is no way to that host.
    """
    host = host_of(towards)
    try:
        (family, *_, target), *_ = socket.getaddrinfo(
            host, port_of(towards), type=socket.SOCK_DGRAM
        )
        # Connecting sends nothing: it only chooses the address to send from.
        with socket.socket(family, socket.SOCK_DGRAM) as chosen:
            chosen.connect(target)
            own = str(chosen.getsockname()[0])
    except OSError as error:
        raise ClusterError(
            f"The host of {towards} cannot be reached from here: {error}. Correct it, or name this "
            "task's own address: --chief_hosts=host:port."
        ) from None
    if ipaddress.ip_address(own).is_loopback:
        return towards.rpartition(":")[0]
    return f"[{own}]" if family == socket.AF_INET6 else own


def identify(address: str) -> Task | Literal["stranger", "silent"] | None:
    """Who serves at `address`: a task of TensorFlow, something else, or nobody.

    "silent" is what takes connections and does not answer in time.

    Asks TensorFlow's own status call, whose answer has the names of the server's devices.

    Raises:
        UnknownHostError: the name of the host cannot be resolved.
    """
    if not _answers(address):
        return None
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer: bytes = channel.unary_unary(_GET_STATUS)(b"", timeout=_ANSWER_SECS)
        except grpc.RpcError as error:
            is_late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            return "silent" if is_late else "stranger"
    device = re.search(rb"/job:(\w+)/replica:0/task:(\d+)/", answer)
    return Task(device[1].decode(), int(device[2])) if device else "stranger"


def _refuse_twin(cluster: Cluster) -> None:
    """Returns if no process serves as this very task at its address."""
    task, address = cluster.task, cluster.address
    try:
        twin = identify(address)
    except UnknownHostError:
        return
    if twin == task:
        raise ClusterError(
            f"Another process is {task} already, and serves at {address}. Each process needs a job "
            "and an index of its own: correct those of this one, or end the other."
        )


def _wait(
    cluster: Cluster,
    peers: Iterable[Task],
    is_there: Callable[[Task], bool],
    unknown_host_secs: float,
) -> bool:
    """Returns once each of `peers` was there; whether any was not at the first look."""
    missing = list(peers)
    unknown_since: dict[Task, float] = {}
    next_report = time.monotonic() + _REPORT_SECS
    waited = False
    while missing:
        still: list[Task] = []
        unknown: list[Task] = []
        for task in missing:
            try:
                if not is_there(task):
                    still.append(task)
                unknown_since.pop(task, None)
            except UnknownHostError as error:
                still.append(task)
                unknown.append(task)
                if _secs_since(unknown_since, task) > unknown_host_secs:
                    raise ClusterError(
                        f"The host of {task} ({cluster.address_of(task)}) is unknown here: "
                        f"{error}. Correct the name; or, where a scheduler makes names as "
                        "tasks start, allow more than "
                        f"--unknown_host_secs={unknown_host_secs:g}."
                    ) from None
        missing = still
        waited = waited or bool(missing)
        if missing and time.monotonic() > next_report:
            next_report += _REPORT_SECS
            listed = (
                f"{task} ({cluster.address_of(task)}{', unknown host' if task in unknown else ''})"
                for task in missing
            )
            log.info("waiting for %s", ", ".join(listed))
        if missing:
            time.sleep(_POLL_SECS)
    return waited


def _secs_since(times: dict[Task, float], task: Task) -> float:
    """Seconds since the first call for `task`, or since it was taken out of `times`."""
    now = time.monotonic()
    return now - times.setdefault(task, now)


def _answers(address: str) -> bool:
    try:
        socket.create_connection((host_of(address), port_of(address)), timeout=1).close()
    except (socket.gaierror, UnicodeError) as error:
        raise UnknownHostError(getattr(error, "strerror", str(error))) from None
    except OSError:
        return False
    return True
