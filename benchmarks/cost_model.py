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
from collections.abc import Callable, Sequence
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
        return sum(self.parts(strategy, workers, num_cores).values())

    def parts(self, strategy: str, workers: int, num_cores: int) -> dict[str, float]:
        """What of `step_secs` each cost makes up."""
        counts = _counts(strategy, workers)
        return {
            name: count * getattr(self, name) / min(num_cores, workers)
            for name, count in counts.items()
        }


def ring_messages(workers: int) -> int:
    """One after the other in a sum over a ring; two workers exchange all (strategies/exchange.py).

    Reduce-scatter and all-gather of n - 1 each (Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", 2009).
    """
    return 1 if workers == 2 else 2 * (workers - 1)


def _counts(strategy: str, workers: int) -> dict[str, int]:
    """How often a step of all takes each cost."""
    if strategy == RING:
        messages = workers * ring_messages(workers)
        return {"batch": 1, "message": messages, "ring_worker": workers}
    if strategy == ASYNC:
        return {"batch": 1, "message": 2, "ps_step": 1}
    return {"batch": 1, "message": 2 * workers, "sync_worker": workers, "sync_step": 1}


def fit(points: Sequence[Point], num_cores: int) -> Costs:
    """The costs, none below zero, whose relative errors have the least squares."""
    names = [field.name for field in dataclasses.fields(Costs)]
    matrix = np.zeros([len(points), len(names)])
    for row, point in enumerate(points):
        for name, count in _counts(point.strategy, point.workers).items():
            share = count / min(num_cores, point.workers) / point.secs
            matrix[row, names.index(name)] = share
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
        message_secs: A message, beside its bytes.
        apply_secs: An update of all variables, on one host.
        straggle: Mean of what disturbs a gradient, in compute_secs.
        num_ps: Parameter servers, each with as many bytes.
    """

    compute_secs: float
    gradient_bytes: float
    bytes_per_sec: float
    message_secs: float
    apply_secs: float
    straggle: float
    num_ps: int = 1

    @property
    def _transfer_secs(self) -> float:
        """A gradient over one link."""
        return self.gradient_bytes / self.bytes_per_sec

    def _slowest_secs(self, workers: int, backups: int = 0) -> float:
        """Until all but `backups` of them have computed, in the mean."""
        beyond = _harmonic(workers) - _harmonic(backups)
        return self.compute_secs * (1 + self.straggle * beyond)

    def _sum_secs(self, workers: int) -> float:
        """The all-reduce: a ring sends 1/n of the bytes in each message."""
        if workers == 1:
            return 0.0
        messages = ring_messages(workers)
        share = 1.0 if workers == 2 else 1 / workers
        return messages * (self.message_secs + share * self._transfer_secs)

    def _serve_secs(self, sends: int) -> float:
        """Until `sends` copies of all have passed the links of the parameter servers."""
        own = self.message_secs + self._transfer_secs / self.num_ps
        return max(own, sends * self._transfer_secs / self.num_ps)

    def ring(self, workers: int) -> float:
        """Of all workers, in step."""
        step = self._slowest_secs(workers) + self._sum_secs(workers) + self.apply_secs
        return workers / step

    def ps_async(self, workers: int) -> float:
        """As many as the workers make, or as the links or updates of the servers let through."""
        own = self.compute_secs * (1 + self.straggle) + 2 * self._serve_secs(1)
        own += self.apply_secs / self.num_ps
        busy = max(self._transfer_secs, self.apply_secs) / self.num_ps
        return min(workers / own, 1 / busy if busy else math.inf)

    def ps_sync(self, workers: int, backups: int = 0) -> float:
        """Of the first `workers - backups` of each step, for which alone the servers wait.

        Chen et al., "Revisiting Distributed Synchronous SGD", 2016.
        """
        taken = workers - backups
        step = self._slowest_secs(workers, backups) + self.apply_secs / self.num_ps
        return taken / (step + self._serve_secs(workers) + self._serve_secs(taken))

    def best_backups(self, workers: int) -> int:
        """With how many of them the most gradients a second count."""
        return max(range(workers), key=lambda backups: self.ps_sync(workers, backups))


def simulated_sync(hosts: Hosts, workers: int, backups: int, *, steps: int, seed: int) -> float:
    """`ps_sync` with gradients drawn one by one."""
    random = np.random.default_rng(seed)
    drawn = hosts.compute_secs * (1 + hosts.straggle * random.exponential(size=(steps, workers)))
    taken = workers - backups
    waited = float(np.partition(drawn, taken - 1, axis=1)[:, taken - 1].mean())
    still = dataclasses.replace(hosts, compute_secs=0.0)
    return taken / (waited + taken / still.ps_sync(workers, backups))


def simulated_async(hosts: Hosts, workers: int, *, gradients: int, seed: int) -> float:
    """`ps_async`, worker by worker: each waits for its turn on the servers' link and to apply."""
    random = np.random.default_rng(seed)

    def compute() -> float:
        return float(hosts.compute_secs * (1 + hosts.straggle * random.exponential()))

    transfer = hosts._transfer_secs / hosts.num_ps
    # When each is done with: sending variables, taking gradients, applying them.
    free = [0.0, 0.0, 0.0]
    stages = (transfer, transfer, hosts.apply_secs / hosts.num_ps)
    # (when, worker, what it waits for); between the first two it computes.
    events = [(0.0, worker, 0) for worker in range(workers)]
    done, warm, since = 0, gradients // 5, 0.0
    while done < gradients:
        now, worker, stage = heapq.heappop(events)
        free[stage] = max(free[stage], now) + stages[stage]
        then = free[stage] + (hosts.message_secs if stage < 2 else 0.0)
        if stage == 0:
            then += compute()
        if stage == 2:
            done += 1
            if done == warm:
                since = then
        heapq.heappush(events, (then, worker, (stage + 1) % 3))
    return (gradients - warm) / (then - since)


def lines(hosts: Hosts) -> dict[str, Callable[[int], float]]:
    """What is compared: gradients a second by the number of workers."""
    return {
        "ring": hosts.ring,
        "ps, asynchronous": hosts.ps_async,
        "ps, synchronous": hosts.ps_sync,
        "ps, synchronous, best backups": lambda n: hosts.ps_sync(n, hosts.best_backups(n)),
    }


def points_of(report: dict[str, Any]) -> list[Point]:
    """What benchmarks.run has measured with `--rows=workers`."""
    return [
        Point(row["strategy"], row["workers"], row["ms"]["median"] / 1000)
        for row in report["workers"]
        if row["ms"]
    ]
