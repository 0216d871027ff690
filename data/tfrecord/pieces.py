"""Where records lie in the files of a split: reading plans, and TensorFlow ops that follow them.

    pieces = Pieces(split)
    plan = pieces.plan(order, first_batch=7, num_batches=4)     # arrays
    records = pieces.read(plan)                                 # in a graph: string [sum(take)]

A piece is a run of consecutive records of one file. A plan has m of them: "shards", "byte_offsets",
"skip" and "take", int64 [m]. "gather", int64 [num_batches, n], picks the batches out of the records
of all pieces.
"""

import numpy as np
import tensorflow as tf

from data.order import Int64s, Order, Plan
from data.system.compat.autograph import no_autograph
from data.tfrecord.byte_ranges import ByteRanges
from data.tfrecord.split import Split

_READ_THROUGH_BYTES = 16 << 10  # Reading this much costs about as much as opening the file again.
_MIN_BUFFER_BYTES, _MAX_BUFFER_BYTES = 4 << 10, 1 << 20

PIECE_NAMES = ("shards", "byte_offsets", "skip", "take")


class Pieces:
    """The index of a split as arrays. `paths` are the files of the shards, or their copies."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self.copies = split.copies
        self.paths = [shard.path for shard in split.shards]
        if split.copies is not None:
            self.paths = [split.copies.local[path] for path in self.paths]
        self._lengths = np.array(split.shard_lengths, np.int64)
        # Bytes of each record of a shard, or 0 if they differ.
        self._frame_bytes = np.array([shard.frame_bytes for shard in split.shards])
        chunks = np.array([len(shard.offsets) for shard in split.shards])
        self._first_chunks = np.cumsum(chunks) - chunks
        self._chunk_begins = np.concatenate([shard.offsets for shard in split.shards])
        ends = [np.append(shard.offsets[1:], shard.end) for shard in split.shards]
        self._chunk_ends = np.concatenate(ends)
        # Unwanted records that are cheaper to read than to seek past.
        self._read_through = _READ_THROUGH_BYTES // split.mean_record_bytes

    def plan(
        self, order: Order, first_batch: int, num_batches: int, lanes: range | None = None
    ) -> Plan:
        """The pieces of some batches, with "gather"."""
        reads = order.reads(first_batch, num_batches, lanes, self._read_through)
        byte_offsets, skip = self._seek(reads.shards, reads.chunks, reads.skip)
        pieces = (reads.shards, byte_offsets, skip, reads.take)
        return {**dict(zip(PIECE_NAMES, pieces, strict=True)), "gather": reads.gather}

    def plan_one_by_one(self, records: Int64s) -> Int64s:
        """A piece for each of `records` [g, k], in the order of PIECE_NAMES: int64 [g, 4, k]."""
        begins = np.cumsum(self._lengths) - self._lengths
        shards = np.searchsorted(begins, records, side="right") - 1
        chunks, skip = np.divmod(records - begins[shards], self._split.chunk_examples)
        pieces = shards, *self._seek(shards, chunks, skip), np.ones_like(records)
        return np.stack(pieces, axis=1)

    def byte_ranges(
        self, order: Order, first_batch: int, num_batches: int, lanes: range
    ) -> tuple[ByteRanges, Int64s]:
        """The byte ranges that hold some batches, and the numbers of their records in there.

        Ranges are whole chunks unless all records of the shard have one length. The numbers, int64
        [num_batches, n], count the records of all ranges from 0.
        """
        reads = order.reads(first_batch, num_batches, lanes, self._read_through)
        chunk_examples = self._split.chunk_examples
        frame_bytes = self._frame_bytes[reads.shards]
        begins, skip = self._seek(reads.shards, reads.chunks, reads.skip)
        last = reads.chunks + (reads.skip + reads.take - 1) // chunk_examples
        lengths = self._lengths[reads.shards]
        in_chunks = np.minimum((last + 1) * chunk_examples, lengths) - reads.chunks * chunk_examples
        num_in_range = np.where(frame_bytes > 0, reads.take, in_chunks)
        chunk_ends = self._chunk_ends[self._first_chunks[reads.shards] + last]
        ends = np.where(frame_bytes > 0, begins + reads.take * frame_bytes, chunk_ends)
        ranges = ByteRanges(self.paths, reads.shards, begins, ends, int(num_in_range.sum()))
        # From places among the wanted records to places among the records of the ranges.
        range_begins = np.cumsum(num_in_range) - num_in_range
        shift = range_begins + skip - (np.cumsum(reads.take) - reads.take)
        return ranges, reads.gather + np.repeat(shift, reads.take)[reads.gather]

    def first_chunk(self) -> ByteRanges:
        """The byte range of the first chunk of the first shard."""
        num_records = min(self._split.chunk_examples, int(self._lengths[0]))
        first, begins, ends = np.zeros(1, np.int64), self._chunk_begins[:1], self._chunk_ends[:1]
        return ByteRanges(self.paths, first, begins, ends, num_records)

    @no_autograph
    def read(self, plan: dict[str, tf.Tensor]) -> tf.Tensor:
        """The records of all pieces of `plan`: string [sum(take)], each CRC checked.

        A graph without py_function. A damaged record is a DataLossError.
        """
        paths, take = tf.gather(self.paths, plan["shards"]), plan["take"]
        pieces = (paths, plan["byte_offsets"], plan["skip"], take)
        num_records = tf.reduce_sum(take)
        # Usually one read of the file for each chunk: the buffer has the size of the largest.
        chunk_bytes = int((self._chunk_ends - self._chunk_begins).max())
        buffer_bytes = min(max(chunk_bytes, _MIN_BUFFER_BYTES), _MAX_BUFFER_BYTES)
        records = self._records(pieces, buffer_bytes).batch(num_records).get_single_element()
        # A dataset ends where its file ends, even if that is too early.
        is_complete = tf.equal(tf.size(records, tf.int64), num_records)
        message = f"A file of split {self._split.name} is shorter than when its index was built."
        with tf.control_dependencies([tf.debugging.Assert(is_complete, [message])]):
            return tf.identity(records)

    @no_autograph
    def all_records(self) -> tf.data.Dataset:
        """Every record once, by record number; without py_function."""
        first_offsets = np.array([shard.offsets[0] for shard in self._split.shards], np.int64)
        pieces = (self.paths, first_offsets, np.zeros_like(first_offsets), self._lengths)
        return self._records(pieces, _MAX_BUFFER_BYTES)

    def _seek(self, shards: Int64s, chunks: Int64s, skip: Int64s) -> tuple[Int64s, Int64s]:
        """The byte to start at for record `skip` of each chunk, and the records to skip from there.

        Nothing is skipped if all records of the shard have one length.
        """
        frame_bytes = self._frame_bytes[shards]
        at_chunk = self._chunk_begins[self._first_chunks[shards] + chunks]
        return at_chunk + skip * frame_bytes, np.where(frame_bytes > 0, 0, skip)

    @no_autograph
    def _records(self, pieces: tuple[object, ...], buffer_bytes: int) -> tf.data.Dataset:
        """Records [skip[i], skip[i] + take[i]) from byte byte_offsets[i] of paths[i], all i."""

        @no_autograph
        def piece(
            path: tf.Tensor, offset: tf.Tensor, skip: tf.Tensor, take: tf.Tensor
        ) -> tf.data.Dataset:
            variant = tf.raw_ops.TFRecordDatasetV2(
                filenames=tf.reshape(path, [1]),
                compression_type="",
                buffer_size=buffer_bytes,
                byte_offsets=offset[tf.newaxis],
            )
            records = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
            return records.skip(skip).take(take)

        return tf.data.Dataset.from_tensor_slices(pieces).flat_map(piece)
