"""The cost model against costs that are known, and its formulas against simulations."""

import dataclasses

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


def points(factor: float = 1.0) -> list[Point]:
    return [
        Point(strategy, workers, factor * COSTS.step_secs(strategy, workers, CORES))
        for strategy in STRATEGIES
        for workers in SIZES
    ]


def test_costs_are_found_again_in_steps_that_they_made() -> None:
    found = cost_model.fit(points(), CORES)
    for point in points():
        secs = found.step_secs(point.strategy, point.workers, CORES)
        assert secs == pytest.approx(point.secs, rel=1e-3)
    assert found.message == pytest.approx(COSTS.message, rel=0.05)


def test_a_step_is_predicted_from_the_others_and_not_from_itself() -> None:
    measured = points()
    exact = cost_model.predicted_unseen(measured, CORES)
    assert exact == pytest.approx([point.secs for point in measured], rel=0.05)
    wrong = dataclasses.replace(measured[3], secs=5 * measured[3].secs)
    blind = cost_model.predicted_unseen([*measured[:3], wrong, *measured[4:]], CORES)
    assert blind[3] == pytest.approx(measured[3].secs, rel=0.05)


def test_a_ring_sends_both_ways_and_two_workers_once() -> None:
    assert [cost_model.ring_messages(n) for n in (2, 3, 4, 10)] == [1, 4, 6, 18]


def test_without_price_and_stragglers_all_is_linear() -> None:
    free = dataclasses.replace(
        HOSTS, gradient_bytes=0, message_secs=0.0, apply_secs=0.0, straggle=0.0
    )
    for rate in (free.ring, free.ps_async, free.ps_sync):
        for workers in (1, 7, 1024):
            assert rate(workers) == pytest.approx(workers / 0.2)
    assert free.best_backups(64) == 0


@pytest.mark.parametrize(("workers", "backups"), [(1, 0), (8, 0), (8, 2), (64, 5)])
def test_formula_of_synchronous_steps_is_what_drawn_gradients_take(
    workers: int, backups: int
) -> None:
    drawn = cost_model.simulated_sync(HOSTS, workers, backups, steps=20_000, seed=1)
    assert HOSTS.ps_sync(workers, backups) == pytest.approx(drawn, rel=0.01)


@pytest.mark.parametrize("workers", [1, 4, 256])
def test_asynchronous_workers_reach_the_formula_where_nothing_or_all_is_in_turns(
    workers: int,
) -> None:
    drawn = cost_model.simulated_async(HOSTS, workers, gradients=20_000, seed=1)
    assert HOSTS.ps_async(workers) == pytest.approx(drawn, rel=0.05)


def test_asynchronous_workers_in_between_wait_for_each_other() -> None:
    """The formula is what cannot be passed."""
    for workers in (8, 12, 16, 32):
        drawn = cost_model.simulated_async(HOSTS, workers, gradients=20_000, seed=1)
        assert 0.7 * HOSTS.ps_async(workers) < drawn < 1.02 * HOSTS.ps_async(workers)


def test_backups_pay_where_stragglers_cost_more_than_workers() -> None:
    calm = dataclasses.replace(HOSTS, straggle=0.0)
    wild = dataclasses.replace(HOSTS, straggle=2.0)
    assert calm.best_backups(32) == 0
    backups = wild.best_backups(32)
    assert backups > 0
    assert wild.ps_sync(32, backups) > wild.ps_sync(32)
