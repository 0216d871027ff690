"""Checks this task's address, identifies the other tasks and waits for them.

    check_private(cluster)
    check_own_address(cluster)
    wait_for_servers(cluster)                       # in the chief, under ps

TensorFlow waits for other tasks without a message, and without an end if a task cannot come: its
host does not exist, or another program uses its port. So this module checks first, over separate
connections. rendezvous.py does it for workers of multiworker, which have no server yet.
"""

import concurrent.futures
import contextlib
import errno
import ipaddress
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import grpc

from data.system.ports import when_released
from strategies.cluster.ports import bind, held
from strategies.cluster.tf_config import Cluster, ClusterError, Task

log = logging.getLogger(__name__)

_POLL_SECS = 0.2
_REPORT_SECS = 10.0
# How long a host name may be unknown; and how long another program or task may answer at the
# address of a task, before that is an error. In a pod of Kubernetes both may last longer.
_UNKNOWN_HOST_SECS, _STRANGER_SECS = 60.0, 10.0
_LATE_POD_SECS = 1800.0
# How long an address may accept connections without an answer, as a server on a busy machine does.
_SILENT_SECS = 60.0
_ANSWER_SECS = 2.0
_NUM_PARALLEL = 16  # Tasks that are looked for at the same time.

_GET_STATUS = "/tensorflow.WorkerService/GetStatus"

# What is found at an address; `identify` explains it.
Identity: TypeAlias = Task | Literal["stranger", "silent"] | None


class UnknownHostError(OSError):
    """The name of a host cannot be resolved at the moment."""


class AbsentPeerError(RuntimeError):
    """A task has not been at its address for too long; it may be there after a restart."""


def check_own_address(cluster: Cluster) -> None:
    """Raises ClusterError if this process cannot serve at its own address."""
    task, address, port = cluster.task, cluster.address, port_of(cluster.address)
    is_in_use = False
    try:
        when_released(lambda: bind(port)).close()
    except OSError as error:
        is_in_use = error.errno == errno.EADDRINUSE
        if error.errno == errno.EACCES:
            raise ClusterError(
                f"{task} should serve at {address}, but this user may not open port {port}. Give "
                "this task a port of 1024 or more, in the configuration of every task."
            ) from None
        if not is_in_use:
            raise
    if answer_at(address) == task:
        raise ClusterError(
            f"Another process is {task} already, and serves at {address}. Each process needs a "
            "different job or index: correct those of this process, or end the other one."
        )
    if is_in_use:
        raise ClusterError(
            f"{task} should serve at {address}, but port {port} of this machine is in use. End the "
            f"process that uses it (`ss -tlnp 'sport = :{port}'` shows it; it may be an earlier "
            "run), or give this task another port, in the configuration of every task."
        )
    with contextlib.suppress(UnknownHostError):  # Some schedulers create names as tasks start.
        if not _leads_here(address, _tolerated_secs(cluster, address, _STRANGER_SECS)):
            raise ClusterError(
                f"{task} should serve at {address}, but connections to that address do not come to "
                "this process. Give this task an address of this machine (`hostname -I` shows "
                "them), in the configuration of every task."
            )


def _leads_here(address: str, limit_secs: float) -> bool:
    """Returns True if a connection to `address` reaches this process, which may take a while."""
    mark = os.urandom(16)
    with held(port_of(address), mark):
        deadline = time.monotonic() + limit_secs
        while greeting_at(address) != mark:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECS)
    return True


def check_private(cluster: Cluster) -> None:
    """Raises ClusterError if this task would serve at an address of the public internet."""
    with contextlib.suppress(OSError, UnicodeError):  # An unknown name is reported later.
        found = socket.getaddrinfo(host_of(cluster.address), port_of(cluster.address))
        for *_, (host, *_) in found:
            if ipaddress.ip_address(str(host).partition("%")[0]).is_global:
                raise ClusterError(
                    f"{cluster.task} should serve at {cluster.address}, which is {host}, an "
                    "address of the public internet. Anyone who can connect to a TensorFlow server "
                    "can run any code as your user. Use addresses of a private network; or, if a "
                    "firewall blocks all other hosts, add --allow_public_address."
                )


def wait_for_servers(cluster: Cluster) -> None:
    """Returns once every worker and ps task of `cluster` identifies itself at its address.

    Meanwhile the chief's own port accepts connections, for `watch_chief` in the servers.

    Raises:
        ClusterError: another program or another task serves at an address.
        AbsentPeerError: a process at an address accepts connections and does not answer, or a host
            name is unknown for a minute. In a pod of Kubernetes see `_tolerated_secs`.
    """
    servers = [task for task in cluster.trainers if task.job in ("worker", "ps")]
    # Without a chief task, this process is worker 0: it serves already, so its port is in use.
    port = port_of(cluster.address)
    with contextlib.nullcontext() if cluster.is_server else held(port):
        wait_until_all_are_there(cluster, servers, Identification(cluster, identify))


def all_answer(cluster: Cluster) -> bool:
    """Returns True if all other training tasks answer now. A silent one takes a few seconds."""
    addresses = [cluster.address_of(task) for task in cluster.other_trainers]
    with concurrent.futures.ThreadPoolExecutor(_NUM_PARALLEL) as pool:
        return all(isinstance(found, Task) for found in pool.map(answer_at, addresses))


class Identification:
    """Checks whether tasks are at their addresses; remembers what else answers there."""

    def __init__(self, cluster: Cluster, identify_at: Callable[[str], Identity]) -> None:
        self._cluster = cluster
        self._identify_at = identify_at
        # What is at the address of a task in its place, and since when.
        self._strange: dict[Task, tuple[Identity, float]] = {}

    def __call__(self, task: Task) -> bool:
        """Returns True if `task` is at its address.

        Raises:
            ClusterError: another program or another task has been there for 10 s.
            AbsentPeerError: a process there has not answered for a minute; in a pod of Kubernetes,
                another program or task has been there for half an hour.
        """
        address = self._cluster.address_of(task)
        answer = self._identify_at(address)
        if answer is None or answer == task:
            self._strange.pop(task, None)
            return answer == task
        if isinstance(answer, Task) and self._cluster.generation is not None:
            return False  # Of another generation: its launcher will end it.
        limit_secs = _tolerated_secs(self._cluster, address, _STRANGER_SECS)
        is_tolerated = limit_secs > _STRANGER_SECS
        expected = f"{task} should serve at {address}, but"
        who = f"{answer} of another cluster" if isinstance(answer, Task) else "another program"
        kind, since = self._strange.get(task, (None, 0.0))
        if kind != answer:
            since = time.monotonic()
            self._strange[task] = answer, since
            if is_tolerated and answer != "silent":
                log.warning("%s %s answers there. Waiting for %s.", expected, who, task)
        secs = time.monotonic() - since
        if answer == "silent" and secs > _SILENT_SECS:
            raise AbsentPeerError(
                f"{expected} the process there accepts connections and has not answered for "
                f"{_SILENT_SECS:.0f} s. Continue or restart that task, or correct the address"
            )
        if answer == "silent" or secs <= limit_secs:
            return False
        if is_tolerated:
            raise AbsentPeerError(f"{expected} {who} has been there for {limit_secs:.0f} s")
        if isinstance(answer, Task):
            raise ClusterError(
                f"{expected} {who} answers there. Start {task} with the same addresses as this "
                "task, or correct the address."
            )
        raise ClusterError(
            f"{expected} the process there is not a TensorFlow server. Correct the address, or "
            "end the process that uses the port and start the task."
        )


def port_of(address: str) -> int:
    """The port of `host:port`."""
    return int(address.rpartition(":")[2])


def host_of(address: str) -> str:
    """The host of `host:port`, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def own_host(towards: str) -> str:
    """A name or address of this machine that tasks on the host of `towards` can reach.

    Raises:
        ClusterError: there is no route to that host.
    """
    try:
        found = socket.getaddrinfo(host_of(towards), port_of(towards), type=socket.SOCK_DGRAM)
        (family, *_, target), *_ = found
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


def identify(address: str) -> Identity:
    """Identifies the process that serves at `address`, by TensorFlow's own status call.

    The answer to that call has the names of the server's devices, which contain its task. Returns:

    - a Task, if a TensorFlow server answers;
    - "stranger", if another program answers;
    - "silent", if connections are accepted but the answer does not come in time;
    - None, if no connection is accepted.

    Raises:
        UnknownHostError: the name of the host cannot be resolved.
    """
    if not accepts_connections(address):
        return None
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer: bytes = channel.unary_unary(_GET_STATUS)(b"", timeout=_ANSWER_SECS)
        except grpc.RpcError as error:
            is_late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            return "silent" if is_late else "stranger"
    device = re.search(rb"/job:(\w+)/replica:0/task:(\d+)/", answer)
    return Task(device[1].decode(), int(device[2])) if device else "stranger"


def answer_at(address: str) -> Identity:
    """As `identify`; "silent" if the name of the host is unknown at the moment."""
    try:
        return identify(address)
    except UnknownHostError:
        return "silent"


def greeting_at(address: str) -> bytes | None:
    """What a process sends first to whoever connects; None if no connection is accepted."""
    connection = _connect(address)
    if connection is None:
        return None
    with connection, contextlib.suppress(OSError):  # It may send nothing, or close at once.
        connection.settimeout(_ANSWER_SECS)
        return connection.recv(200)
    return b""


def wait_until_all_are_there(
    cluster: Cluster, peers: Iterable[Task], is_there: Callable[[Task], bool]
) -> None:
    """Returns once one look at each of `peers`, at about the same time, has found all of them.

    `is_there` is called on several threads. Reports every 10 s who is missing.

    Raises:
        AbsentPeerError: the name of a host has been unknown for a minute, in a pod of Kubernetes
            for half an hour.
    """
    unknown_since: dict[Task, float] = {}

    def look(task: Task) -> bool:
        try:
            found = is_there(task)
        except UnknownHostError as error:
            address = cluster.address_of(task)
            limit_secs = _tolerated_secs(cluster, address, _UNKNOWN_HOST_SECS)
            now = time.monotonic()
            is_late = now - unknown_since.setdefault(task, now) > limit_secs
            if is_late and cluster.generation is None:  # Else the others continue without it.
                raise AbsentPeerError(
                    f"the host of {task} ({address}) is unknown for {limit_secs:g} s. Correct its "
                    f"name, or start this task again when it is known ({error})"
                ) from None
            return False
        unknown_since.pop(task, None)
        return found

    all_peers = list(peers)
    next_report = time.monotonic() + _REPORT_SECS
    with concurrent.futures.ThreadPoolExecutor(_NUM_PARALLEL) as pool:
        while True:
            looks = zip(all_peers, pool.map(look, all_peers), strict=True)
            missing = [task for task, found in looks if not found]
            if not missing:
                return
            if time.monotonic() > next_report:
                next_report += _REPORT_SECS
                notes = dict.fromkeys(unknown_since, ", unknown host")
                listed = (f"{t} ({cluster.address_of(t)}{notes.get(t, '')})" for t in missing)
                log.info("waiting for %s", ", ".join(listed))
            time.sleep(_POLL_SECS)


def _tolerated_secs(cluster: Cluster, address: str, usual_secs: float) -> float:
    """How long an address may be unknown, or something else than its task may answer there.

    Kubernetes creates a name when its pod starts, and may give the address of a pod that has ended
    to another one. The launchers of an elastic cluster decide for themselves.
    """
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ and cluster.generation is None
    is_local = host_of(address) in ("localhost", "127.0.0.1", "::1")
    return _LATE_POD_SECS if is_pod and not is_local else usual_secs


def is_reachable(address: str) -> bool:
    """Returns True if the host of `address` accepts or refuses a connection within a second."""
    try:
        socket.create_connection((host_of(address), port_of(address)), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except (OSError, UnicodeError):
        return False
    return True


def accepts_connections(address: str) -> bool:
    """Raises UnknownHostError if the name of the host cannot be resolved."""
    connection = _connect(address)
    if connection is not None:
        connection.close()
    return connection is not None


def _connect(address: str) -> socket.socket | None:
    try:
        return socket.create_connection((host_of(address), port_of(address)), timeout=1)
    except (socket.gaierror, UnicodeError) as error:
        raise UnknownHostError(getattr(error, "strerror", str(error))) from None
    except OSError:
        return None
