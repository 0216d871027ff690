"""The cost model against costs that are known, and its formulas against simulations."""

import dataclasses

import numpy as np
import pytest

from benchmarks import cost_model
from benchmarks.cost_model import STRATEGIES, Costs, Hosts, Point

COSTS = Costs(
    batch=2e-3, message=2e-4, ring_worker=1e-3, ps_step=8e-3, sync_worker=5e-3, sync_step=1e-3
)
SIZES = (1, 2, 4, 10)
CORES = 2
HOSTS = Hosts(
    compute_secs=0.2,
    gradient_bytes=100e6,
    bytes_per_sec=1.25e9,
    message_secs=1e-3,
    apply_secs=0.02,
    straggle=0.2,
    num_ps=4,
)


def points() -> list[Point]:
    return [
        Point(strategy, workers, COSTS.step_secs(strategy, workers, CORES))
        for strategy in STRATEGIES
        for workers in SIZES
    ]


def test_costs_are_found_again_in_steps_that_they_made() -> None:
    found = cost_model.fit(points(), CORES)
    secs = [found.step_secs(point.strategy, point.workers, CORES) for point in points()]
    assert secs == pytest.approx([point.secs for point in points()], rel=1e-3)
    assert found.message == pytest.approx(COSTS.message, rel=0.05)


def test_a_step_is_predicted_from_the_others_and_not_from_itself() -> None:
    measured = points()
    exact = cost_model.predicted_unseen(measured, CORES)
    assert exact == pytest.approx([point.secs for point in measured], rel=0.05)
    wrong = dataclasses.replace(measured[3], secs=5 * measured[3].secs)
    blind = cost_model.predicted_unseen([*measured[:3], wrong, *measured[4:]], CORES)
    assert blind[3] == pytest.approx(measured[3].secs, rel=0.05)


def test_steps_that_do_not_tell_all_costs_are_refused() -> None:
    without_ring = [point for point in points() if point.strategy != STRATEGIES[0]]
    with pytest.raises(ValueError, match="8 steps do not tell 6 costs"):
        cost_model.fit(without_ring, CORES)


def test_ring_hides_the_transfer_as_far_as_the_backward_pass_lasts() -> None:
    # 2 workers send 100 MB in 80 ms, and the backward pass takes 133 ms.
    hidden = HOSTS.exposed_secs(2)
    assert 0.002 < hidden < 0.02
    slow = dataclasses.replace(HOSTS, bytes_per_sec=0.125e9)
    assert slow.exposed_secs(2) == pytest.approx(0.8 - 2 / 3 * 0.2, rel=0.1)
    # A model that fits one bucket is summed after the backward pass.
    small = dataclasses.replace(HOSTS, gradient_bytes=300e3)
    assert small.exposed_secs(2) == pytest.approx(1e-3 + 300e3 / 1.25e9)
    assert HOSTS.exposed_secs(1) == 0


NEAR = dataclasses.replace(HOSTS, gradient_bytes=1e5, message_secs=1e-6)


@pytest.mark.parametrize(
    ("hosts", "workers", "backups", "least", "most"),
    [
        # Transfers are short.
        *((NEAR, workers, 0, 0.98, 1.02) for workers in (1, 8, 64)),
        # Who comes too late begins late, which the formula does not know.
        *((NEAR, workers, backups, 0.9, 1.01) for workers, backups in ((8, 2), (64, 5))),
        # Workers compute while others send: at most the time of one of both directions is gained.
        *((HOSTS, workers, 0, 0.98, 2.0) for workers in (1, 8, 64)),
    ],
)
def test_synchronous_steps_are_nearly_as_drawn(
    hosts: Hosts, workers: int, backups: int, least: float, most: float
) -> None:
    drawn = cost_model.simulated_sync(hosts, workers, backups, steps=2000, seed=1)
    assert least < drawn / hosts.ps_sync(workers, backups) < most


@pytest.mark.parametrize("workers", [1, 4, 8, 12, 16, 32, 256])
def test_asynchronous_workers_are_nearly_as_drawn(workers: int) -> None:
    drawn = cost_model.simulated_async(HOSTS, workers, gradients=20_000, seed=1)
    # Only where nothing or all is in turns, workers do not wait for each other.
    least, most = (0.95, 1.05) if workers in (1, 256) else (0.7, 1.02)
    assert least < drawn / HOSTS.ps_async(workers) < most


@pytest.mark.parametrize("workers", [1, 4, 64])
def test_disturbances_of_many_local_steps_add_up_to_nearly_the_same(workers: int) -> None:
    every, random = 100, np.random.default_rng(1)
    drawn = random.exponential(size=(200, workers, every)).sum(axis=2).max(axis=1).mean()
    secs = HOSTS.compute_secs * (every + HOSTS.straggle * drawn) + every * HOSTS.apply_secs
    assert HOSTS.local_steps(workers, every) == pytest.approx(workers * every / secs, rel=0.03)


def test_sum_of_local_steps_is_hidden_until_it_takes_longer_than_they_do() -> None:
    slow = dataclasses.replace(HOSTS, bytes_per_sec=12.5e6)  # 8 s for a sum over two workers.
    assert slow.local_steps(2, 100) == HOSTS.local_steps(2, 100) > 10 * slow.ring(2)
    assert slow.local_steps(2, 5) == pytest.approx(2 * 5 / 8, rel=0.01)


def test_backups_pay_where_stragglers_cost_more_than_workers() -> None:
    calm = dataclasses.replace(HOSTS, straggle=0.0)
    wild = dataclasses.replace(HOSTS, straggle=2.0)
    assert calm.best_backups(32) == 0
    backups = wild.best_backups(32)
    assert backups > 0
    assert wild.ps_sync(32, backups) > wild.ps_sync(32)
