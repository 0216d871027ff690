"""What the aggregator, the worker loops and the chief tell each other, and what they know.

    row = pack(Assignment(attempt, sub_batch, EndReason.CONTINUES, step))       # int64 [4]
    assignment = unpack(Assignment, row)

Each NamedTuple is a row of int64 where it crosses a queue, a loop or a process. Its fields are
scalars; or, of many rows [n, fields], columns [n]: tensors in graphs, NumPy arrays in the chief.
"""

import enum
from typing import NamedTuple, TypeVar

import tensorflow as tf

# In place of a sub-batch, an attempt or a step that does not exist.
NONE = -1
# The attempt of an assignment that has no sub-batch and only ends the worker loop.
END = -2
# The attempt of an assignment that no queue had: an unrolled iteration of a worker loop computes
# nothing for it, because the last assignment of the loop came before.
SKIPPED = -3


class EndReason(enum.IntEnum):
    """Why an assignment is the last one of its worker loop, if it is."""

    CONTINUES = 0  # It is not the last one.
    GIVES_WAY = 1  # Another worker loop may need this worker.
    FINAL = 2  # The call of the aggregator has no further round for this worker loop.


class Kind(enum.IntEnum):
    """What a message says."""

    DONE = 0  # A gradient was written; or, if the attempt is END, the loop has ended.
    # A worker loop has begun, for the first time or again on another worker. Instead of an attempt
    # the message has the number of assignments in the queue of its worker slot at that time.
    BEGUN = 1
    NUDGE = 2  # No step was made for some time: workers may be missing.
    STOP = 3  # The chief wants no more rounds.
    NOTHING = 4  # Only fills up the number of messages that the aggregator waits for.


class Assignment(NamedTuple):
    """What a worker loop is to compute next."""

    attempt: tf.Tensor  # The number of this assignment, or END, or SKIPPED.
    sub_batch: tf.Tensor  # batch * (sub-batches of a batch) + index.
    end_reason: tf.Tensor  # An EndReason.
    step: tf.Tensor  # The step counter when the assignment was made.


# Ends the worker loop that takes it.
END_ASSIGNMENT = Assignment(END, NONE, EndReason.GIVES_WAY, NONE)


class Message(NamedTuple):
    """What a worker loop or the chief tells the aggregator."""

    kind: tf.Tensor  # A Kind.
    worker_slot: tf.Tensor  # The sender's.
    attempt: tf.Tensor  # Of the assignment; see Kind.
    worker: tf.Tensor  # The index of the sender's worker.
    step: tf.Tensor  # Of the assignment.


class WorkerSlot(NamedTuple):
    """What the aggregator knows of a worker slot. Flags are 0 or 1."""

    sub_batch: tf.Tensor  # The one that was assigned to it, or NONE.
    attempt: tf.Tensor  # The number of that assignment, or NONE.
    end_reason: tf.Tensor  # The EndReason of that assignment.
    has_loop: tf.Tensor  # A worker loop takes its assignments.
    is_old: tf.Tensor  # That loop began in an earlier call, and has no tickets of this call.
    is_held: tf.Tensor  # Its gradient is written, and waits for those of the others.
    worker: tf.Tensor  # The index of the worker that computed that gradient.


# A worker slot without a loop.
IDLE = WorkerSlot(NONE, NONE, EndReason.CONTINUES, 0, 0, 0, 0)


class Counters(NamedTuple):
    """How many gradients of each worker ended in which way."""

    finished: tf.Tensor  # Became part of a step.
    examples: tf.Tensor  # The examples of these.
    dropped: tf.Tensor  # Came after their step.
    repeated: tf.Tensor  # Were in time, but were overwritten before they could be summed.


class Progress(NamedTuple):
    """What a call of the aggregator starts from, and what it returns."""

    num_rounds: tf.Tensor  # To run; in the result: that were run.
    loops_give_way: tf.Tensor  # 1 if each assignment is the last of its worker loop.
    next_sub_batch: tf.Tensor
    next_attempt: tf.Tensor


_Fields = TypeVar("_Fields", bound=NamedTuple)


def pack(fields: NamedTuple) -> tf.Tensor:
    """One of the types above as int64 [..., fields]."""
    return tf.raw_ops.Pack(values=fields, axis=-1)


def unpack(kind: type[_Fields], rows: tf.Tensor) -> _Fields:
    """The inverse of `pack`."""
    return kind._make(tf.unstack(rows, axis=-1))
