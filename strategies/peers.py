"""Other tasks, before and beside TensorFlow's own connections to them: who is there, who is not.

    check_private(cluster)
    check_own_address(cluster)
    wait_for_servers(cluster, unknown_host_secs=60)     # in the chief of parameter servers
    wait_for_peers(cluster, unknown_host_secs=60)       # in a worker of multiworker
    watch_peers(cluster, tasks, 150, on_silent)         # while they train

TensorFlow waits for tasks without a word, holds the interpreter while it does, so that no signal is
handled, and waits for ever for one that will not come: a host that does not exist, a port where
something else listens. All of that is found out here.
"""

import contextlib
import errno
import ipaddress
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

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
# Between two looks at a task that trains, at most.
_WATCH_SECS = 10.0

_GET_STATUS = "/tensorflow.WorkerService/GetStatus"


class UnknownHostError(OSError):
    """The name of a host that cannot be resolved, now."""


class SilentPeerError(RuntimeError):
    """What is at the address of a task takes connections and says nothing."""


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


def check_private(cluster: Cluster) -> None:
    """Returns if the address at which this task serves is none of the public internet.

    Raises:
        ClusterError: it is one.
    """
    with contextlib.suppress(OSError, UnicodeError):  # Who cannot resolve it says so later.
        found = socket.getaddrinfo(host_of(cluster.address), port_of(cluster.address))
        for *_, (host, *_) in found:
            if ipaddress.ip_address(str(host).partition("%")[0]).is_global:
                raise ClusterError(
                    f"{cluster.task} should serve at {cluster.address}, which is {host}, an "
                    "address of the public internet. Whoever reaches a server of TensorFlow can "
                    "run anything as your user. Use addresses of a private network; or, if a "
                    "firewall lets nobody else in, add --allow_public_address."
                )


def wait_for_servers(cluster: Cluster, unknown_host_secs: float) -> None:
    """Returns once every worker and ps task of `cluster` has just said that it is that task.

    Meanwhile the chief answers those who watch for it.

    Raises:
        ClusterError: something else listens at an address, or another task, or the name of a host
            is unknown for `unknown_host_secs`.
        SilentPeerError: what listens at an address does not answer.
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
        elif _secs_since(strange_since, task) <= patience_secs[answer]:
            pass
        elif answer == "silent":
            raise SilentPeerError(
                f"{task} should serve at {address}, but what listens there has said nothing for "
                f"{_SILENT_SECS:.0f} s. It is stopped, or it is no TensorFlow server."
            )
        else:
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


def watch_peers(
    cluster: Cluster,
    tasks: Sequence[Task],
    timeout_secs: float,
    on_silent: Callable[[Task], None],
) -> None:
    """Calls `on_silent` when one of `tasks` has not answered for `timeout_secs`; returns at once.

    On another thread, and again at each look until the task answers: its process is stopped, or its
    host cut off. TensorFlow itself would wait for it for ever. Half way there is a warning.
    """
    look_secs = min(_WATCH_SECS, timeout_secs / 10)

    def watch(task: Task) -> None:
        address = cluster.address_of(task)
        last_seen = time.monotonic()
        has_warned = is_lost = False
        while True:
            with contextlib.suppress(UnknownHostError):
                if identify(address) not in ("silent", None):
                    last_seen = time.monotonic()
            silent_secs = time.monotonic() - last_seen
            message = f"{task} ({address}) has not answered for {silent_secs:.0f} s"
            if silent_secs >= timeout_secs:
                if not is_lost:
                    log.warning("%s: it passes for lost.", message)
                has_warned = is_lost = True
                on_silent(task)
            elif silent_secs >= timeout_secs / 2 and not has_warned:
                log.warning("%s; at %.0f s it passes for lost.", message, timeout_secs)
                has_warned = True
            elif has_warned and silent_secs < timeout_secs / 2:
                log.warning("%s answers again.", task)
                has_warned = is_lost = False
            time.sleep(look_secs)

    for task in tasks:
        threading.Thread(target=watch, args=[task], name=f"watch {task}", daemon=True).start()


def cut_connections(address: str) -> int:
    """Cuts this process's connections to `address`; returns how many there were.

    What waits for an answer over one of them fails with UnavailableError. That is what a keepalive
    of gRPC would do to a peer that is silent; TensorFlow has no setting for it.

    Raises:
        UnknownHostError: the name of the host cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host_of(address), port_of(address), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UnknownHostError(error.strerror) from None
    ends = {_without_mapping(sockaddr) for *_, sockaddr in found}
    num_cut = 0
    for fd in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # It was closed meanwhile, or is no connection.
            if not stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as connection:
                if _without_mapping(connection.getpeername()) in ends:
                    connection.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
    return num_cut


def _without_mapping(end: Any) -> tuple[str, int]:
    """Host and port of a socket's address; an IPv4 host that is written as IPv6 as itself.

    Raises:
        OSError: it is no internet address.
    """
    if isinstance(end, str):
        raise OSError(f"no internet address: {end!r}")
    host, port, *_ = end
    address = ipaddress.ip_address(str(host).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port)


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
