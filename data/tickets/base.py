"""The protocol of tickets: plans of batches that a graph in another process turns into examples.

    source = ticket_source(reader)              # data/tickets/__init__.py

    @tf.function(input_signature=[source.ticket_spec(num_batches=16)])
    def closure(ticket):                        # runs in a worker
        inputs, labels = source.parse_ticket(ticket)

    coordinator.schedule(closure, args=(source.ticket(first_batch=32, num_batches=16),))

A ticket is a dictionary of arrays. No graph here has a py_function, so any process can run it.
A sub-batch is the part of a batch in one range of lanes. For synchronous ps workers `pack_tickets`
makes one ticket of each range for all batches of a run; `sub_batch` takes one row, a batch, of it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.order import Order, Plan
from data.reader import Batch

Spec = dict[str, tf.TensorSpec]


class PackedTickets(NamedTuple):
    """The tickets of some runs of batches, in a worker's graph: one for each range of lanes.

    `specs` are the `ticket_spec` of each sub-batch. `starts`, int64 [runs], are the runs' first
    batches; `tickets`, string [runs, sub_batches, parts], comes from `pack_tickets`.
    """

    specs: Sequence[Spec]
    starts: tf.Tensor
    tickets: tf.Tensor

    @property
    def names(self) -> list[str]:
        """The arrays of a ticket, in the order of the parts."""
        return sorted(self.specs[0])

    @property
    def sizes(self) -> list[int]:
        """The examples of each sub-batch. They differ by a lane if the lanes do not divide."""
        return [int(spec["gather"].shape[1]) for spec in self.specs]

    def unpack(
        self, batch: tf.Tensor, index: tf.Tensor, names: Sequence[str]
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """The row of `batch` in its run, and these arrays of the ticket of sub-batch `index`."""
        window = tf.searchsorted(self.starts, [batch], side="right", out_type=tf.int64)[0] - 1
        parts = dict(zip(self.names, tf.unstack(self.tickets[window, index]), strict=True))
        ticket = {}
        for name in names:
            spec = self.specs[0][name]
            ticket[name] = tf.io.parse_tensor(parts[name], spec.dtype)
            ticket[name].set_shape([None] * spec.shape.rank)
        return batch - self.starts[window], ticket


class TicketSource(Protocol):
    """Makes tickets on the chief, and examples of them in the graphs of workers."""

    order: Order

    def ticket_runs(self, first_batch: int) -> Iterator[tuple[int, int]]:
        """Runs of batches from `first_batch` on, (first, count).

        A ticket of one whole run reads each chunk once; each of several may read it again.
        """

    def ticket(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Plan:
        """The plan of some batches: "gather", int64 [num_batches, n], `Reader.extras` and more."""

    def ticket_spec(self, num_batches: int | None = None, lanes: range | None = None) -> Spec:
        """The input signature of a ticket: a function traced with it is not traced again."""

    def parse_ticket(self, ticket: dict[str, tf.Tensor]) -> Batch:
        """In a graph: inputs and labels [num_batches, n, ...], and weights or seeds if given."""

    def prepare(self) -> tf.Tensor:
        """In a graph: must run before `sub_batch`. Returns any tensor, to depend on."""

    def sub_batch(
        self, batch: tf.Tensor, index: tf.Tensor, packed: PackedTickets, cache_name: str
    ) -> Batch:
        """In a graph: sub-batch `index` of `batch`, parsed: inputs and labels [n, ...], seeds.

        Records that are read but not needed now are cached in the worker under `cache_name`.
        """


def pack_tickets(
    source: TicketSource, first_batch: int, num_batches: int, lanes: Sequence[range]
) -> npt.NDArray[np.object_]:
    """The tickets of some batches for the lanes of each sub-batch: bytes [sub_batches, parts]."""
    tickets = [source.ticket(first_batch, num_batches, of_sub_batch) for of_sub_batch in lanes]
    parts = [[part for _, part in sorted(ticket.items())] for ticket in tickets]
    return np.array([[tf.io.serialize_tensor(p).numpy() for p in row] for row in parts], object)
