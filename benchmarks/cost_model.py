"""A model of the time of a step, for 1 to 1,024 workers, and its fit to measurements.

    costs = fit(points, num_cores=2)                    # measured by benchmarks.run --rows=workers
    costs.step_secs("ps", 4, num_cores=2)               # all workers on one machine
    Hosts(compute_secs=0.2, ...).ring(64)               # one host for each worker

On one machine all processes share the CPU cores, so the time of a step is the sum of all costs,
divided by the number of busy cores. With one host for each worker, the workers compute in parallel,
and the time of a step depends on the slowest worker and on the network links.
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

# The part of a gradient's computation that is the backward pass: two products for each layer, where
# the forward pass has one.
_BACKWARD = 2 / 3


@dataclasses.dataclass(frozen=True)
class Point:
    """A measurement: a step of `strategy` with `workers` takes `secs`."""

    strategy: str
    workers: int
    secs: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """CPU seconds.

    Attributes:
        batch: Gradient of a complete batch, on any number of workers.
        message: Transfer of a small tensor, sender and receiver together.
        ring_worker: Other work of each worker in a step of a ring.
        ps_step: Other work in an asynchronous step, of the worker and the parameter server.
        sync_worker: Other work for each worker in a synchronous step.
        sync_step: Other work in a synchronous step that does not depend on the workers.
    """

    batch: float
    message: float
    ring_worker: float
    ps_step: float
    sync_worker: float
    sync_step: float

    def step_secs(self, strategy: str, workers: int, num_cores: int) -> float:
        """The time of a step if all processes share `num_cores`."""
        shares = _shares(strategy, workers, num_cores)
        return float(sum(share * getattr(self, name) for name, share in shares.items()))


def ring_messages(workers: int, num_bytes: float = 0.0) -> int:
    """Messages of an all-reduce of `num_bytes`, one after the other.

    A reduce-scatter and an all-gather take n - 1 each (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009). Two workers exchange small vectors.
    """
    # Imported here because it imports TensorFlow.
    from strategies.gradients.all_reduce import EXCHANGE_BYTES

    return 1 if workers == 2 and num_bytes < EXCHANGE_BYTES else 2 * (workers - 1)


def _counts(strategy: str, workers: int) -> dict[str, int]:
    """How often a step incurs each cost, over all workers."""
    if strategy == RING:
        messages = workers * ring_messages(workers)
        return {"batch": 1, "message": messages, "ring_worker": workers}
    if strategy == ASYNC:
        return {"batch": 1, "message": 2, "ps_step": 1}
    return {"batch": 1, "message": 2 * workers, "sync_worker": workers, "sync_step": 1}


def _shares(strategy: str, workers: int, num_cores: int) -> dict[str, float]:
    """The part of each cost in the time of a step. Servers and workers run in parallel."""
    busy = min(num_cores, workers if strategy == RING else workers + 1)
    return {name: count / busy for name, count in _counts(strategy, workers).items()}


def fit(points: Sequence[Point], num_cores: int) -> Costs:
    """The non-negative costs with the least sum of squared relative errors.

    Raises:
        ValueError: the points do not determine all costs.
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
    """Seconds of a step for each of `points`, from a fit to all other points."""
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
    """One worker on each host, and parameter servers on other hosts. Rates: gradients a second.

    A gradient takes compute_secs * (1 + straggle * E). E is drawn for each gradient from the
    exponential distribution with mean 1. Of n draws the k-th smallest has the mean
    1/n + 1/(n-1) + ... + 1/(n-k+1) (Renyi, "On the theory of order statistics", 1953).

    Attributes:
        compute_secs: Time of a gradient without disturbance.
        gradient_bytes: Bytes of a gradient, and of all variables.
        bytes_per_sec: Rate of a host's link, in each direction.
        message_secs: Fixed time of a message, during which sender and receiver are busy.
        apply_secs: Time to update all variables on one host.
        straggle: Mean disturbance of a gradient, as a fraction of compute_secs.
        num_ps: Number of parameter servers, which hold equal parts of the variables.
        ticket_secs: Time of the chief for an asynchronous gradient.
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
        """Time on a worker's link for a gradient or for all variables, for any `num_ps`."""
        return self.message_secs + self.gradient_bytes / self.bytes_per_sec

    @property
    def server_secs(self) -> float:
        """Time on a server's link for its part of a gradient or of the variables."""
        return self.message_secs + self.gradient_bytes / self.bytes_per_sec / self.num_ps

    def _slowest_secs(self, workers: int, backups: int = 0) -> float:
        """Mean time until all but `backups` workers have computed a gradient."""
        beyond = _harmonic(workers) - _harmonic(backups)
        return self.compute_secs * (1 + self.straggle * beyond)

    def _sum_secs(self, workers: int) -> float:
        """Time of the all-reduce: a ring of n workers sends 1/n of the bytes in each message."""
        if workers == 1:
            return 0.0
        messages = ring_messages(workers, self.gradient_bytes)
        num_bytes = 2 * (workers - 1) / workers * self.gradient_bytes
        return messages * self.message_secs + num_bytes / self.bytes_per_sec

    def _serve_secs(self, workers: int) -> float:
        """Time to send all variables to `workers` workers, or to receive their gradients."""
        return max(self.worker_secs, workers * self.server_secs)

    def exposed_secs(self, workers: int) -> float:
        """The part of the all-reduce that does not overlap with the backward pass.

        The gradients are summed in buckets (strategies/gradients/all_reduce.py). All but the last
        one overlap, as far as the backward pass lasts.
        """
        # Imported here because it imports TensorFlow.
        from strategies.gradients.all_reduce import Network, best_bucket_mb

        whole = self._sum_secs(workers)
        fixed = ring_messages(workers, self.gradient_bytes) * self.message_secs
        if whole <= fixed:
            return whole
        network = Network(fixed, self.gradient_bytes / (whole - fixed))
        bucket_bytes = best_bucket_mb(int(self.gradient_bytes), network) * 2**20
        num_buckets = max(1.0, self.gradient_bytes / bucket_bytes)
        whole += (num_buckets - 1) * fixed
        return max(whole / num_buckets, whole - _BACKWARD * self.compute_secs)

    def ring(self, workers: int) -> float:
        """Rate of synchronous workers with a ring all-reduce."""
        step = self._slowest_secs(workers) + self.exposed_secs(workers) + self.apply_secs
        return workers / step

    def local_steps(self, workers: int, every: int) -> float:
        """Rate of `every` local steps between two sums that overlap with the next ones.

        `every` disturbances add up to nearly the same on all workers: their sum has the deviation
        sqrt(every) * straggle, and the largest of n normal values is about sqrt(2 ln n) of them
        above the mean. The sum of a round may take as long as the next round computes.
        """
        slowest = math.sqrt(2 * math.log(workers) * every) * self.straggle
        computed = self.compute_secs * (every * (1 + self.straggle) + slowest)
        round_secs = max(computed + every * self.apply_secs, self._sum_secs(workers))
        return workers * every / round_secs

    def ps_async(self, workers: int) -> float:
        """Upper bound: the rate of the workers, limited by the busiest server or the chief."""
        own = self.compute_secs * (1 + self.straggle) + 2 * self.worker_secs
        own += self.apply_secs / self.num_ps
        busy = max(self.server_secs, self.apply_secs / self.num_ps, self.ticket_secs)
        return min(workers / own, 1 / busy if busy else math.inf)

    def ps_sync(self, workers: int, backups: int = 0) -> float:
        """Rate of steps that wait for the first `workers - backups` gradients only.

        Assumes that workers share the links evenly, so that no worker computes while others send,
        and that a late worker starts the next step with the others. Backup workers: Chen et al.,
        "Revisiting Distributed Synchronous SGD", 2016.
        """
        taken = workers - backups
        step = self._slowest_secs(workers, backups) + self.apply_secs / self.num_ps
        return taken / (step + self._serve_secs(workers) + self._serve_secs(taken))

    def best_backups(self, workers: int) -> int:
        """The number of backup workers with the highest rate."""
        return max(range(workers), key=lambda backups: self.ps_sync(workers, backups))

    def draw(self, random: np.random.Generator) -> float:
        """Draws the seconds of one gradient."""
        return float(self.compute_secs * (1 + self.straggle * random.exponential()))


class _Link:
    """A resource that one user at a time can use."""

    def __init__(self, secs: float) -> None:
        self._secs = secs
        self._free = 0.0

    def passed(self, now: float) -> float:
        """The time at which a user that arrives at `now` is done."""
        self._free = max(self._free, now) + self._secs
        return self._free


def simulated_sync(hosts: Hosts, workers: int, backups: int, *, steps: int, seed: int) -> float:
    """Simulates `ps_sync` worker by worker. A server serves one worker after the other.

    So some workers compute while others send. A late worker starts the next step when its late
    gradient has arrived.
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
    """Simulates `ps_async` worker by worker. Each waits in a queue at each busy resource."""
    random = np.random.default_rng(seed)
    chief, out, back = (
        _Link(secs) for secs in (hosts.ticket_secs, hosts.server_secs, hosts.server_secs)
    )
    update = _Link(hosts.apply_secs / hosts.num_ps)
    own = hosts.worker_secs
    # (time, worker, stage). Stages: ask for a ticket and read; send; apply.
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
    """The measurements of `benchmarks.run --rows=workers`."""
    return [
        Point(row["strategy"], row["workers"], row["ms"]["median"] / 1000)
        for row in report["workers"]
        if row["ms"]
    ]
