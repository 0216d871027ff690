"""What the aggregator stores after each round, and how the next chief reads it.

    stored = stored_rounds(step_device)
    stored.store(Rounds(step, next_sub_batch, returned, slots, counters))   # after each round
    position = position_of(next_sub_batch, open_numbers, lanes, skipped)
    reached = read_rounds(former)                     # in the next chief
    values = values_at(former, reached.step)          # of all saved variables

TensorFlow cancels all graphs of a chief that dies. A cancelled graph ends where it waits: for a
queue, for another task, or before the next iteration of a loop. Ops that have their inputs still
run. On a single server nothing waits between the first change of a variable and the stored Rounds.
With several servers a step may end between its changes on two of them. So each server keeps the
values before the step that it began last (`GradientBuffers.begun`): the next chief takes these, if
the step was not counted. Large values are not kept (`GradientBuffers.keep`): then the variables
are of no complete step.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from strategies.base import Tensor, value_of
from strategies.position import Position, Reached
from strategies.ps.former_state import FormerState, NamedTensors
from strategies.ps.protocol import NONE, WorkerSlot
from strategies.worker_stats import WorkerStats, added


class Rounds(NamedTuple):
    """The state between two rounds. All are int64."""

    step: Tensor  # The step counter, [].
    next_sub_batch: Tensor  # []
    returned: Tensor  # Sub-batches to assign again, [any].
    slots: Tensor  # Packed WorkerSlot, [worker slots, 7].
    counters: Tensor  # Packed Counters, [workers, 4].


def stored_rounds(step_device: str) -> NamedTensors:
    """Where the Rounds of a run are stored."""
    return NamedTensors(step_device, "rounds")


def position_of(
    next_sub_batch: int,
    open_numbers: Iterable[int],
    lanes: Sequence[range],
    skipped: tuple[int, ...],
) -> Position:
    """The position if `open_numbers`, of sub-batches before `next_sub_batch`, are not consumed.

    `lanes` are the lanes of each sub-batch of a batch.
    """
    size = len(lanes)
    next_batch = -(-next_sub_batch // size)
    numbers = sorted([*open_numbers, *range(next_sub_batch, next_batch * size)])
    # A batch of which nothing is consumed is not open, but to come.
    while numbers[-size:] == list(range((next_batch - 1) * size, next_batch * size)) and next_batch:
        next_batch -= 1
        del numbers[-size:]
    places = [divmod(number, size) for number in numbers]
    open_sub_batches = [(batch, lanes[i][0], lanes[i][-1]) for batch, i in places]
    return Position(next_batch, tuple(open_sub_batches), skipped)


def in_flight(slots: WorkerSlot) -> list[int]:
    """The sub-batches that are assigned to worker slots. The fields of `slots` are columns."""
    return [int(number) for number in slots.sub_batch if number != NONE]


def counts_of(counters: npt.NDArray[np.int64], workers: Sequence[str]) -> WorkerStats:
    """Packed `counters` of `workers`, with the names of worker_stats.

    There may be more rows than workers: one for each worker slot.
    """
    names = ("worker_steps", "worker_examples", "worker_dropped", "worker_repeated")
    of_workers = counters[: len(workers)]
    return {
        name: dict(zip(workers, column, strict=True))
        for name, column in zip(names, of_workers.T.tolist(), strict=True)
    }


def read_rounds(former: FormerState) -> Reached | None:
    """How far the former chief's run has come; None if its variables are of no complete step."""
    facts = former.facts
    loaded = stored_rounds(former.counter.device).load([tf.int64] * len(Rounds._fields))
    if loaded is None:
        return None
    rounds = Rounds(*[value_of(tensor) for tensor in loaded])
    step = int(rounds.step)
    if former.last_step() != step:
        return None
    begun = _begun(former)
    may_be_begun = {step, step + 1} if len(begun) > 1 else {step}
    if not may_be_begun.issuperset(begun.values()):
        return None
    lanes = [range(first, end) for first, end in facts["lanes"]]
    open_numbers = [*rounds.returned.tolist(), *in_flight(WorkerSlot(*rounds.slots.T))]
    skipped = tuple(facts["skipped"])
    position = position_of(int(rounds.next_sub_batch), open_numbers, lanes, skipped)
    since_start = counts_of(rounds.counters, facts["workers"])
    return Reached(step, position, added(facts["counts_before"], since_start))


def kept_values(device: str) -> NamedTensors:
    """Where a server keeps the step, int64, and the values of its saved variables after it."""
    return NamedTensors(device, "before")


def values_at(former: FormerState, step: int) -> list[Tensor] | None:
    """The values of the saved variables after `step`; None if a server has not kept them."""
    values = {index: variable.value() for index, variable in enumerate(former.saved)}
    for device, begun in _begun(former).items():
        if begun != step:
            kept = former.stored_values(kept_values(device), device, step)
            if kept is None:
                return None
            values |= kept
    return list(values.values())


def _begun(former: FormerState) -> dict[str, int]:
    """The step that each server began last, by its device."""
    first, number = former.facts["num_saved"], former.facts["num_marks"]
    return {mark.device: int(mark.numpy()) for mark in former.variables[first : first + number]}
