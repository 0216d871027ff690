"""Position -> record: the global order, a pure function of (seed, position).

    order = Order(shard_lengths=(1000, 437), chunk_examples=16, batch_size=100, lanes=20,
                  window_batches=16, seed=0, shuffle=True)
    order.records(first_batch=7, num_batches=1)      # int64 [1, 100], record numbers of batch 7

The definition:

* Position p is epoch * N + offset, over N records. Batch s is positions [s*B, (s+1)*B).
* There are V lanes; V divides B, and is B if nothing else is asked for; the lane of p is p mod V.
  So every batch takes exactly B/V records from each lane, across the ends of epochs too. Lane v's
  length in epoch e is the number of positions p in [e*N, (e+1)*N) with p mod V == v.
* The records, shards one after the other, are cut into chunks of c consecutive records of one shard
  (a shard's last may be shorter). Epoch e permutes the chunks with (seed, e): a sequence of N
  records. It is cut into V contiguous lanes of the lengths above, in order v = 0..V-1; lane v
  begins at L_v(e).
* A window is W = window_batches * B positions of an epoch (the last one is short): offset o is in
  window w = o // W, and is row o // V of its lane; a window holds W/V rows of each lane, and
  permutes them with (seed, e, v, w). So position p is record

      sequence_e[L_v(e) + w*W/V + permutation(o // V - w*W/V)].

* Without shuffling both permutations are the identity; the lanes stay.
* Examples of a batch stand lane by lane, then row by row. Replica r of R has the lanes
  [r*V//R, (r+1)*V//R), so its part is a contiguous slice of the batch, for any R.

With V = B, neighbours on disk meet in a batch more seldom than in a uniform shuffle. With fewer
lanes, the B/V records that a batch takes from one window of a lane are often of one chunk.

Permutations are a stable sort by a hash, not numpy's Generator, whose streams may change between
versions. The hash folds the words of the key with SplitMix64 (split_mix.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from data.split_mix import GAMMA, finalized

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Plan = dict[str, npt.NDArray[np.generic]]  # What to read, as arrays for a graph.

# The first word of a key says what the key permutes or draws.
_CHUNKS, _ROWS, _EXAMPLES = 1, 2, 3
_EPOCHS_CACHED = 3


def replica_lanes(lanes: int, replica: int, num_replicas: int) -> range:
    """The lanes that `replica` of `num_replicas` reads.

    Raises:
        ValueError: a replica would have no lane.
    """
    if num_replicas > lanes:
        raise ValueError(
            f"{num_replicas} replicas cannot share {lanes} lanes: each needs at least one. "
            f"Set --config.data.lanes to a divisor of the batch size that is {num_replicas} or "
            f"more, or raise the batch size."
        )
    return range(replica * lanes // num_replicas, (replica + 1) * lanes // num_replicas)


@dataclasses.dataclass(frozen=True, eq=False)
class Reads:
    """The records to read from disk for some batches.

    There are m pieces, each a run of consecutive records of one shard, in file order, without
    overlap. Piece i begins `skip[i]` records after the start of chunk `chunks[i]` of shard
    `shards[i]` and is `take[i]` records long; int64 [m] each. `gather`, int64 [num_batches, n],
    picks the batches from the concatenation of all pieces.
    """

    shards: Int64s
    chunks: Int64s
    skip: Int64s
    take: Int64s
    gather: Int64s


@dataclasses.dataclass(frozen=True)
class _Epoch:
    """Chunk i begins at index `begins[i]` of the epoch, and lane v at `lane_begins[v]`."""

    begins: Int64s
    records: Int64s  # The first of each chunk.
    lane_begins: Int64s


@dataclasses.dataclass(frozen=True)
class Order:
    """The endless order over one split: equal fields, equal order, on every machine.

    Starting costs the same at every position. Safe to call from several threads. Fields are not
    checked here: the checks of the config, and `open_split`, come before.
    """

    shard_lengths: tuple[int, ...]
    chunk_examples: int
    batch_size: int
    lanes: int
    window_batches: int
    seed: int
    shuffle: bool

    @property
    def num_examples(self) -> int:
        """N, the number of records in an epoch."""
        return sum(self.shard_lengths)

    def positions(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Int64s:
        """Positions of the examples of some batches, int64 [num_batches, len(lanes) * B // V]."""
        lanes = range(self.lanes) if lanes is None else lanes
        batch = np.arange(first_batch, first_batch + num_batches, dtype=np.int64) * self.batch_size
        lane = np.arange(lanes.start, lanes.stop, dtype=np.int64)
        row = np.arange(0, self.batch_size, self.lanes, dtype=np.int64)
        positions = batch[:, None, None] + lane[:, None] + row
        return positions.reshape(num_batches, len(lane) * len(row))

    def records(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Int64s:
        """Record numbers of batches [first_batch, first_batch + num_batches).

        Records are numbered through all shards, in order. int64 [num_batches, len(lanes) * B // V],
        lane by lane. `lanes`: contiguous; all by default.
        """
        positions = self.positions(first_batch, num_batches, lanes)
        epoch = positions // self.num_examples
        records = np.empty_like(positions)
        for e in np.unique(epoch).tolist():
            here = epoch == e
            records[here] = self._epoch_records(e, positions[here])
        return records

    def seeds(
        self, first_batch: int, num_batches: int, lanes: range | None = None
    ) -> npt.NDArray[np.int32]:
        """A seed for each example of some batches: int32 [num_batches, n, 2].

        A function of (seed, position) alone: equal on any topology, and different for the same
        record in another epoch. Made for `tf.random.stateless_uniform` and similar functions.
        """
        positions = self.positions(first_batch, num_batches, lanes)
        hashes = _mix(hash_words(_EXAMPLES, self.seed) ^ positions.astype(np.uint64))
        words = np.stack([hashes >> np.uint64(32), hashes & np.uint64(0xFFFFFFFF)], axis=-1)
        return words.astype(np.uint32).view(np.int32)

    def reads(
        self, first_batch: int, num_batches: int, lanes: range | None = None, read_through: int = 0
    ) -> Reads:
        """The reading list for `records(first_batch, num_batches, lanes)`.

        A piece includes unwanted records between wanted ones of the same chunk, and between chunks
        up to `read_through`: to drop them is cheaper than to open the file again.
        """
        records = self.records(first_batch, num_batches, lanes)
        wanted, inverse = np.unique(records, return_inverse=True)
        shard_begins = _begins(np.array(self.shard_lengths, np.int64))
        shard = np.searchsorted(shard_begins, wanted, side="right") - 1
        in_shard = wanted - shard_begins[shard]
        chunk = in_shard // self.chunk_examples
        same_piece = (np.diff(shard) == 0) & (
            (np.diff(chunk) == 0) | (np.diff(wanted) <= read_through + 1)
        )
        first = np.flatnonzero(np.concatenate([[True], ~same_piece]))
        last = np.append(first[1:], len(wanted)) - 1
        take = wanted[last] - wanted[first] + 1
        piece = np.repeat(np.arange(len(first)), last - first + 1)
        read_at = _begins(take)[piece] + wanted - wanted[first][piece]
        return Reads(
            shards=shard[first],
            chunks=chunk[first],
            skip=in_shard[first] - chunk[first] * self.chunk_examples,
            take=take,
            gather=read_at[inverse.reshape(-1)].reshape(records.shape),
        )

    def windows(self, first_batch: int) -> Iterator[tuple[int, int]]:
        """Cuts the endless batches from `first_batch` on into runs of batches, (first, count).

        A run ends with the batch in which a window ends, for any `first_batch`. Reading one run at
        a time reads nearly every chunk once in each window.
        """
        window = self.window_batches * self.batch_size
        while True:
            epoch, offset = divmod(first_batch * self.batch_size, self.num_examples)
            in_epoch = min((offset // window + 1) * window, self.num_examples)
            end_batch = -(-(epoch * self.num_examples + in_epoch) // self.batch_size)
            yield first_batch, end_batch - first_batch
            first_batch = end_batch

    def _epoch_records(self, epoch: int, positions: Int64s) -> Int64s:
        sequence = self._epoch(epoch)
        offset = positions - epoch * self.num_examples
        lane, row = positions % self.lanes, offset // self.lanes
        if self.shuffle:
            row = self._shuffled_rows(epoch, lane, row)
        index = sequence.lane_begins[lane] + row
        chunk = np.searchsorted(sequence.begins, index, side="right") - 1
        return sequence.records[chunk] + index - sequence.begins[chunk]

    def _shuffled_rows(self, epoch: int, lane: Int64s, row: Int64s) -> Int64s:
        window_rows = self.window_batches * self.batch_size // self.lanes
        window = row // window_rows
        lanes = np.arange(lane.min(), lane.max() + 1)
        windows = np.arange(window.min(), window.max() + 1)
        # No lane is longer than this, so small data sets do not pay for a large window.
        width = min(window_rows, -(-self.num_examples // self.lanes))
        rows = np.arange(width)
        hashes = hash_words(_ROWS, self.seed, epoch).reshape(())
        for words in (lanes, windows, rows):  # uint64 [lanes, windows, rows] in the end.
            hashes = _mix(hashes[..., None] ^ words.astype(np.uint64))
        # Rows past the lane's end sort last: their hashes are all ones, and the sort is stable.
        lengths = np.diff(self._epoch(epoch).lane_begins, append=self.num_examples)[lanes]
        left = lengths[:, None] - windows * window_rows
        hashes[rows >= left[:, :, None]] = np.uint64(0xFFFFFFFFFFFFFFFF)
        permutation = np.argsort(hashes, axis=-1, kind="stable")
        begin = window * window_rows
        image: Int64s = permutation[lane - lanes[0], window - windows[0], row - begin]
        return begin + image

    @functools.cached_property
    def _epoch(self) -> Callable[[int], _Epoch]:
        return functools.lru_cache(_EPOCHS_CACHED)(self._build_epoch)

    def _build_epoch(self, epoch: int) -> _Epoch:
        lengths = np.array(self.shard_lengths, np.int64)
        chunks = -(-lengths // self.chunk_examples)
        shard = np.repeat(np.arange(len(lengths)), chunks)
        in_shard = (np.arange(len(shard)) - _begins(chunks)[shard]) * self.chunk_examples
        records = _begins(lengths)[shard] + in_shard
        size = np.minimum(self.chunk_examples, lengths[shard] - in_shard)
        if self.shuffle:
            numbers = np.arange(len(shard), dtype=np.uint64)
            hashes = _mix(hash_words(_CHUNKS, self.seed, epoch) ^ numbers)
            permutation = np.argsort(hashes, kind="stable")
            records, size = records[permutation], size[permutation]
        # Positions p < x with p mod V == v: (x + V - 1 - v) // V. These are Python's integers,
        # because x has no bound.
        begin, v = epoch * self.num_examples, self.lanes
        end = begin + self.num_examples
        lane_lengths = [(end + v - 1 - i) // v - (begin + v - 1 - i) // v for i in range(v)]
        return _Epoch(_begins(size), records, _begins(np.array(lane_lengths, np.int64)))


def _begins(lengths: Int64s) -> Int64s:
    begins: Int64s = np.cumsum(lengths) - lengths
    return begins


def _mix(z: Uint64s) -> Uint64s:
    mixed: Uint64s = finalized(z + np.uint64(GAMMA))
    return mixed


def hash_words(*words: int) -> Uint64s:
    """A key made of words: uint64 [1], because arrays wrap around and numpy's scalars warn."""
    key = np.zeros(1, np.uint64)
    for word in words:
        key = _mix(key ^ np.uint64(word % 2**64))
    return key
