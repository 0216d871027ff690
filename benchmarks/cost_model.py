"""What a step costs, from 1 to 1,024 workers: a model, and what it is fitted to.

    costs = fit(points, num_cores=2)                    # of benchmarks.run --rows=workers
    costs.step_secs("ps", 4, num_cores=2)               # on one machine, whose cores all share
    Hosts(compute_secs=0.2, ...).ring(64)               # on hosts of their own

On one machine every process takes CPU from the others, so a step takes what all of it costs, over
the cores at work. On hosts of their own, workers compute at the same time, and what counts is the
slowest of them, and the links.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.optimize

RING, ASYNC, SYNC = "multiworker", "ps", "ps --sync_replicas"
STRATEGIES = (RING, ASYNC, SYNC)


@dataclasses.dataclass(frozen=True)
class Point:
    """A step of `strategy` with `workers` took `secs`."""

    strategy: str
    workers: int
    secs: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of CPU.

    Attributes:
        batch: The gradient of a whole batch, whoever computes it.
        message: A small tensor sent, at both ends together.
        ring_worker: All else that a worker of a ring does in a step.
        ps_step: All else that an asynchronous step takes: one worker's, and the parameter server's.
        sync_worker: All else that a worker of a synchronous step does, and is done for it.
        sync_step: What such a step takes once.
    """

    batch: float
    message: float
    ring_worker: float
    ps_step: float
    sync_worker: float
    sync_step: float

    def step_secs(self, strategy: str, workers: int, num_cores: int) -> float:
        """A step where all processes share `num_cores`."""
        shares = _shares(strategy, workers, num_cores)
        return float(sum(share * getattr(self, name) for name, share in shares.items()))


def ring_messages(workers: int, num_bytes: float = 0.0) -> int:
    """One after the other in a sum of so many bytes over a ring.

    Reduce-scatter and all-gather of n - 1 each (Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", 2009); two workers exchange what is small.
    """
    # Here, as it imports TensorFlow.
    from strategies.exchange import LARGE_BYTES

    return 1 if workers == 2 and num_bytes < LARGE_BYTES else 2 * (workers - 1)


def _counts(strategy: str, workers: int) -> dict[str, int]:
    """How often a step of all takes each cost."""
    if strategy == RING:
        messages = workers * ring_messages(workers)
        return {"batch": 1, "message": messages, "ring_worker": workers}
    if strategy == ASYNC:
        return {"batch": 1, "message": 2, "ps_step": 1}
    return {"batch": 1, "message": 2 * workers, "sync_worker": workers, "sync_step": 1}


def _shares(strategy: str, workers: int, num_cores: int) -> dict[str, float]:
    """How much of each cost is in the time of a step: servers work while workers do."""
    busy = min(num_cores, workers if strategy == RING else workers + 1)
    return {name: count / busy for name, count in _counts(strategy, workers).items()}


def fit(points: Sequence[Point], num_cores: int) -> Costs:
    """The costs, none below zero, whose relative errors have the least squares.

    Raises:
        ValueError: the points do not tell all costs.
    """
    names = [field.name for field in dataclasses.fields(Costs)]
    matrix = np.zeros([len(points), len(names)])
    for row, point in enumerate(points):
        for name, share in _shares(point.strategy, point.workers, num_cores).items():
            matrix[row, names.index(name)] = share / point.secs
    if np.linalg.matrix_rank(matrix) < len(names):
        raise ValueError(f"{len(points)} steps do not tell {len(names)} costs apart")
    found, _ = scipy.optimize.nnls(matrix, np.ones(len(points)))
    return Costs(*map(float, found))


def predicted_unseen(points: Sequence[Point], num_cores: int) -> list[float]:
    """Seconds of a step for each of `points`, by costs that were fitted to all others."""
    return [
        fit([*points[:i], *points[i + 1 :]], num_cores).step_secs(
            point.strategy, point.workers, num_cores
        )
        for i, point in enumerate(points)
    ]


def _harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


@dataclasses.dataclass(frozen=True)
class Hosts:
    """A worker on each host, and parameter servers on others. Rates are gradients a second.

    A gradient takes compute_secs * (1 + straggle * E), E exponential with mean 1 and anew for each
    gradient: of n the k-th takes 1/n + 1/(n-1) + ... + 1/(n-k+1) for E (Renyi, "On the theory of
    order statistics", 1953).

    Attributes:
        compute_secs: A worker's gradient, undisturbed.
        gradient_bytes: And of the variables.
        bytes_per_sec: A host's link, each way.
        message_secs: A message, beside its bytes, during which its sender and receiver are busy.
        apply_secs: An update of all variables, on one host.
        straggle: Mean of what disturbs a gradient, in compute_secs.
        num_ps: Parameter servers, each with as many bytes.
        ticket_secs: What the chief is busy with for an asynchronous gradient.
    """

    compute_secs: float
    gradient_bytes: float
    bytes_per_sec: float
    message_secs: float
    apply_secs: float
    straggle: float
    num_ps: int = 1
    ticket_secs: float = 0.0

    @property
    def worker_secs(self) -> float:
        """A worker's link, for a gradient or all variables, however many servers there are."""
        return self.message_secs + self.gradient_bytes / self.bytes_per_sec

    @property
    def server_secs(self) -> float:
        """A server's link, for its part of them."""
        return self.message_secs + self.gradient_bytes / self.bytes_per_sec / self.num_ps

    def _slowest_secs(self, workers: int, backups: int = 0) -> float:
        """Until all but `backups` of them have computed, in the mean."""
        beyond = _harmonic(workers) - _harmonic(backups)
        return self.compute_secs * (1 + self.straggle * beyond)

    def _sum_secs(self, workers: int) -> float:
        """The all-reduce: a ring sends 1/n of the bytes in each message."""
        if workers == 1:
            return 0.0
        messages = ring_messages(workers, self.gradient_bytes)
        num_bytes = 2 * (workers - 1) / workers * self.gradient_bytes
        return messages * self.message_secs + num_bytes / self.bytes_per_sec

    def _serve_secs(self, workers: int) -> float:
        """All variables to so many workers, or their gradients from them."""
        return max(self.worker_secs, workers * self.server_secs)

    def ring(self, workers: int) -> float:
        """Of all workers, in step."""
        step = self._slowest_secs(workers) + self._sum_secs(workers) + self.apply_secs
        return workers / step

    def ps_async(self, workers: int) -> float:
        """At most: what the workers make, and what the busiest of the others lets through."""
        own = self.compute_secs * (1 + self.straggle) + 2 * self.worker_secs
        own += self.apply_secs / self.num_ps
        busy = max(self.server_secs, self.apply_secs / self.num_ps, self.ticket_secs)
        return min(workers / own, 1 / busy if busy else math.inf)

    def ps_sync(self, workers: int, backups: int = 0) -> float:
        """Of the first `workers - backups` of each step, for which alone the servers wait.

        As if links were shared evenly, so that none computes while others send, and who comes too
        late began the next step with the others. Backups are of Chen et al., "Revisiting
        Distributed Synchronous SGD", 2016.
        """
        taken = workers - backups
        step = self._slowest_secs(workers, backups) + self.apply_secs / self.num_ps
        return taken / (step + self._serve_secs(workers) + self._serve_secs(taken))

    def best_backups(self, workers: int) -> int:
        """With how many of them the most gradients a second count."""
        return max(range(workers), key=lambda backups: self.ps_sync(workers, backups))

    def draw(self, random: np.random.Generator) -> float:
        """Seconds of one gradient."""
        return float(self.compute_secs * (1 + self.straggle * random.exponential()))


class _Link:
    """What one at a time may use."""

    def __init__(self, secs: float) -> None:
        self._secs = secs
        self._free = 0.0

    def passed(self, now: float) -> float:
        """When who comes `now` is through."""
        self._free = max(self._free, now) + self._secs
        return self._free


def simulated_sync(hosts: Hosts, workers: int, backups: int, *, steps: int, seed: int) -> float:
    """`ps_sync` worker by worker, served one after the other: some compute while others send.

    A worker whose gradient came too late begins the next step when it has done with that one.
    """
    random = np.random.default_rng(seed)
    out, back = _Link(hosts.server_secs), _Link(hosts.server_secs)
    own = hosts.worker_secs
    ends = [0.0] * workers
    now = 0.0
    for _ in range(steps):
        sent = []
        for worker in sorted(range(workers), key=ends.__getitem__):
            begins = max(now, ends[worker])
            read = max(begins + own, out.passed(begins))
            sent.append((read + hosts.draw(random), worker))
        arrived = []
        for when, worker in sorted(sent):
            ends[worker] = max(when + own, back.passed(when))
            arrived.append(ends[worker])
        now = sorted(arrived)[workers - backups - 1] + hosts.apply_secs / hosts.num_ps
    return (workers - backups) * steps / now


def simulated_async(hosts: Hosts, workers: int, *, gradients: int, seed: int) -> float:
    """`ps_async` worker by worker: each waits for its turn at whatever is busy."""
    random = np.random.default_rng(seed)
    chief, out, back = (
        _Link(secs) for secs in (hosts.ticket_secs, hosts.server_secs, hosts.server_secs)
    )
    update = _Link(hosts.apply_secs / hosts.num_ps)
    own = hosts.worker_secs
    # (when, worker, what comes next): it asks for a ticket and reads; sends; has it applied.
    events = [(0.0, worker, 0) for worker in range(workers)]
    done, warm, since, then = 0, gradients // 5, 0.0, 0.0
    while done < gradients:
        now, worker, stage = heapq.heappop(events)
        if stage == 0:
            asked = chief.passed(now)
            then = max(asked + own, out.passed(asked)) + hosts.draw(random)
        elif stage == 1:
            then = max(now + own, back.passed(now))
        else:
            then = update.passed(now)
            done += 1
            if done == warm:
                since = then
        heapq.heappush(events, (then, worker, (stage + 1) % 3))
    return (gradients - warm) / (then - since)


def points_of(report: dict[str, Any]) -> list[Point]:
    """What benchmarks.run has measured with `--rows=workers`."""
    return [
        Point(row["strategy"], row["workers"], row["ms"]["median"] / 1000)
        for row in report["workers"]
        if row["ms"]
    ]
