"""Tickets that name pieces of files: the worker that gets one reads and parses the records.

source = DiskTickets(reader)
records = source.read_ticket(source.ticket(first_batch=7, num_batches=4))   # string [4, n]
"""

from collections.abc import Iterator

import tensorflow as tf
from typing_extensions import override

from data.order import Plan
from data.reader import Batch, Reader
from data.system.compat.autograph import no_autograph
from data.tfrecord.pieces import PIECE_NAMES, Pieces
from data.tickets.base import PackedTickets, Spec, TicketSource


class DiskTickets(TicketSource):
    """Tickets with the arrays of `Pieces.plan`: "shards", "byte_offsets", "skip", "take".

    With `weights`, tickets are for evaluation: they have "weights" instead of "seeds". Batches
    after the last evaluation batch have weight 0, so all tickets may have one length.
    """

    def __init__(self, reader: Reader, *, weights: bool = False) -> None:
        self.order, self._reader = reader.order, reader
        self._weights, self._pieces = weights, Pieces(reader.split)

    @override
    def ticket_runs(self, first_batch: int) -> Iterator[tuple[int, int]]:
        return self.order.windows(first_batch)

    @override
    def ticket(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Plan:
        return {
            **self._pieces.plan(self.order, first_batch, num_batches, lanes),
            **self._reader.extras(first_batch, num_batches, lanes, weights=self._weights),
        }

    @override
    def ticket_spec(self, num_batches: int | None = None, lanes: range | None = None) -> Spec:
        pieces = dict.fromkeys(PIECE_NAMES, tf.TensorSpec([None], tf.int64))
        return {**pieces, **self._reader.row_spec(num_batches, lanes, weights=self._weights)}

    @no_autograph
    def read_ticket(self, ticket: dict[str, tf.Tensor]) -> tf.Tensor:
        """The records of a ticket, unparsed: string [num_batches, n]; their CRCs are checked."""
        return tf.gather(self._pieces.read(ticket), ticket["gather"])

    @override
    @no_autograph
    def parse_ticket(self, ticket: dict[str, tf.Tensor]) -> Batch:
        return self._reader.parse_records(self.read_ticket(ticket), ticket)

    @override
    def prepare(self) -> tf.Tensor:
        return tf.constant(True)  # Every sub-batch is read when it is needed.

    @override
    @no_autograph
    def sub_batch(
        self, batch: tf.Tensor, index: tf.Tensor, packed: PackedTickets, cache_name: str
    ) -> Batch:
        records = self._cached_or_read(batch, index, packed, cache_name)
        extras = {}
        if "seeds" in packed.names:
            row, ticket = packed.unpack(batch, index, ["seeds"])
            extras["seeds"] = tf.ensure_shape(ticket["seeds"][row], [records.shape[0], 2])
        return self._reader.parse_records(records, extras)

    def _cached_or_read(
        self, batch: tf.Tensor, index: tf.Tensor, packed: PackedTickets, cache_name: str
    ) -> tf.Tensor:
        """The records of a sub-batch, string [n]: cached by this worker, or read now.

        The remaining window is read at once, because its batches are spread over the same chunks.
        The records of later batches are cached in a table in the worker, for at most two windows of
        each sub-batch.
        """
        sizes = packed.sizes
        most = max(sizes)
        ring = 2 * self.order.window_batches
        # The name makes it the same table in each call. A restarted worker has an empty one.
        table = tf.raw_ops.MutableHashTableOfTensorsV2(
            key_dtype=tf.int64,
            value_dtype=tf.string,
            value_shape=[1 + most],
            shared_name=f"records-{cache_name}",
        )
        begin, empty = index * ring, tf.fill([1 + most], "")
        find, key = tf.raw_ops.LookupTableFindV2, [begin + batch % ring]
        cached = find(table_handle=table, keys=key, default_value=empty)[0]

        def read_and_cache() -> tf.Tensor:
            row, ticket = packed.unpack(batch, index, packed.names)
            records = self.read_ticket({**ticket, "gather": ticket["gather"][row:]})
            batches = batch + tf.range(tf.shape(records, tf.int64)[0])
            columns = [tf.strings.as_string(batches)[:, tf.newaxis], records]
            padding = tf.fill([tf.size(batches), most - tf.shape(records)[1]], "")
            values = tf.ensure_shape(tf.concat([*columns, padding], axis=1), [None, 1 + most])
            keys = begin + batches % ring
            tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=keys, values=values)
            return values[0]

        # The first string of a row is the number of its batch.
        is_cached = tf.equal(cached[0], tf.strings.as_string(batch))
        row = tf.ensure_shape(tf.cond(is_cached, lambda: cached, read_and_cache), [1 + most])
        return row[1:] if min(sizes) == most else row[1 : 1 + tf.gather(sizes, index)]
