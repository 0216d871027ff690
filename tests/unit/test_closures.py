"""Closures: how the steps of a call are divided, what is scheduled, what is returned."""

import itertools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from strategies.lost_peers import PeerLostError
from strategies.pace import Pace
from strategies.ps.asynchronous import AsynchronousExecutor
from strategies.ps.asynchronous_steps import AsynchronousSteps, Sent
from strategies.ps.closures import (
    Closure,
    closure_size,
    closure_sizes,
    fetched,
    packed,
    pays_unrolling,
    unpacked,
)


def windows_of(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Windows of these lengths, then endless windows of the last length."""
    first = 0
    for length in itertools.chain(lengths, itertools.repeat(lengths[-1])):
        yield first, length
        first += length


@given(st.integers(1, 400), st.integers(1, 9), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_closures_share_the_steps_among_all_workers_and_end_where_windows_end(
    num_steps: int, num_workers: int, lengths: list[int]
) -> None:
    most = closure_size(num_steps, num_workers, 0.001)
    sizes = list(closure_sizes(num_steps, most, windows_of(lengths)))
    assert sum(sizes) == num_steps
    assert min(sizes) >= 1
    assert max(sizes) <= max(1, num_steps // num_workers)
    assert len(sizes) >= min(num_steps, num_workers)
    window_ends = set()
    for first, length in windows_of(lengths):
        if first >= num_steps:
            break
        window_ends.add(min(first + length, num_steps))
    assert window_ends <= set(itertools.accumulate(sizes))


class Scheduled:
    """A remote value that gives these answers to `fetch`, one after the other."""

    def __init__(self, *answers: int | Exception | None) -> None:
        self._answers = list(answers)

    def fetch(self) -> int | None:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_result_that_the_coordinator_dropped_is_lost() -> None:
    assert fetched(Scheduled(0)) == 0
    with pytest.raises(PeerLostError, match="The result of a worker was lost: no such handle"):
        fetched(Scheduled(None, None, ValueError("no such handle")))
    with pytest.raises(ValueError, match="of the function"):
        fetched(Scheduled(ValueError("of the function")))


def test_result_that_cannot_be_copied_is_awaited_from_another_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("strategies.ps.closures._COPY_AGAIN_SECS", 0.01)
    copies = [tf.errors.UnavailableError(None, None, "Socket closed") for _ in range(2)]
    assert fetched(Scheduled(*copies, 3)) == 3
    failed = tf.errors.UnavailableError(None, None, "of the closure")
    with pytest.raises(tf.errors.UnavailableError, match="of the closure"):
        fetched(Scheduled(copies[0], failed, failed))


class Coordinator:
    """Runs a function when it is scheduled, and records it."""

    def __init__(self) -> None:
        # Not the default strategy: in its scope a function is traced again.
        self.strategy = tf.distribute.OneDeviceStrategy("CPU:0")
        self.scheduled: list[Any] = []

    def schedule(self, function: Any, args: tuple[Any, ...]) -> Any:
        self.scheduled.append(function)
        with self.strategy.scope():
            return function(*args)


@pytest.mark.parametrize("is_traced_before", [False, True])
def test_function_is_traced_once_and_then_scheduled_as_a_concrete_function(
    is_traced_before: bool,
) -> None:
    traced = []

    @tf.function(input_signature=[{"gather": tf.TensorSpec([None], tf.int64)}])
    def function(ticket: Any) -> Any:
        traced.append(ticket)
        return tf.reduce_sum(ticket["gather"])

    coordinator, closure = Coordinator(), Closure(function)
    assert (closure.trace_secs, closure.is_traced) == (0, False)
    if is_traced_before:
        closure.trace(coordinator.strategy)
        assert (len(traced), closure.is_traced) == (1, True)
    tickets = [{"gather": tf.range(size, dtype=tf.int64)} for size in (3, 4, 5)]
    sums = [int(closure.schedule(coordinator, ticket)) for ticket in tickets]
    assert sums == [3, 6, 10]
    assert len(traced) == 1
    assert closure.trace_secs > 0
    with coordinator.strategy.scope():
        assert coordinator.scheduled == [function.get_concrete_function()] * 3


def test_graph_is_unrolled_only_if_one_step_was_traced_fast() -> None:
    assert [pays_unrolling(*fast) for fast in ((16, 0.3), (4, 4.0))] == [True, True]
    # 16 copies of EfficientNetV2B0 would take minutes. Without a time, the loop is traced first.
    for num_steps, secs in ((16, 10.0), (4, 10.0), (16, 0.0), (1, 0.3)):
        assert not pays_unrolling(num_steps, secs)


@pytest.mark.parametrize(
    ("secs_per_step", "size"), [(None, 1), (0.01, 16), (0.5, 16), (0.6, 4), (2.0, 4), (2.1, 1)]
)
def test_closures_of_long_steps_have_few_so_that_a_stop_request_does_not_wait_for_long(
    secs_per_step: float | None, size: int
) -> None:
    assert closure_size(1000, 2, secs_per_step) == size
    assert closure_size(6, 2, secs_per_step) == min(size, 3)


def test_unpacked_inverts_packed_and_totals_of_dropped_gradients_are_left_out() -> None:
    totals = tf.constant([[0.1, 300.0, 1e-9, 2.0**40], [9.0] * 4, [1.0] * 4], tf.float64)
    ages = tf.constant([0, -1, 2**40], tf.int64)
    result = packed(totals, tf.constant(7, tf.int64), ages).numpy()
    sums, worker, found_ages = unpacked(result, 4)
    np.testing.assert_array_equal(sums, totals[0] + totals[2])
    assert worker == 7
    assert found_ages.dtype == np.int64
    assert found_ages.tolist() == [0, -1, 2**40]


def test_first_call_of_asynchronous_workers_has_tickets_for_all_of_them() -> None:
    """Otherwise the time in which the last one gets its graph counts as the time of a step."""

    class Alone(AsynchronousExecutor):
        def __init__(self) -> None:
            self.pace, self.num_replicas = Pace(), 3

    assert Alone()._steps_of_call(100) == 6


def test_count_of_the_former_step_does_not_leave_the_server() -> None:
    """Variables are read after it: otherwise each unrolled step would wait for a round trip."""
    server = "/job:ps/replica:0/task:0/device:CPU:0"
    befores: list[tf.Tensor] = []

    class Steps(AsynchronousSteps):
        def __init__(self) -> None:
            self.learner = types.SimpleNamespace(step=types.SimpleNamespace(device=server))

        def _read_counter(self) -> tf.Tensor:
            with tf.device(server):
                return tf.random.uniform([], 0, 9, tf.int64)

        def _compute(self, batch: Any, before: tf.Tensor, former: Any) -> Any:
            befores.append(before)
            return Sent([], [tf.constant(1.0)]), tf.constant(0.0)

        def _apply_and_count(self, *arguments: Any) -> tf.Tensor:
            return tf.constant(0)

    with tf.Graph().as_default():
        steps, former = Steps(), None
        for _ in range(3):
            _, _, former = steps._unbounded_step((), tf.constant(0), former)
    assert [before.device for before in befores] == [server] * 3
