"""Which batches asynchronous parameter servers have handed out and applied, for the next chief.

    store_handed_out(step_device, HandedOut(next_batch, ...))   # the chief, once a second
    place = log_place(batch)            # where a server logs each applied gradient
    reached = read_tickets(former)      # in the next chief

The log is a variable on the server of the step counter, [LOG_ROWS, 3]. Each applied gradient is
written to it directly after it is counted. So the log has all batches that are done since the chief
stored what it had handed out. The others are open: the next chief hands them out again.

A gradient whose chief died while it was applied may have changed only some of its variables. It is
not counted, and its batch is open. The same happens when a worker dies.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from strategies.base import Tensor
from strategies.position import Position, Reached
from strategies.ps.former_state import FormerState, NamedTensors
from strategies.worker_stats import WorkerStats, added

# In place of a gradient's staleness, if the gradient was too old.
DROPPED = -1
# More rows than steps between two calls of `store_handed_out`. A batch would be trained again if
# another one overwrote its row before the second call.
LOG_ROWS = 1 << 14
EMPTY_ROW = (-1, -1, DROPPED)

# Of each worker, the number of gradients of each staleness, and of DROPPED.
Ages = Mapping[str, Mapping[int, int]]


class HandedOut(NamedTuple):
    """What the chief has handed out and got back so far."""

    next_batch: int  # Of the next ticket.
    open_batches: Sequence[int]  # Before `next_batch`, and not known to be consumed.
    num_returned: int  # The batches that this chief has handed out, without the open ones.
    ages: Ages


def store_handed_out(step_device: str, handed_out: HandedOut) -> None:
    """Stores `handed_out` on the server of the step counter."""
    _stored(step_device).store_json(handed_out._asdict())


def log_place(batch: Tensor) -> Tensor:
    """The index of a batch's row in the log, int64 [1]."""
    return tf.math.floormod(batch, LOG_ROWS)[tf.newaxis]


def counts_of(
    applied: npt.NDArray[np.int64],
    ages: Ages,
    workers: Sequence[str],
    *,
    batch_size: int,
    num_handed_out: int,
    num_steps: int,
) -> WorkerStats:
    """The counts of one chief.

    `applied`, [workers], are counted on the server that has the step counter, as `num_steps` is.
    Steps count as repeated if the worker was lost before it reported them. (A worker that is lost
    between a step and its count leaves a step that counts for no worker.) `staleness` is of the
    gradients of finished tickets. `batches` adds up: applied gradients are finished or repeated.
    """
    by_worker = dict(zip(workers, applied.tolist(), strict=True))
    staleness = {
        name: {age: n for age, n in sorted(ages.get(name, {}).items()) if age != DROPPED}
        for name in workers
    }
    finished = {name: sum(of_worker.values()) for name, of_worker in staleness.items()}
    num_finished = sum(finished.values())
    return {
        "worker_steps": by_worker,
        "worker_examples": {name: steps * batch_size for name, steps in by_worker.items()},
        "worker_dropped": {name: ages.get(name, {}).get(DROPPED, 0) for name in workers},
        "worker_repeated": {name: steps - finished[name] for name, steps in by_worker.items()},
        "staleness": staleness,
        "batches": {
            "handed_out": num_handed_out,
            "finished": num_finished,
            "repeated": num_steps - num_finished,
        },
    }


def open_after(handed_out: HandedOut, done: Iterable[int]) -> tuple[int, tuple[int, ...]]:
    """The next batch to hand out, and the open batches before it, when `done` are consumed."""
    consumed = set(done)
    next_batch = max([handed_out.next_batch, *(batch + 1 for batch in consumed)])
    handed = (*handed_out.open_batches, *range(handed_out.next_batch, next_batch))
    return next_batch, tuple(batch for batch in handed if batch not in consumed)


def read_tickets(former: FormerState) -> Reached | None:
    """How far the former chief's run has come; None if what it had handed out is not known."""
    facts = former.facts
    loaded = _stored(former.counter.device).load_json()
    if loaded is None:
        return None
    handed_out = HandedOut(**loaded)
    applied, log = (variable.numpy() for variable in former.variables[facts["num_saved"] :])
    may_be_done = set(handed_out.open_batches)
    done = {
        batch: (worker, age)
        for batch, worker, age in log.tolist()
        if batch >= handed_out.next_batch or batch in may_be_done
    }
    next_batch, open_batches = open_after(handed_out, done)
    ages = collections.defaultdict[str, collections.Counter[int]](collections.Counter)
    for name, of_worker in handed_out.ages.items():  # JSON has turned the keys into strings.
        ages[name].update({int(age): number for age, number in of_worker.items()})
    for worker, age in done.values():
        ages[facts["workers"][worker]][age] += 1
    step = int(former.counter.numpy())
    counts = counts_of(
        applied,
        ages,
        facts["workers"],
        batch_size=facts["batch_size"],
        num_handed_out=handed_out.num_returned + len(done),
        num_steps=step - facts["first_step"],
    )
    lanes = 0, facts["last_lane"]
    position = Position(
        next_batch, tuple((batch, *lanes) for batch in open_batches), tuple(facts["skipped"])
    )
    return Reached(step, position, added(facts["counts_before"], counts))


def _stored(step_device: str) -> NamedTensors:
    return NamedTensors(step_device, "handed out")
