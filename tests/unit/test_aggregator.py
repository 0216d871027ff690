"""The aggregator of synchronous parameter servers, with workers that the tests play."""

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from data.order import Order, replica_lanes
from strategies.gradients.coalescing import Bucket
from strategies.ps.former_rounds import kept_values
from strategies.ps.former_state import NamedTensors
from strategies.ps.protocol import (
    END,
    END_ASSIGNMENT,
    IDLE,
    NONE,
    Counters,
    EndReason,
    Kind,
    Message,
    Progress,
    WorkerSlot,
    pack,
    unpack,
)
from strategies.ps.sync.aggregator import Aggregator, Verdict, judge
from strategies.ps.sync.gradient_buffers import GradientBuffers

BATCH = 8
TIMEOUT_SECS = 20.0


def learner_of(step: tf.Variable, *variables: tf.Variable, num_dense: int, **parts: Any) -> Any:
    """What an aggregator needs of a Learner."""
    return SimpleNamespace(
        step=step,
        variables=list(variables),
        num_dense=num_dense,
        num_totals=2,
        virtual_replicas=0,
        **parts,
    )


class Play:
    """An aggregator on a variable that adds gradients up, and workers that the test controls."""

    def __init__(self, num_slots: int, num_sub_batches: int) -> None:
        self.variable = tf.Variable(0.0)
        self.step = tf.Variable(0, dtype=tf.int64)

        def apply(gradients: list[Any]) -> Any:
            with tf.control_dependencies([self.variable.assign_add(gradients[0])]):
                return self.step.assign_add(1)

        learner = learner_of(self.step, self.variable, num_dense=1, apply=apply)
        strategy = tf.distribute.get_strategy()
        order = Order((80,), 8, BATCH, BATCH, window_batches=1, seed=0, shuffle=False)
        source: Any = SimpleNamespace(order=order)
        lanes = [replica_lanes(BATCH, index, num_sub_batches) for index in range(num_sub_batches)]
        self.buffers = GradientBuffers(learner, strategy, num_slots=num_slots)
        self.stored = NamedTensors(self.step.device, f"rounds of {self.buffers.name}")
        self.aggregator = Aggregator(learner, source, strategy, self.buffers, lanes, self.stored)
        self.num_sub_batches = num_sub_batches
        self.num_slots = num_slots
        self.slots = WorkerSlot(*np.tile(np.array(IDLE)[:, np.newaxis], num_slots))
        self.progress = Progress(0, 0, 0, 0)
        self.returned: list[int] = []
        self.counters = Counters(*np.zeros([4, num_slots], np.int64))
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self.call: concurrent.futures.Future[int] | None = None

    def run(self, num_rounds: int) -> concurrent.futures.Future[int]:
        """Starts `num_rounds`; the future is the number of rounds that were done."""

        def run() -> int:
            progress, slots, returned, totals, counters = self.aggregator.graph(
                tf.constant(self.progress._replace(num_rounds=num_rounds), tf.int64),
                pack(self.slots),
                tf.constant(self.returned, tf.int64, [len(self.returned)]),
                pack(self.counters),
            )
            self.progress = Progress(*progress.numpy().tolist())
            self.slots = WorkerSlot(*slots.numpy().T.copy())
            self.returned = returned.numpy().tolist()
            self.totals = totals.numpy()
            self.counters = Counters(*counters.numpy().T.copy())
            return int(self.progress.num_rounds)

        self.call = self._pool.submit(run)
        return self.call

    def close(self) -> None:
        if self.call and not self.call.done():
            self.tell(Kind.STOP)
            self.call.result(TIMEOUT_SECS)
        self._pool.shutdown()

    def tell(self, kind: Kind) -> None:
        self.buffers.tell(kind, self.num_sub_batches)

    def begin(self, slot: int) -> None:
        """A worker loop of `slot` begins, on the worker of that number."""
        found = int(self.buffers.num_queued(slot))
        self.buffers.send(tf.constant([Kind.BEGUN, slot, found, slot, 0], tf.int64))

    def begin_all(self) -> None:
        for slot in range(self.num_slots):
            self.begin(slot)
        if self.num_slots % self.num_sub_batches:
            self.fill_up()

    def assignment(self, slot: int) -> list[int]:
        """The next assignment of `slot`: attempt, sub-batch, last, step."""
        deadline = time.monotonic() + TIMEOUT_SECS
        while not int(self.buffers.num_queued(slot)):
            assert time.monotonic() < deadline, f"no assignment for slot {slot}"
            time.sleep(0.001)
        found: list[int] = self.buffers.take(self.buffers.queues[slot]).numpy().tolist()
        return found

    def assignments(self, *slots: int) -> list[list[int]]:
        return [self.assignment(slot) for slot in slots]

    def fill_up(self) -> None:
        """Messages are taken n at a time: after this, all messages sent before are handled."""
        for _ in range(self.num_sub_batches - 1):
            self.buffers.send(tf.constant([Kind.NOTHING, 0, 0, 0, 0], tf.int64))

    def write(self, slot: int, assignment: list[int], gradient: float) -> Any:
        message = tf.constant([Kind.DONE, slot, assignment[0], slot, assignment[3]], tf.int64)
        bucket = Bucket(self.variable.device, {0: tf.constant(gradient)}, [message])
        (lock,) = self.buffers.locks[slot]
        self.buffers.write(bucket, lock, {})
        return message

    def done(self, slot: int, assignment: list[int], gradient: float) -> None:
        """The worker of `slot` has computed its assignment: `gradient`, which is also its loss."""
        message = self.write(slot, assignment, gradient)
        self.buffers.send(message, tf.constant([gradient, 1.0], tf.float64))

    def first_two_done(self, assignments: list[list[int]]) -> None:
        """The workers of slots 0 and 1 have computed their `assignments`: 1.0 each."""
        for slot, assignment in enumerate(assignments[:2]):
            self.done(slot, assignment, 1.0)

    def ended(self, slot: int) -> None:
        """The worker loop of `slot` has taken END_ASSIGNMENT."""
        self.buffers.send(tf.constant([Kind.DONE, slot, END, slot, NONE], tf.int64))


@pytest.fixture
def two() -> Iterator[Play]:
    with contextlib.closing(Play(2, 2)) as play:
        yield play


@pytest.fixture
def backed() -> Iterator[Play]:
    """Two of three."""
    with contextlib.closing(Play(3, 2)) as play:
        yield play


def test_small_values_before_a_step_are_kept_on_several_servers_unless_there_are_tables() -> None:
    first, second = "CPU:0", "CPU:1"
    with tf.device(first):
        step, one = tf.Variable(7, dtype=tf.int64), tf.Variable([1.0, 2.0])
    with tf.device(second):
        other = tf.Variable([[3.0]])
        just_small, large = (tf.Variable(tf.zeros([(1 << 18) + more])) for more in (0, 1))

    def begin(variables: list[tf.Variable], num_dense: int, sums: list[Any]) -> Any:
        """Begins step 8; returns the gradients, and the values that were kept on the first."""
        learner = learner_of(step, *variables, num_dense=num_dense)
        made = GradientBuffers(learner, tf.distribute.get_strategy(), num_slots=1)
        made.keep([step, *variables])
        gradients = tf.function(made.begun)(sums, tf.constant(8))
        assert [int(mark.numpy()) for mark in made.marks] == [8, 8]
        return gradients, kept_values(one.device).load([tf.int64, tf.int64, tf.float32])

    ones = tf.ones([2])
    gradients, kept = begin([one, other], 2, [ones, tf.ones([1, 1])])
    assert [gradient.numpy().tolist() for gradient in gradients] == [[1.0, 1.0], [[1.0]]]
    one.assign_add([10.0, 10.0])
    number, counted, weight = kept
    assert (int(number), int(counted), weight.numpy().tolist()) == (7, 7, [1.0, 2.0])

    assert begin([one, just_small], 2, [ones, just_small.value()])[1] is not None
    assert begin([one, large], 2, [ones, large.value()])[1] is None
    rows = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]))
    assert begin([one, other], 1, [ones, rows])[1] is None


def test_writer_to_a_worker_slot_waits_for_another_writer(two: Play) -> None:
    (tags,) = two.buffers._tags.values()
    (lock,) = two.buffers.locks[0]
    held = [tf.raw_ops.MutexLock(mutex=lock)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        writing = pool.submit(two.write, 0, [7, 0, EndReason.CONTINUES, 3], 1.0)
        # Another slot is free.
        two.write(1, [8, 1, EndReason.CONTINUES, 3], 1.0)
        time.sleep(0.1)
        was_written, seen = writing.done(), tags.numpy().tolist()
        held.clear()
        writing.result(TIMEOUT_SECS)
    assert not was_written
    assert seen == [[-1, -1], [8, 3]]
    assert tags.numpy().tolist() == [[7, 3], [8, 3]]


def test_each_round_sums_one_gradient_of_each_and_last_assignments_say_so(two: Play) -> None:
    call = two.run(3)
    two.begin_all()
    for number in range(3):
        first, second = two.assignments(0, 1)
        assert {first[1], second[1]} == {2 * number, 2 * number + 1}
        assert first[2] == second[2] == (EndReason.FINAL if number == 2 else EndReason.CONTINUES)
        assert first[3] == second[3] == number
        # Whoever comes first.
        for slot in ((0, 1), (1, 0))[number % 2]:
            two.done(slot, (first, second)[slot], 10.0**number)
    assert call.result(TIMEOUT_SECS) == 3
    assert float(two.variable) == 2 * 111.0
    assert int(two.step) == 3
    assert two.totals.tolist() == [222.0, 6.0]
    assert two.counters.finished.tolist() == [3, 3]
    assert two.counters.examples.tolist() == [3 * BATCH // 2] * 2
    assert (two.slots.sub_batch == NONE).all()
    assert not two.slots.has_loop.any()
    assert [int(two.buffers.num_queued(slot)) for slot in range(2)] == [0, 0]


def test_late_gradient_is_dropped_and_its_sub_batch_is_assigned_again(backed: Play) -> None:
    call = backed.run(2)
    backed.begin_all()
    of_slots = backed.assignments(0, 1, 2)
    lost = of_slots[2][1]
    backed.first_two_done(of_slots)
    of_slots[:2] = backed.assignments(0, 1)
    assert [row[2:] for row in of_slots[:2]] == [[EndReason.FINAL, 1]] * 2
    backed.done(2, of_slots[2], 1000.0)
    backed.fill_up()
    # A late worker gets another sub-batch, whose gradient may be in time.
    another = backed.assignment(2)
    assert another[1] not in {row[1] for row in of_slots}
    backed.first_two_done(of_slots)
    assert call.result(TIMEOUT_SECS) == 2
    assert float(backed.variable) == 4.0
    assert backed.returned == [lost]
    assert backed.counters.dropped.tolist() == [0, 0, 1]
    assert backed.slots.sub_batch.tolist() == [NONE, NONE, another[1]]

    # In the next call it comes first.
    backed.run(1)
    backed.begin(0)
    backed.fill_up()
    assert backed.assignment(0)[1] == lost


def test_round_whose_gradient_was_overwritten_is_repeated(two: Play) -> None:
    call = two.run(1)
    two.begin_all()
    first, second = two.assignments(0, 1)
    two.done(0, first, 1.0)
    # A worker that is considered lost still writes.
    two.write(0, [first[0] - 1, *first[1:]], 1000.0)
    two.done(1, second, 1.0)
    # These were the last assignments of their loops, which begin again.
    two.begin_all()
    first, second = two.assignments(0, 1)
    assert {first[1], second[1]} == {0, 1}
    assert first[3] == second[3] == 0
    assert float(two.variable) == 0.0
    two.first_two_done([first, second])
    assert call.result(TIMEOUT_SECS) == 1
    assert float(two.variable) == 2.0
    assert two.totals.tolist() == [2.0, 2.0]
    assert two.counters.repeated.tolist() == [1, 1]
    assert two.counters.finished.tolist() == [1, 1]


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "not taken"])
def test_loop_that_begins_again_gets_the_sub_batch_that_was_lost(two: Play, taken: bool) -> None:
    call = two.run(2)
    two.begin_all()
    second = two.assignment(1)
    first = two.assignment(0) if taken else None
    # Worker 0 is lost, before or after it took the assignment; its loop begins again.
    two.begin(0)
    two.fill_up()
    again = two.assignment(0)
    if first is not None:
        assert again[0] > first[0]
        assert again[1] == first[1]
        # A message of the lost worker has no effect.
        two.done(0, first, 1000.0)
    assert {again[1], second[1]} == {0, 1}
    two.first_two_done([again, second])
    first, second = two.assignments(0, 1)
    assert first[1:] == [2, EndReason.FINAL, 1]
    # After a stop the sub-batches in flight are known, also one whose gradient has come.
    two.done(0, first, 1.0)
    two.tell(Kind.STOP)
    assert call.result(TIMEOUT_SECS) == 1
    assert float(two.variable) == 2.0
    assert sorted(two.slots.sub_batch.tolist()) == [2, 3]
    assert two.progress.next_sub_batch == 4


def test_nudge_ends_waiting_loops_and_makes_assignments_the_last(two: Play) -> None:
    """One worker does the sub-batches of both, one worker loop after the other."""
    call = two.run(1)
    two.begin(0)
    two.fill_up()
    first = two.assignment(0)
    two.tell(Kind.NUDGE)
    # Each slot with an empty queue. The worker that computes takes it after its sub-batch.
    assert two.assignments(0, 1) == [list(END_ASSIGNMENT)] * 2
    two.done(0, first, 1.0)
    two.ended(0)
    two.begin(1)
    second = two.assignment(1)
    assert second[2] == EndReason.FINAL
    assert {first[1], second[1]} == {0, 1}
    two.done(1, second, 1.0)
    assert call.result(TIMEOUT_SECS) == 1
    assert two.progress.loops_give_way == 1

    # Loops give way in the next call too.
    two.run(2)
    two.begin(0)
    assert two.assignment(0)[2] == EndReason.GIVES_WAY


def test_loop_of_a_former_call_ends_after_its_assignment(backed: Play) -> None:
    call = backed.run(1)
    backed.begin_all()
    of_slots = backed.assignments(0, 1, 2)
    backed.first_two_done(of_slots)
    assert call.result(TIMEOUT_SECS) == 1
    backed.slots.is_old[2] = 1

    call = backed.run(2)
    backed.done(2, of_slots[2], 1000.0)  # Late.
    # Its assignment was the last one, so it gets no other.
    assert of_slots[2][2] == EndReason.FINAL
    backed.begin(0)
    backed.begin(1)
    backed.fill_up()
    of_slots[:2] = backed.assignments(0, 1)
    assert int(backed.buffers.num_queued(2)) == 0
    backed.first_two_done(of_slots)
    of_slots[:2] = backed.assignments(0, 1)
    assert [row[2] for row in of_slots[:2]] == [EndReason.FINAL, EndReason.FINAL]
    backed.first_two_done(of_slots)
    assert call.result(TIMEOUT_SECS) == 2
    assert not backed.slots.is_old[2]
    assert float(backed.variable) == 6.0


# The worker slot of each row has sub-batch 6 of attempt 3, unless it says otherwise; the step is 9.
STEP = 9
DONE = Message(Kind.DONE, 0, 3, 1, STEP)
END_DONE = Message(Kind.DONE, 0, END, 1, NONE)
BEGUN = Message(Kind.BEGUN, 0, 0, 1, 0)
CONTINUES = WorkerSlot(6, 3, EndReason.CONTINUES, 1, 0, 0, 1)
LAST = CONTINUES._replace(end_reason=EndReason.FINAL)
HELD = CONTINUES._replace(is_held=1)
FREE = CONTINUES._replace(sub_batch=NONE)
LATE = DONE._replace(step=STEP - 1)


@pytest.mark.parametrize(
    ("message", "slot", "num_queued", "expected"),
    [
        (DONE, CONTINUES, 0, {"hold"}),
        (DONE, CONTINUES, 1, {"hold"}),
        (DONE, LAST, 0, {"hold", "loop_ended"}),
        (DONE, CONTINUES._replace(end_reason=EndReason.GIVES_WAY), 0, {"hold", "loop_ended"}),
        (LATE, CONTINUES, 0, {"drop", "assign_other"}),
        (LATE, CONTINUES._replace(is_old=1), 0, {"drop", "assign_other"}),
        (LATE, LAST, 0, {"drop", "loop_ended"}),
        (DONE._replace(attempt=2), CONTINUES, 0, set()),
        (LATE._replace(attempt=2), CONTINUES, 0, set()),
        (DONE, HELD, 0, set()),
        (LATE, HELD, 0, set()),
        (DONE, HELD._replace(end_reason=EndReason.FINAL), 0, set()),
        (DONE, FREE, 0, set()),
        (END_DONE, FREE, 0, {"loop_ended"}),
        (END_DONE, CONTINUES, 0, {"loop_ended", "assign_same"}),
        (END_DONE, LAST, 0, {"loop_ended", "assign_same"}),
        (END_DONE, CONTINUES, 1, {"loop_ended"}),
        (END_DONE, HELD, 0, {"loop_ended"}),
        (BEGUN, FREE, 0, {"loop_begun", "assign_other"}),
        (BEGUN._replace(attempt=1), FREE, 0, {"loop_begun", "assign_other"}),
        (BEGUN, FREE._replace(is_old=1), 0, {"loop_begun", "end_loop"}),
        # The queue counts as the sender saw it when it began, not as it is now.
        (BEGUN, CONTINUES, 1, {"loop_begun", "assign_same"}),
        (BEGUN, CONTINUES._replace(is_old=1), 0, {"loop_begun", "assign_same"}),
        (BEGUN._replace(attempt=1), CONTINUES, 0, {"loop_begun"}),
        (BEGUN, HELD, 0, {"loop_begun"}),
        (BEGUN, HELD._replace(sub_batch=NONE, is_old=1), 0, {"loop_begun"}),
        (Message(Kind.NUDGE, 0, 3, 0, STEP), FREE, 0, {"end_waiting"}),
        (Message(Kind.STOP, 0, 3, 0, STEP), CONTINUES, 0, {"stop"}),
        (Message(Kind.NOTHING, 0, 3, 0, STEP), CONTINUES, 0, set()),
        (Message(Kind.NOTHING, 0, END, 0, NONE), FREE, 0, set()),
    ],
)
def test_judge_follows_its_truth_table(
    message: Message, slot: WorkerSlot, num_queued: int, expected: set[str]
) -> None:
    verdict = judge(
        unpack(Message, tf.constant(message, tf.int64)),
        unpack(WorkerSlot, tf.constant(slot, tf.int64)),
        tf.constant(STEP, tf.int64),
        tf.constant(num_queued, tf.int64),
    )
    found = {field for field, is_true in zip(Verdict._fields, verdict, strict=True) if is_true}
    assert found == expected
