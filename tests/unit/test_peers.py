"""Identifying, awaiting and watching tasks, over real sockets and TensorFlow servers."""

import contextlib
import errno
import queue
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from data.system.compat.connections import cut_connections
from strategies.cluster import peers, watching
from strategies.cluster.peers import (
    AbsentPeerError,
    UnknownHostError,
    all_answer,
    check_own_address,
    check_private,
    identify,
    own_host,
    port_of,
    wait_for_servers,
    wait_until_all_are_there,
)
from strategies.cluster.ports import bind, free_ports, held
from strategies.cluster.tf_config import Cluster, ClusterError, Task
from strategies.cluster.watching import silence_of, watch_chief, watch_peers, watch_servers
from strategies.ps.servers import start_server
from tests.unit.stand_ins import wait_for

# A host name that never resolves: RFC 2606 reserves the domain.
UNKNOWN = "unknown.invalid"


def alone_at(address: str) -> Cluster:
    return Cluster({"worker": {0: address}}, Task("worker", 0))


def ps_cluster(worker: str, ps: str) -> Cluster:
    """A cluster of a worker and a ps, seen from its chief."""
    jobs = {"chief": {0: "localhost:1"}, "worker": {0: worker}, "ps": {0: ps}}
    return Cluster(jobs, Task("chief", 0))


@pytest.fixture(scope="module")
def servers() -> Cluster:
    """A cluster whose worker and ps are real servers."""
    worker, ps = (f"localhost:{port}" for port in free_ports(2))
    cluster = ps_cluster(worker, ps)
    start_server(cluster.for_task(Task("worker", 0)))
    start_server(cluster.for_task(Task("ps", 0)))
    return cluster


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_STRANGER_SECS", 0.5)
    monkeypatch.setattr(peers, "_ANSWER_SECS", 1.0)
    monkeypatch.setattr("data.system.ports._FORMER_USER_SECS", 1.0)


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """The address of a program that accepts connections, and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def stranger() -> Iterator[str]:
    """The address of a server that answers, but not as TensorFlow."""
    with held(port := free_ports(1)[0], b"HTTP/1.1 400 Bad Request\r\n\r\n"):
        yield f"127.0.0.1:{port}"


def test_tensorflow_server_is_identified_by_its_task(servers: Cluster) -> None:
    assert identify(servers.jobs["worker"][0]) == Task("worker", 0)
    assert identify(servers.jobs["ps"][0]) == Task("ps", 0)
    wait_for_servers(servers)


def test_closed_ports_strangers_and_unknown_hosts_are_distinguished() -> None:
    assert identify(f"localhost:{free_ports(1)[0]}") is None
    with stranger() as address:
        assert identify(address) == "stranger"
    with pytest.raises(UnknownHostError):
        identify(f"{UNKNOWN}:1")


def test_server_of_another_cluster_and_stranger_in_a_servers_place_are_refused(
    servers: Cluster,
) -> None:
    worker, ps = servers.jobs["worker"][0], servers.jobs["ps"][0]
    with pytest.raises(ClusterError, match=r"worker 0 should serve .* but ps 0 of another cluster"):
        wait_for_servers(ps_cluster(ps, worker))
    with stranger() as address, pytest.raises(ClusterError, match="not a TensorFlow server"):
        wait_for_servers(ps_cluster(worker, address))


def test_unknown_host_is_waited_for_and_then_refused(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert peers._UNKNOWN_HOST_SECS == 60.0
    monkeypatch.setattr(peers, "_UNKNOWN_HOST_SECS", 0.5)
    started = time.monotonic()
    cluster = ps_cluster(f"{UNKNOWN}:1", servers.jobs["ps"][0])
    with pytest.raises(AbsentPeerError, match=f"worker 0 \\({UNKNOWN}:1\\) is unknown"):
        wait_for_servers(cluster)
    assert time.monotonic() - started > 0.5


def test_pod_may_be_late_and_its_address_be_of_others_before(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    for name in ("_UNKNOWN_HOST_SECS", "_STRANGER_SECS"):
        monkeypatch.setattr(peers, name, 0.1)
    # The silence does not last from the first strange answer on.
    monkeypatch.setattr(peers, "_SILENT_SECS", 0.5)
    own = f"127.0.0.2:{port_of(servers.jobs['worker'][0])}"  # Not a local name.
    late = ps_cluster(own, servers.jobs["ps"][0])
    other = Task("ps", 0)
    answers: list[peers.Identity] = ["stranger", "stranger", "stranger", "stranger", "silent"]
    answers += [other, other, None, "silent"]
    found = iter(answers)
    num_unknown = 0

    def identify_later(address: str) -> peers.Identity:
        nonlocal num_unknown
        if num_unknown < 4:
            num_unknown += 1
            raise UnknownHostError("not yet")
        return next(found, Task("worker", 0))

    is_there = peers.Identification(late, identify_later)
    wait_until_all_are_there(late, [Task("worker", 0)], is_there)
    assert next(found, None) is None
    assert "another program answers there. Waiting for worker 0" in caplog.text
    assert "ps 0 of another cluster answers there. Waiting for worker 0" in caplog.text

    monkeypatch.setattr(peers, "_LATE_POD_SECS", 0.5)
    is_there = peers.Identification(late, lambda _: "stranger")
    with pytest.raises(AbsentPeerError, match=r"worker 0 .* another program has been there"):
        wait_until_all_are_there(late, [Task("worker", 0)], is_there)


def test_time_of_an_unknown_host_begins_anew_once_it_was_known(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resolver fails at the first check, and once more after the limit, but not in between."""
    monkeypatch.setattr("strategies.cluster.peers._UNKNOWN_HOST_SECS", 0.9)
    started = time.monotonic()
    failed: list[float] = []

    def is_there(task: Task) -> bool:
        elapsed = time.monotonic() - started
        if not failed or (elapsed > 1.0 and len(failed) < 2):
            failed.append(elapsed)
            raise UnknownHostError("try again")
        return len(failed) == 2

    wait_until_all_are_there(servers, [Task("worker", 0)], is_there)
    assert failed[1] - failed[0] > 0.9


def test_second_process_of_the_same_task_is_refused(servers: Cluster) -> None:
    with pytest.raises(ClusterError, match="Another process is ps 0 already"):
        check_own_address(servers.for_task(Task("ps", 0)))


def test_held_port_accepts_connections_and_is_free_afterwards() -> None:
    (port,) = free_ports(1)
    with held(port):
        for _ in range(300):  # More than fit into a listener's queue.
            socket.create_connection(("localhost", port), timeout=10).close()
    bind(port).close()
    assert identify(f"localhost:{port}") is None


def test_watcher_reports_the_chief_only_after_it_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    cluster = Cluster({"worker": {0: f"localhost:{port}"}, "ps": {0: "b:1"}}, Task("ps", 0))
    messages: queue.Queue[str] = queue.Queue()
    with held(port):
        watch_chief(cluster, 1.0, messages.put)
        with pytest.raises(queue.Empty):
            messages.get(timeout=2.0)
        assert not caplog.messages
    assert f"worker 0 (localhost:{port})" in messages.get(timeout=10.0)
    (warned,) = caplog.messages
    assert re.search(r"has not answered for \d s. This task ends at 1 s.", warned)


def test_own_host_can_be_reached_by_others() -> None:
    assert own_host("localhost:1") == "localhost"
    assert own_host("127.0.0.1:1") == "127.0.0.1"
    with pytest.raises(ClusterError, match="cannot be reached"):
        own_host(f"{UNKNOWN}:1")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_port_in_use_is_named(host: str) -> None:
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ClusterError) as caught:
            check_own_address(alone_at(f"localhost:{port}"))
    for part in (f"localhost:{port}", "in use", f":{port}", "another port"):
        assert part in str(caught.value)


def test_former_process_that_is_just_ending_is_no_error() -> None:
    """A scheduler starts a task anew at once, and does not do it again after an exit code of 2."""
    with bind(0) as former:
        former.listen()
        address = f"localhost:{former.getsockname()[1]}"
        timer = threading.Timer(0.3, former.close)
        timer.start()
        check_own_address(alone_at(address))
        timer.join()


OWN_HOSTS = ["localhost", "127.0.0.1", "0.0.0.0", "[::1]", socket.gethostname(), UNKNOWN]


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_own_address_may_have_any_form_or_be_unknown_yet(host: str) -> None:
    if host == "[::1]" and not socket.has_ipv6:
        pytest.skip("the kernel has no IPv6")
    (port,) = free_ports(1)
    check_own_address(alone_at(f"{host}:{port}"))


# RFC 5737 reserves the first for examples; another program has the second.
@pytest.mark.parametrize("is_taken", [False, True], ids=["no host", "another host's"])
def test_own_address_of_another_machine_is_refused(
    is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    if is_taken:  # Whatever the address is, it does not lead here.
        monkeypatch.setattr(peers, "greeting_at", lambda address: b"another program")
    address = f"192.0.2.1:{port}"
    with pytest.raises(ClusterError, match="do not come to this process") as caught:
        check_own_address(alone_at(address))
    assert address in str(caught.value)


def test_own_public_address_is_refused_and_the_danger_explained() -> None:
    with pytest.raises(ClusterError, match="--allow_public_address"):
        check_private(alone_at("8.8.8.8:2222"))
    for private in ("10.1.2.3:2222", "localhost:2222", "[fd00::1]:2222", f"{UNKNOWN}:2222"):
        check_private(Cluster({"worker": {0: private, 1: "8.8.4.4:1"}}, Task("worker", 0)))


def test_peer_that_accepts_connections_and_does_not_answer_is_considered_lost(
    servers: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with silent() as address:
        cluster = ps_cluster(address, servers.address_of(Task("ps", 0)))
        lost: queue.SimpleQueue[Task] = queue.SimpleQueue()
        watch_peers(cluster, 0.4, lost.put)
        assert {lost.get(timeout=20), lost.get(timeout=20)} == {Task("worker", 0)}
        assert "worker 0" in caplog.text
        assert "ps 0" not in caplog.text


def test_all_answer_unless_one_is_silent_gone_or_unknown(servers: Cluster) -> None:
    assert all_answer(servers)
    of_evaluator = {**servers.jobs, "evaluator": {0: f"{UNKNOWN}:1"}}
    assert all_answer(Cluster(of_evaluator, servers.task)), "it does not train"
    with silent() as silent_address:
        for address in (silent_address, f"localhost:{free_ports(1)[0]}", f"{UNKNOWN}:1"):
            assert not all_answer(ps_cluster(address, servers.address_of(Task("ps", 0))))


@pytest.mark.parametrize("prefix", ["", "::ffff:"], ids=["IPv4", "IPv4 mapped to IPv6"])
def test_cut_connection_fails_at_both_ends_and_other_connections_stay(prefix: str) -> None:
    if prefix and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with contextlib.ExitStack() as stack:
        ends = []
        for _ in range(2):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = server.getsockname()[1]
            client = stack.enter_context(socket.create_connection((f"{prefix}127.0.0.1", port)))
            accepted = stack.enter_context(server.accept()[0])
            ends.append((port, client, accepted))
        (port, client, accepted), (_, other, other_accepted) = ends
        # Also a connection that nothing answers: the queue of a listener is full.
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        filling = [stack.enter_context(socket.socket()) for _ in range(4)]
        for opening in filling:
            opening.setblocking(False)
            opening.connect_ex(full.getsockname())
        assert filling[-1].connect_ex(full.getsockname()) == errno.EALREADY
        assert cut_connections("localhost", full.getsockname()[1]) == 4
        assert filling[-1].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET

        assert cut_connections("localhost", port) == 1
        assert client.recv(1) == accepted.recv(1) == b""
        other.sendall(b"x")
        assert other_accepted.recv(1) == b"x"


@pytest.mark.parametrize("network", ["stays", "returns", "forgets"])
def test_worker_leaves_only_for_a_ps_that_stays_silent(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ps answers once. If the network returns, the chief does not answer either for 1.5 s.

    If it forgets, the name of the ps becomes unknown.
    """
    returns = network == "returns"
    returns_at = time.monotonic() + 1.5 if returns else 0.0
    answers: Counter[str] = Counter()
    chief, ps = f"chief-{network}:1", f"ps-{network}:1"  # Threads of the other networks live on.

    def identify_later(address: str) -> Task | None:
        if time.monotonic() < returns_at and address == chief:
            return None
        # The network returns between a check of the ps and the check of the chief.
        if address == ps and answers[ps] and not (returns and answers[chief]):
            if network == "forgets":
                answers["unknown"] += 1
                raise UnknownHostError(address)
            return None
        answers[address] += 1
        return {chief: Task("chief", 0), ps: Task("ps", 0)}.get(address)

    monkeypatch.setattr(watching, "identify", identify_later)
    jobs = {"chief": {0: chief}, "worker": {0: "worker:1"}, "ps": {0: ps}}
    named: queue.Queue[Task] = queue.Queue()
    watch_servers(Cluster(jobs, Task("worker", 0)), 1.0, named.put)
    if returns:
        wait_for(lambda: answers[ps] >= 5, 30)
        assert answers[chief] == 1
        assert named.empty()
    elif network == "forgets":
        wait_for(lambda: answers["unknown"] >= 20, 30)
        assert named.empty()
    else:
        assert named.get(timeout=30) == Task("ps", 0)
        assert answers[chief] >= 4


def test_unknown_name_between_two_refusals_says_nothing_about_a_peer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over, asked = threading.Event(), iter(range(6))

    def identify_now(address: str) -> None:
        if address != "peer:1":  # Of a thread of another test.
            return
        if (number := next(asked, 6)) == 6:
            over.set()
        if number % 2:
            raise UnknownHostError(address)

    monkeypatch.setattr(watching, "identify", identify_now)
    jobs = {"worker": {0: "own:1", 1: "peer:1"}}
    watch_peers(Cluster(jobs, Task("worker", 0)), 1.0, lambda _: None, over)
    assert over.wait(30)
    assert caplog.text.count("(peer:1) accepts no connection") == 1


# Hosts that a host without a network does not find.
AWAY, AWAY_TOO = f"{UNKNOWN}:2222", f"other-{UNKNOWN}:2222"


@pytest.mark.parametrize(
    ("others", "silent", "said"),
    [
        ([AWAY, "localhost:9"], [1], "worker 1 does not answer"),
        ([AWAY, AWAY_TOO, "localhost:9"], [1, 2], "worker 1 and worker 2 do not answer"),
        ([AWAY], [1], "worker 1 does not answer"),
        ([AWAY, AWAY_TOO], [1], "no other host answers: 127.0.0.1 is probably cut off"),
    ],
)
def test_silence_of_all_other_hosts_is_that_of_the_own_host(
    others: list[str], silent: list[int], said: str
) -> None:
    workers = dict(enumerate(["127.0.0.1:9", *others]))
    cluster = Cluster({"worker": workers}, Task("worker", 0))
    assert silence_of(cluster, [Task("worker", index) for index in silent]).startswith(said)
