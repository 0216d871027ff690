"""Where in the training order a run is: what a checkpoint holds besides the variables.

position = Position(next_batch=7)               # the batches 0 to 6 are consumed
refuse_open_sub_batches(position, order)        # in an executor without sub-batches
"""

from dataclasses import dataclass
from typing import NamedTuple

from data.order import Order, replica_lanes
from data.system.errors import UsageError
from strategies.worker_stats import WorkerStats


@dataclass(frozen=True)
class Position:
    """The part of the endless training order that no step has consumed yet.

    Attributes:
        next_batch: All batches from this one on are not consumed.
        open_sub_batches: Parts of earlier batches that are not consumed either: (batch, first lane,
            last lane).
        skipped: Number of earlier examples that no step will consume, one entry for each time that
            training returned to a checkpoint after a NaN and skipped the examples since.
    """

    next_batch: int = 0
    open_sub_batches: tuple[tuple[int, int, int], ...] = ()
    skipped: tuple[int, ...] = ()

    def num_examples(self, order: Order) -> int:
        """Examples that steps have consumed."""
        open_lanes = sum(last + 1 - first for _, first, last in self.open_sub_batches)
        rows = order.batch_size // order.lanes
        return self.next_batch * order.batch_size - open_lanes * rows - sum(self.skipped)

    def skip_to(self, end: "Position", order: Order) -> "Position":
        """The position `end`, with all examples between this position and `end` skipped.

        `end` is a later position of the same training, which may have skipped more since.
        """
        num_skipped = end.next_batch * order.batch_size - self.num_examples(order)
        num_skipped -= sum(end.skipped)
        return Position(end.next_batch, (), (*end.skipped, num_skipped))


class Reached(NamedTuple):
    """How far a run has come: what a checkpoint holds in addition to the variables."""

    step: int
    position: Position
    counts: WorkerStats


def refuse_open_sub_batches(position: Position, order: Order) -> None:
    """Raises UsageError if `position` has open sub-batches; names the flags that can resume."""
    if position.open_sub_batches:
        open_lanes = {range(first, last + 1) for _, first, last in position.open_sub_batches}
        # The smallest number of sub-batches among which are all that are open.
        num_sub_batches = next(
            number
            for number in range(1, order.lanes + 1)
            if number == order.lanes
            or open_lanes <= {replica_lanes(order.lanes, i, number) for i in range(number)}
        )
        raise UsageError(
            f"The checkpoint has {len(position.open_sub_batches)} unfinished sub-batch(es) of "
            "backup workers. Continue with --strategy=ps --sync_replicas --replicas_to_aggregate="
            f"{num_sub_batches}, or give another --model_dir."
        )
