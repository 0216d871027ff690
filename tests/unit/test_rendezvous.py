"""Workers of multiworker meet: over real sockets, and in a simulation of random deaths."""

import concurrent.futures
import dataclasses
import queue
import random
import threading
from collections.abc import Iterator

import pytest

from strategies.cluster import peers, rendezvous
from strategies.cluster.peers import Identity, greeting_at
from strategies.cluster.ports import free_ports, held
from strategies.cluster.rendezvous import (
    Greeting,
    Processes,
    _Meeting,
    connecting,
    digest_of,
    wait_for_peers,
)
from strategies.cluster.tf_config import Cluster, ClusterError, Task
from tests.unit.stand_ins import wait_for

WORKERS = [Task("worker", index) for index in range(3)]


def workers_at(ports: list[int]) -> list[Cluster]:
    jobs = {"worker": {i: f"localhost:{port}" for i, port in enumerate(ports)}}
    return [Cluster(jobs, Task("worker", index)) for index in range(len(ports))]


def test_workers_meet_and_know_the_processes_of_all_others() -> None:
    ports = free_ports(3)
    met: dict[Task, Processes] = {}
    all_have_met = threading.Barrier(3, timeout=20)

    def meet(cluster: Cluster) -> None:
        met[cluster.task] = wait_for_peers(cluster)
        # TensorFlow's server says its name, once its task continues: the others may still look.
        with held(int(cluster.address.split(":")[1]), b""):
            all_have_met.wait()

    def identify(address: str) -> Identity:
        return next(c.task for c in clusters if c.address == address)

    clusters = workers_at(ports)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "identify", identify)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(meet, clusters))
    for task in WORKERS:
        assert set(met[task]) == set(WORKERS) - {task}
        ids = {processes[task] for other, processes in met.items() if other != task}
        assert len(ids) == 1, f"the others know different processes of {task}"


@pytest.mark.parametrize(
    "greeting",
    [
        Greeting(Task("worker", 3), "ab12"),
        Greeting(Task("worker", 3), "ab12", generation=0),
        Greeting(Task("chief", 0), "ab12", generation=7, met="cd34"),
        Greeting(Task("worker", 3), "ab12", met="cd34", num_gpus=8),
    ],
)
def test_greeting_is_decoded_as_it_was_encoded(greeting: Greeting) -> None:
    assert Greeting.decoded(greeting.encoded()) == greeting


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.0 400 Bad request\r\n\r\n", b"\x00\x00\x18\x04\xff"]
)
def test_what_another_program_sends_is_no_greeting(sent: bytes) -> None:
    assert Greeting.decoded(sent) is None


def test_different_numbers_of_gpus_are_refused_by_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_LINGER_SECS", 1.0)
    clusters = workers_at(free_ports(3))
    errors: dict[Task, str] = {}

    def meet(cluster: Cluster, num_gpus: int) -> None:
        with pytest.raises(ClusterError) as raised:
            wait_for_peers(cluster, num_gpus)
        errors[cluster.task] = str(raised.value)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(meet, clusters, [2, 1, 2]))
    assert errors.keys() == set(WORKERS)
    for message in errors.values():
        assert "(worker 0: 2, worker 1: 1, worker 2: 2)" in message
        assert "--num_gpus=1 in all" in message


class Network:
    """The processes at the addresses of three workers; a TensorFlow server sends no greeting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ports: list[int]) -> None:
        self.clusters = workers_at(ports)
        self.tasks = {cluster.address: cluster.task for cluster in self.clusters}
        self.waiting: dict[Task, Greeting] = {}
        self.serving: set[Task] = set()
        self.real = greeting_at
        monkeypatch.setattr(rendezvous, "greeting_at", self.greeting_at)
        monkeypatch.setattr(rendezvous, "identify", self.identify)

    def greeting_at(self, address: str) -> bytes | None:
        task = self.tasks[address]
        if greeting := self.waiting.get(task):
            return greeting.encoded()
        return b"settings" if task in self.serving else None

    def identify(self, address: str) -> Identity:
        task = self.tasks[address]
        return task if task in self.serving else None


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(monkeypatch, free_ports(3))


class Waiting:
    """Worker 2, which waits for the others on a thread; what it sends is read from its socket."""

    def __init__(self, network: Network, generation: int | None = None) -> None:
        self.cluster = dataclasses.replace(network.clusters[2], generation=generation)
        self._network = network
        self._thread = threading.Thread(target=wait_for_peers, args=[self.cluster], daemon=True)
        self._thread.start()

    def greeting(self) -> Greeting:
        wait_for(lambda: bool(self._network.real(self.cluster.address)))
        greeting = Greeting.decoded(self._network.real(self.cluster.address) or b"")
        assert greeting
        return greeting

    def met(self, processes: Processes) -> str:
        """The digest of `processes` and of this process; waits until it sends this one."""
        expected = digest_of({**processes, WORKERS[2]: self.greeting().process})
        wait_for(lambda: self.greeting().met == expected)
        return expected

    def waits_on(self) -> bool:
        self._thread.join(timeout=0.6)  # It looks every 0.2 s.
        return self._thread.is_alive()

    def ends(self) -> bool:
        self._thread.join(timeout=20)
        return not self._thread.is_alive()


@pytest.mark.parametrize("has_left", [False, True], ids=["waits", "has left"])
def test_server_of_an_earlier_start_does_not_count_until_it_was_started_again(
    network: Network, *, has_left: bool
) -> None:
    network.serving = {WORKERS[0], WORKERS[1]}
    waiting = Waiting(network)
    assert waiting.waits_on(), "it counted processes of an earlier start"
    network.waiting[WORKERS[1]] = Greeting(WORKERS[1], "b")
    network.serving.clear()
    assert waiting.waits_on()
    assert waiting.greeting().met is None

    network.waiting[WORKERS[0]] = Greeting(WORKERS[0], "a")
    met = waiting.met({WORKERS[0]: "a", WORKERS[1]: "b"})
    assert waiting.waits_on(), "the others have not seen it yet"
    network.waiting[WORKERS[1]] = Greeting(WORKERS[1], "b", met=met)
    if has_left:
        network.serving = {WORKERS[0]}
        del network.waiting[WORKERS[0]]
    else:
        network.waiting[WORKERS[0]] = Greeting(WORKERS[0], "a", met=met)
    assert waiting.ends()


def test_process_that_replaces_another_one_is_waited_for(network: Network) -> None:
    for task, process in zip(WORKERS[:2], "ab", strict=True):
        network.waiting[task] = Greeting(task, process)
    waiting = Waiting(network)
    before = waiting.met({WORKERS[0]: "a", WORKERS[1]: "b"})
    network.waiting[WORKERS[1]] = Greeting(WORKERS[1], "b2")
    network.waiting[WORKERS[0]] = Greeting(WORKERS[0], "a", met=before)
    after = waiting.met({WORKERS[0]: "a", WORKERS[1]: "b2"})
    network.waiting[WORKERS[1]] = Greeting(WORKERS[1], "b2", met=after)
    assert waiting.waits_on(), "worker 0 has not seen the new process"
    network.waiting[WORKERS[0]] = Greeting(WORKERS[0], "a", met=after)
    assert waiting.ends()


def test_process_of_another_generation_does_not_count_nor_does_its_server(network: Network) -> None:
    network.waiting[WORKERS[1]] = Greeting(WORKERS[1], "b", generation=3)
    # Host 0 was worker 1 of the earlier group.
    network.waiting[WORKERS[0]] = Greeting(WORKERS[1], "a", generation=2)
    waiting = Waiting(network, generation=3)
    assert waiting.greeting().generation == 3
    assert waiting.waits_on()
    assert waiting.greeting().met is None
    network.serving = {WORKERS[0]}  # It has met the others of generation 2.
    del network.waiting[WORKERS[0]]
    assert waiting.waits_on(), "it counted a server of another generation"
    network.waiting[WORKERS[0]] = Greeting(WORKERS[0], "a2", generation=3)
    met = waiting.met({WORKERS[0]: "a2", WORKERS[1]: "b"})
    for task, process in zip(WORKERS[:2], ("a2", "b"), strict=True):
        network.waiting[task] = Greeting(task, process, generation=3, met=met)
    assert waiting.ends()


def test_process_that_was_replaced_by_one_of_another_generation_no_longer_counts(
    network: Network,
) -> None:
    for task, process in zip(WORKERS[:2], "ab", strict=True):
        network.waiting[task] = Greeting(task, process, generation=3)
    waiting = Waiting(network, generation=3)
    met = waiting.met({WORKERS[0]: "a", WORKERS[1]: "b"})
    network.waiting[WORKERS[1]] = Greeting(WORKERS[1], "b2", generation=4)
    wait_for(lambda: waiting.greeting().met is None)
    network.waiting[WORKERS[0]] = Greeting(WORKERS[0], "a", generation=3, met=met)
    network.serving = {WORKERS[1]}  # Of generation 4.
    del network.waiting[WORKERS[1]]
    assert waiting.waits_on(), "it counted a server of another generation"
    for task, process in zip(WORKERS[:2], "ab", strict=True):
        network.waiting[task] = Greeting(task, process, generation=3, met=met)
    assert waiting.ends()


def test_process_that_is_replaced_in_the_last_look_is_waited_for(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_NUM_PARALLEL", 1)  # Worker 0 is looked at before worker 1.
    own_id, met_by_worker_0 = "", "b"
    num_looks = dict.fromkeys(WORKERS[:2], 0)

    def met_by(process: str) -> str:
        return digest_of({WORKERS[0]: "a", WORKERS[1]: process, WORKERS[2]: own_id})

    def answer(address: str) -> bytes | None:
        """Look 1: both wait; 2: both have met; from 3 on: worker 1 is another process."""
        nonlocal own_id
        task = network.tasks[address]
        num_looks[task] += 1
        if not own_id:
            own = Greeting.decoded(network.real(network.clusters[2].address) or b"")
            own_id = own.process if own else ""
        if task == WORKERS[0]:
            return Greeting(task, "a", met=met_by(met_by_worker_0)).encoded()
        process = "b" if num_looks[task] <= 2 else "b2"
        return Greeting(task, process, met=met_by(process)).encoded()

    monkeypatch.setattr(rendezvous, "greeting_at", answer)
    waiting = Waiting(network)
    wait_for(lambda: num_looks[WORKERS[1]] > 3)
    assert waiting.waits_on(), "worker 0 has met another process than the last look has found"
    met_by_worker_0 = "b2"
    assert waiting.ends()


@pytest.mark.parametrize("timeout_secs", [100.0, 0.0])
def test_task_that_connects_ends_when_another_process_waits_in_a_place(
    timeout_secs: float, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_WATCH_SECS", 0.1)
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    network.waiting[WORKERS[0]] = Greeting(WORKERS[0], "a", met="of all")  # It leaves later.
    network.serving = {WORKERS[1]}
    processes = {WORKERS[0]: "a", WORKERS[1]: "b"}
    with connecting(network.clusters[2], timeout_secs, lost.put, processes):
        with pytest.raises(queue.Empty):
            lost.get(timeout=0.5)
        network.waiting[WORKERS[1]] = Greeting(WORKERS[1], "b2")
        assert lost.get(timeout=20) == "worker 1 was started again"


def test_server_of_another_task_in_a_place_is_named(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_STRANGER_SECS", 0.5)
    network.tasks[network.clusters[0].address] = WORKERS[1]
    network.serving = {WORKERS[1]}
    with pytest.raises(ClusterError, match=r"worker 0 should serve .* but worker 1"):
        wait_for_peers(network.clusters[2])


class Simulated:
    """A worker, in steps that any other worker may come between; it is killed and started again."""

    def __init__(self, network: Network, index: int) -> None:
        self._network = network
        self._cluster = network.clusters[index]
        self.num_restarts = -1
        self.restart()

    def restart(self) -> None:
        self.num_restarts += 1
        self.processes: Processes | None = None  # Once it has left.
        self.meeting = _Meeting(self._cluster)
        self._network.serving.discard(self._cluster.task)
        self._say()
        self._look = self._looks()

    def proceed(self) -> None:
        next(self._look)

    def _say(self) -> None:
        self._network.waiting[self._cluster.task] = self.meeting.greeting()

    def _looks(self) -> Iterator[None]:
        """As `wait_for_peers` and then `watch_restarts`; others proceed at each yield."""
        others = self._cluster.other_trainers
        while self.processes is None:
            before, found = self.meeting.processes(), []
            for task in others:
                found.append(self.meeting.identify(self._cluster.address_of(task)))
                self._say()
                yield
            if found == list(others) and self.meeting.processes() == before:
                self.processes = before
        del self._network.waiting[self._cluster.task]
        self._network.serving.add(self._cluster.task)
        while True:
            for task in others:
                greeting = self._network.waiting.get(task)
                if greeting and greeting.process != self.processes[task]:
                    self.restart()
                yield


@pytest.mark.parametrize("seed", range(50))
def test_workers_that_die_at_random_meet_once_they_live(seed: int, network: Network) -> None:
    chance = random.Random(seed)
    workers = [Simulated(network, index) for index in range(3)]
    for _ in range(chance.randrange(400)):
        worker = chance.choice(workers)
        if chance.random() < 0.05:
            worker.restart()
        else:
            worker.proceed()
    before = [worker.num_restarts for worker in workers]
    for _ in range(24):
        for worker in chance.sample(workers, len(workers)):
            worker.proceed()
    ids = {task: w.meeting.greeting().process for task, w in zip(WORKERS, workers, strict=True)}
    for task, worker in zip(WORKERS, workers, strict=True):
        assert worker.processes == {other: i for other, i in ids.items() if other != task}
    # Without another death no process may end more than once to meet the others.
    assert all(w.num_restarts - n <= 1 for w, n in zip(workers, before, strict=True))
