"""What a chief of ps leaves on its servers: the last complete step, or nothing."""

import gc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from data.order import replica_lanes
from strategies.position import Position, Reached
from strategies.ps.former_rounds import Rounds, kept_values, position_of, stored_rounds, values_at
from strategies.ps.former_state import FormerState, FormerVariable, NamedTensors
from strategies.ps.former_tickets import (
    DROPPED,
    EMPTY_ROW,
    LOG_ROWS,
    HandedOut,
    log_place,
    open_after,
    store_handed_out,
)
from strategies.ps.protocol import IDLE, WorkerSlot
from strategies.ps.recovery import read_once, settled, settled_values
from strategies.ps.standby import Standby

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{index}" for index in range(2)]
TWO = [replica_lanes(4, index, 2) for index in range(2)]


def variable(value: Any, device: str = DEVICES[0]) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(value, trainable=False)


def former(facts: dict[str, Any], variables: list[tf.Variable]) -> FormerState:
    return FormerState([FormerVariable(v.device, v.dtype, v.handle) for v in variables], facts)


def test_stored_handle_keeps_a_variable_whose_creator_is_gone() -> None:
    stored = NamedTensors(DEVICES[0], "test of handles")
    assert stored.load([tf.resource]) is None
    created = variable([1.0, 2.0])
    stored.store([created.handle])
    del created
    gc.collect()
    (handle,) = NamedTensors(DEVICES[0], "test of handles").load([tf.resource]) or [None]
    found = FormerVariable(DEVICES[0], tf.float32, handle)
    assert found.numpy().tolist() == [1.0, 2.0]
    found.empty()
    assert found.numpy().tolist() == []
    stored.clear()
    assert stored.load([tf.resource]) is None


@pytest.mark.parametrize(
    ("next_sub_batch", "open_numbers", "expected"),
    [
        (6, [], Position(3)),
        (6, [4, 5], Position(2)),  # All in flight: the batch is to come.
        (6, [2, 3, 4, 5], Position(1)),
        (6, [2, 3], Position(3, ((1, 0, 1), (1, 2, 3)))),  # Batch 2 is consumed.
        (6, [3, 5, 4], Position(2, ((1, 2, 3),))),
        (5, [], Position(3, ((2, 2, 3),))),  # The second half was not assigned.
        (5, [4], Position(2)),
        (0, [], Position(0)),
    ],
)
def test_sub_batches_that_are_not_consumed_are_open_or_to_come(
    next_sub_batch: int, open_numbers: list[int], expected: Position
) -> None:
    assert position_of(next_sub_batch, open_numbers, TWO, ()) == expected


def synchronous(step: int, marks: tuple[int, int], stored_step: int) -> FormerState:
    """Two servers; the second server's variable gained 1 in each step."""
    counted = variable(np.int64(step))
    weights = [variable(10.0 + step), variable(20.0 + step, DEVICES[1])]
    begun = [variable(np.int64(mark), device) for mark, device in zip(marks, DEVICES, strict=True)]
    slots = np.tile(np.array(IDLE, np.int64), [2, 1])
    slots[0, WorkerSlot._fields.index("sub_batch")] = 2 * step
    numbers = np.array([[step, 8 * step, 0, 0]] * 2, np.int64)
    sub_batches = np.int64(2 * step + 1), np.array([], np.int64)
    stored_rounds(DEVICES[0]).store(Rounds(np.int64(stored_step), *sub_batches, slots, numbers))
    facts = {
        "kind": "synchronous",
        "step": 0,
        "num_saved": 3,
        "num_marks": 2,
        "lanes": [[0, 2], [2, 4]],
        "skipped": [3],
        "workers": ["worker 0", "worker 1"],
        "counts_before": {"worker_steps": {"worker 0": 5}},
    }
    return former(facts, [counted, *weights, *begun])


def test_complete_step_of_rounds_is_found_with_its_position_and_counts() -> None:
    state = synchronous(7, (7, 7), 7)
    found = settled_values(state)
    assert found is not None
    reached, values = found
    assert (reached.step, reached.position) == (7, Position(7, (), (3,)))
    assert reached.counts["worker_steps"] == {"worker 0": 12, "worker 1": 7}
    assert [float(value) for value in values] == [7, 17, 27]


@pytest.mark.parametrize("changed", [0, 1])
def test_server_that_began_a_step_which_was_not_counted_has_the_values_before(changed: int) -> None:
    marks = (8, 7) if changed == 0 else (7, 8)
    state = synchronous(7, marks, 7)
    device = DEVICES[changed]
    here = [v for v in state.variables[:3] if v.device == device]
    kept_values(device).store([tf.constant(7, tf.int64), *(v.value() for v in here)])
    with tf.device(device):  # The step changes the weight, and is not counted.
        weight = state.variables[1 + changed]
        tf.raw_ops.AssignVariableOp(resource=weight.handle, value=tf.constant(99.0))
    reached = read_once(state)
    assert reached is not None
    assert reached.step == 7
    assert [float(value) for value in values_at(state, 7) or []] == [7, 17, 27]
    kept_values(device).store([tf.constant(6, tf.int64), *(v.value() for v in here)])
    assert values_at(state, 7) is None, "values of another step"


@pytest.mark.parametrize(
    ("step", "marks", "stored_step"),
    [(7, (7, 9), 7), (7, (6, 7), 7), (8, (8, 8), 7), (7, (8, 8), 8)],
)
def test_incomplete_step_is_not_used(step: int, marks: tuple[int, int], stored_step: int) -> None:
    assert settled(synchronous(step, marks, stored_step)) is None


def test_state_of_a_lost_server_is_not_used() -> None:
    state = synchronous(7, (7, 7), 7)
    lost = [v if v.device == DEVICES[0] else v._replace(handle=None) for v in state.variables]
    assert settled(FormerState(lost, state.facts)) is None


def test_single_server_in_the_middle_of_a_step_is_not_used() -> None:
    state = synchronous(7, (8, 7), 7)
    facts = {**state.facts, "num_marks": 1}
    assert read_once(FormerState(state.variables, facts)) is None


def test_batches_between_those_done_are_open() -> None:
    handed_out = HandedOut(10, (3, 5), 0, {})
    assert open_after(handed_out, []) == (10, (3, 5))
    assert open_after(handed_out, [3, 5, 10, 11]) == (12, ())
    assert open_after(handed_out, [5, 10, 13]) == (14, (3, 11, 12))


def test_log_of_applied_gradients_gives_position_and_counts() -> None:
    log = np.tile(np.array([EMPTY_ROW], np.int64), [LOG_ROWS, 1])
    first = LOG_ROWS - 2  # Places begin anew.
    # Worker 1 died with `first + 1`; `first - 5` was open, `first - 1` is of the call before.
    for row in ((first, 0, 0), (first + 2, 0, 3), (first - 5, 1, 1), (first - 1, 1, 0)):
        log[int(log_place(tf.constant(row[0], tf.int64))[0])] = row
    ages = {"worker 0": {0: 4, DROPPED: 1}, "worker 1": {2: 6}}
    store_handed_out(DEVICES[0], HandedOut(first, (first - 6, first - 5), 10, ages))
    facts = {
        "kind": "asynchronous",
        "step": 0,
        "num_saved": 1,
        "last_lane": 3,
        "batch_size": 8,
        "first_step": 100,
        "skipped": [],
        "workers": ["worker 0", "worker 1"],
        "counts_before": {"batches": {"handed_out": 1, "finished": 1, "repeated": 0}},
    }
    applied = variable(np.array([6, 8], np.int64))
    state = former(facts, [variable(np.int64(114)), applied, variable(log)])
    reached = settled(state)
    assert reached is not None
    open_batches = ((first - 6, 0, 3), (first + 1, 0, 3))
    assert (reached.step, reached.position) == (114, Position(first + 3, open_batches, ()))
    assert reached.counts == {
        "worker_steps": {"worker 0": 6, "worker 1": 8},
        "worker_examples": {"worker 0": 48, "worker 1": 64},
        "worker_dropped": {"worker 0": 1, "worker 1": 0},
        "worker_repeated": {"worker 0": 0, "worker 1": 1},
        "staleness": {"worker 0": {0: 5, 3: 1}, "worker 1": {1: 1, 2: 6}},
        "batches": {"handed_out": 14, "finished": 14, "repeated": 1},
    }


def begun(saved: list[tf.Variable]) -> tuple[Standby, FormerState]:
    standby = Standby(DEVICES)
    standby.clear()
    standby.begin(saved)
    return standby, former({"num_saved": len(saved)}, saved)


def copied(standby: Standby, step: int, weights: list[tf.Variable]) -> Reached:
    for weight in weights:
        weight.assign(10.0 * step * tf.ones_like(weight))
    counts = {"worker_steps": {"worker 0": step}}
    reached = Reached(step, Position(step, ((1, 0, 1),), (2,)), counts)
    standby.copy(reached)
    return reached


def test_copy_on_the_other_server_is_found_when_a_server_has_lost_its_own() -> None:
    counted = variable(np.int64(5))
    weights = [variable(1.0), variable([2.0, 3.0], DEVICES[1])]
    standby, state = begun([counted, *weights])
    assert standby.find(state) is None
    copied(standby, 5, weights)
    expected = copied(standby, 6, weights)
    standby.wait()
    for weight in weights:  # Later steps do not change a copy.
        weight.assign_add(tf.ones_like(weight))

    next_chief = Standby(DEVICES)
    for generation in (0, 1):
        lost = next_chief._own[generation][1]
        lost.clear()  # The second server was started again, and has the first one's copy no more.
        next_chief._mirrored[generation][0].clear()
        next_chief._records[generation][1].clear()
    found = next_chief.find(state)
    assert found is not None
    reached, values = found
    assert reached == expected
    assert [value.numpy().tolist() for value in values] == [5, 60.0, [60.0, 60.0]]
    for generation in (0, 1):
        next_chief._mirrored[generation][1].clear()
    assert next_chief.find(state) is None, "both copies of a part are lost"
    next_chief.clear()


def test_copy_that_is_not_complete_is_not_used() -> None:
    """The chief dies after one server has kept its values, and before the record is written."""
    weights = [variable(1.0), variable(2.0, DEVICES[1])]
    standby, state = begun(weights)
    complete = copied(standby, 3, weights)
    standby.wait()
    for weight in weights:
        weight.assign(99.0)
    standby._graphs[1 - standby._generation][0](tf.constant(4, tf.int64))
    found = Standby(DEVICES).find(state)
    assert found is not None
    reached, values = found
    assert reached == complete
    assert [float(value) for value in values] == [30.0, 30.0]
    standby.clear()
    assert standby.find(state) is None
