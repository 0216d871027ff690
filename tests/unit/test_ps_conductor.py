"""The conductor of synchronous parameter servers, with workers that the tests play."""

import concurrent.futures
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from data.order import Order, share
from strategies.ps_conductor import (
    ATTEMPT,
    DROPPED,
    EXAMPLES,
    FINISHED,
    IS_OLD,
    IS_SERVED,
    NUM_COLUMNS,
    REPEATED,
    SHARE,
    Conductor,
)
from strategies.ps_staging import (
    BEGUN,
    DONE,
    END,
    ENDING,
    GIVES_WAY,
    GOES_ON,
    IS_FINAL,
    NOBODYS,
    NOTHING,
    NUDGE,
    STOP,
    Staging,
)
from strategies.wire import Parcel

BATCH = 8
TIMEOUT_SECS = 20.0


class Play:
    """A conductor at work on a variable that adds gradients up, and workers who do as told."""

    def __init__(self, num_slots: int, num_shares: int) -> None:
        self.variable = tf.Variable(0.0)
        self.step = tf.Variable(0, dtype=tf.int64)

        def apply(gradients: list[Any]) -> Any:
            with tf.control_dependencies([self.variable.assign_add(gradients[0])]):
                return self.step.assign_add(1)

        learner: Any = SimpleNamespace(
            step=self.step, variables=[self.variable], metric_names=("loss",), apply=apply
        )
        strategy = tf.distribute.get_strategy()
        order = Order((80,), 8, BATCH, BATCH, window_batches=1, seed=0, shuffle=False)
        lanes = [share(BATCH, index, num_shares) for index in range(num_shares)]
        self.staging = Staging(learner, strategy, num_slots=num_slots)
        self.conductor = Conductor(
            learner, SimpleNamespace(order=order), strategy, self.staging, lanes
        )
        self.num_shares = num_shares
        self.slots = np.zeros([num_slots, NUM_COLUMNS], np.int64)
        self.slots[:, [SHARE, ATTEMPT]] = NOBODYS
        self.numbers = [0, 0, 0]  # Whether shifts end; the next share; the next attempt.
        self.returned: list[int] = []
        self.counts = np.zeros([num_slots, 4], np.int64)
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self.call: concurrent.futures.Future[int] | None = None

    def conduct(self, num_rounds: int) -> concurrent.futures.Future[int]:
        """Starts so many rounds; the future says how many were done."""

        def run() -> int:
            numbers, slots, returned, sums, counts = self.conductor.graph(
                tf.constant([num_rounds, *self.numbers], tf.int64),
                tf.constant(self.slots),
                tf.constant(self.returned, tf.int64, [len(self.returned)]),
            )
            num_done, *self.numbers = numbers.numpy().tolist()
            self.slots, self.returned = slots.numpy(), returned.numpy().tolist()
            self.sums = sums.numpy()
            self.counts += counts.numpy()
            return int(num_done)

        self.call = self._pool.submit(run)
        return self.call

    def close(self) -> None:
        if self.call and not self.call.done():
            self.tell(STOP)
            self.call.result(TIMEOUT_SECS)
        self._pool.shutdown()

    def tell(self, kind: int) -> None:
        self.staging.send_kinds([kind] + [NOTHING] * (self.num_shares - 1))

    def begin(self, slot: int) -> None:
        """A shift of `slot` begins, of the worker of that number."""
        found = int(self.staging.num_given(slot))
        self.staging.send(tf.constant([BEGUN, slot, found, slot, 0], tf.int64))

    def begin_all(self) -> None:
        for slot in range(len(self.slots)):
            self.begin(slot)
        if len(self.slots) % self.num_shares:
            self.fill_up()

    def order(self, slot: int) -> list[int]:
        """The next order of `slot`: attempt, share, last, step."""
        deadline = time.monotonic() + TIMEOUT_SECS
        while not int(self.staging.num_given(slot)):
            assert time.monotonic() < deadline, f"no order for slot {slot}"
            time.sleep(0.001)
        found: list[int] = self.staging.take(self.staging.orders[slot]).numpy().tolist()
        return found

    def orders(self, *slots: int) -> list[list[int]]:
        return [self.order(slot) for slot in slots]

    def fill_up(self) -> None:
        """Messages are taken n at a time: with this what was sent before is heard now."""
        for _ in range(self.num_shares - 1):
            self.staging.send(tf.constant([NOTHING, 0, 0, 0, 0], tf.int64))

    def stage(self, slot: int, order: list[int], gradient: float) -> Any:
        message = tf.constant([DONE, slot, order[0], slot, order[3]], tf.int64)
        parcel = Parcel(self.variable.device, {0: tf.constant(gradient)}, [message])
        (lock,) = self.staging.locks(slot)
        self.staging.put(parcel, lock)
        return message

    def done(self, slot: int, order: list[int], gradient: float) -> None:
        """The worker of `slot` has computed what it was ordered: `gradient`, also its loss."""
        message = self.stage(slot, order, gradient)
        self.staging.send(message, tf.constant([[gradient, 1.0]], tf.float64))

    def ended(self, slot: int) -> None:
        """The shift of `slot` has found ENDING."""
        self.staging.send(tf.constant([DONE, slot, END, slot, NOBODYS], tf.int64))


@pytest.fixture
def two() -> Iterator[Play]:
    play = Play(2, 2)
    yield play
    play.close()


@pytest.fixture
def backed() -> Iterator[Play]:
    """Two of three."""
    play = Play(3, 2)
    yield play
    play.close()


def test_who_writes_to_a_slot_waits_for_another_who_does(two: Play) -> None:
    (tags,) = two.staging._tags.values()
    (lock,) = two.staging.locks(0)
    held = [tf.raw_ops.MutexLock(mutex=lock)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        writing = pool.submit(two.stage, 0, [7, 0, GOES_ON, 3], 1.0)
        # Another slot is free.
        two.stage(1, [8, 1, GOES_ON, 3], 1.0)
        time.sleep(0.1)
        was_written, seen = writing.done(), tags.numpy().tolist()
        held.clear()
        writing.result(TIMEOUT_SECS)
    assert not was_written
    assert seen == [[-1, -1], [8, 3]]
    assert tags.numpy().tolist() == [[7, 3], [8, 3]]


def test_each_round_sums_a_share_of_each_and_the_last_orders_say_so(two: Play) -> None:
    call = two.conduct(3)
    two.begin_all()
    for number in range(3):
        first, second = two.orders(0, 1)
        assert {first[1], second[1]} == {2 * number, 2 * number + 1}
        assert first[2] == second[2] == (IS_FINAL if number == 2 else GOES_ON)
        assert first[3] == second[3] == number
        # Whoever comes first.
        for slot in ((0, 1), (1, 0))[number % 2]:
            two.done(slot, (first, second)[slot], 10.0**number)
    assert call.result(TIMEOUT_SECS) == 3
    assert float(two.variable) == 2 * 111.0
    assert int(two.step) == 3
    assert two.sums.tolist() == [[222.0, 6.0]]
    assert two.counts[:, FINISHED].tolist() == [3, 3]
    assert two.counts[:, EXAMPLES].tolist() == [3 * BATCH // 2] * 2
    assert (two.slots[:, SHARE] == NOBODYS).all()
    assert not two.slots[:, IS_SERVED].any()
    assert [int(two.staging.num_given(slot)) for slot in range(2)] == [0, 0]


def test_late_gradient_is_dropped_and_its_share_is_given_again(backed: Play) -> None:
    call = backed.conduct(2)
    backed.begin_all()
    of_slots = backed.orders(0, 1, 2)
    lost = of_slots[2][1]
    for slot in (0, 1):
        backed.done(slot, of_slots[slot], 1.0)
    of_slots[:2] = backed.orders(0, 1)
    assert [order[2:] for order in of_slots[:2]] == [[IS_FINAL, 1]] * 2
    backed.done(2, of_slots[2], 1000.0)
    backed.fill_up()
    # Who was late gets another one, which it may be in time with.
    another = backed.order(2)
    assert another[1] not in {order[1] for order in of_slots}
    for slot in (0, 1):
        backed.done(slot, of_slots[slot], 1.0)
    assert call.result(TIMEOUT_SECS) == 2
    assert float(backed.variable) == 4.0
    assert backed.returned == [lost]
    assert backed.counts[:, DROPPED].tolist() == [0, 0, 1]
    assert backed.slots[:, SHARE].tolist() == [NOBODYS, NOBODYS, another[1]]

    # In the next call it comes first.
    backed.conduct(1)
    backed.begin(0)
    backed.fill_up()
    assert backed.order(0)[1] == lost


def test_round_whose_gradient_was_written_over_is_done_again(two: Play) -> None:
    call = two.conduct(1)
    two.begin_all()
    first, second = two.orders(0, 1)
    two.done(0, first, 1.0)
    # One that passed for lost still writes.
    two.stage(0, [first[0] - 1, *first[1:]], 1000.0)
    two.done(1, second, 1.0)
    # These were the last orders of their shifts, which begin anew.
    two.begin_all()
    first, second = two.orders(0, 1)
    assert {first[1], second[1]} == {0, 1}
    assert first[3] == second[3] == 0
    assert float(two.variable) == 0.0
    two.done(0, first, 1.0)
    two.done(1, second, 1.0)
    assert call.result(TIMEOUT_SECS) == 1
    assert float(two.variable) == 2.0
    assert two.sums.tolist() == [[2.0, 2.0]]
    assert two.counts[:, REPEATED].tolist() == [1, 1]
    assert two.counts[:, FINISHED].tolist() == [1, 1]


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "not taken"])
def test_shift_that_begins_again_gets_the_share_that_was_lost(two: Play, taken: bool) -> None:
    call = two.conduct(2)
    two.begin_all()
    second = two.order(1)
    first = two.order(0) if taken else None
    # Worker 0 is lost, with the order or before it took it; its shift begins anew.
    two.begin(0)
    two.fill_up()
    again = two.order(0)
    if first is not None:
        assert again[0] > first[0]
        assert again[1] == first[1]
        # What the lost one still sends is nobody's.
        two.done(0, first, 1000.0)
    assert {again[1], second[1]} == {0, 1}
    two.done(0, again, 1.0)
    two.done(1, second, 1.0)
    assert two.orders(0, 1)[0][1:] == [2, IS_FINAL, 1]
    assert float(two.variable) == 2.0
    two.tell(STOP)
    assert call.result(TIMEOUT_SECS) == 1


def test_nudged_the_shift_that_waits_ends_and_orders_are_the_last(two: Play) -> None:
    """A worker that is there does the shares of both, one shift after the other."""
    call = two.conduct(1)
    two.begin(0)
    two.fill_up()
    first = two.order(0)
    two.tell(NUDGE)
    # Each slot without an order; the one that computes finds it when it has done its share.
    assert two.orders(0, 1) == [list(ENDING)] * 2
    two.done(0, first, 1.0)
    two.ended(0)
    two.begin(1)
    second = two.order(1)
    assert second[2] == IS_FINAL
    assert {first[1], second[1]} == {0, 1}
    two.done(1, second, 1.0)
    assert call.result(TIMEOUT_SECS) == 1
    assert two.numbers[0] == 1

    # While shifts end, in the next call too.
    two.conduct(2)
    two.begin(0)
    assert two.order(0)[2] == GIVES_WAY


def test_stopped_it_says_what_is_in_flight(two: Play) -> None:
    call = two.conduct(5)
    two.begin_all()
    first, second = two.orders(0, 1)
    two.done(0, first, 1.0)
    two.tell(STOP)
    assert call.result(TIMEOUT_SECS) == 0
    assert sorted(two.slots[:, SHARE].tolist()) == [0, 1]
    assert float(two.variable) == 0.0
    assert two.numbers[1] == 2
    assert second[1] in two.slots[:, SHARE]


def test_shift_of_a_former_call_ends_with_what_it_has_in_hand(backed: Play) -> None:
    call = backed.conduct(1)
    backed.begin_all()
    of_slots = backed.orders(0, 1, 2)
    for slot in (0, 1):
        backed.done(slot, of_slots[slot], 1.0)
    assert call.result(TIMEOUT_SECS) == 1
    backed.slots[2, IS_OLD] = 1

    call = backed.conduct(2)
    backed.done(2, of_slots[2], 1000.0)  # Late.
    # It had been told that its order was the last one, so it gets none.
    assert of_slots[2][2] == IS_FINAL
    for slot in (0, 1):
        backed.begin(slot)
    backed.fill_up()
    of_slots[:2] = backed.orders(0, 1)
    assert int(backed.staging.num_given(2)) == 0
    for slot in (0, 1):
        backed.done(slot, of_slots[slot], 1.0)
    of_slots[:2] = backed.orders(0, 1)
    assert [order[2] for order in of_slots[:2]] == [IS_FINAL, IS_FINAL]
    for slot in (0, 1):
        backed.done(slot, of_slots[slot], 1.0)
    assert call.result(TIMEOUT_SECS) == 2
    assert not backed.slots[2, IS_OLD]
    assert float(backed.variable) == 6.0
