"""How many different ids the columns of a data set have: the sizes of embedding tables.

    for column in count_ids(data_dir, split):
        print(column.name, column.num_different, column.ids[-1])

Counts are exact. Each different id of a column takes 16 bytes of memory, and several times that
while counts are merged.
"""

from collections.abc import Iterator

import numpy as np

from data.example_features import Feature, read_features
from data.system.files import DataError
from data.tfrecord import split as records
from data.tfrecord.crc import Int64s
from data.tfrecord.examples import PADDING

_BATCH = 4096
_MOST_PENDING = 1 << 20
_INTEGERS = ("int8", "int16", "int32", "int64", "uint16", "uint32")


class Counts:
    """The different ids of a column, and how often each occurs.

    Attributes:
        ids: int64 [n], sorted; as of the last call of `merge`.
        times: int64 [n], how often each of `ids` occurs.
        is_text: The ids are hashes.
    """

    def __init__(self, name: str, *, is_list: bool = False, is_text: bool = False) -> None:
        """`is_list`: PADDING is not counted."""
        self.name, self._is_list, self.is_text = name, is_list, is_text
        self.ids: Int64s = np.empty(0, np.int64)
        self.times: Int64s = np.empty(0, np.int64)
        self._pending: list[Int64s] = []
        self._num_pending = 0

    def add(self, ids: Int64s) -> None:
        """Counts `ids`, of any shape."""
        flat = ids.ravel()
        self._pending.append(flat[flat != PADDING] if self._is_list else flat)
        self._num_pending += flat.size
        # So that a merge, which sorts all ids, adds to them by half or more.
        if self._num_pending > max(_MOST_PENDING, len(self.ids) // 2):
            self.merge()

    def merge(self) -> None:
        """Adds what was counted since the last call to `ids` and `times`."""
        new, times = np.unique(np.concatenate([*self._pending, self.ids[:0]]), return_counts=True)
        self._pending, self._num_pending = [], 0
        both = np.concatenate([self.ids, new])
        self.ids, places = np.unique(both, return_inverse=True)
        # Sums of whole numbers below 2**53 are exact in float64.
        weights = np.concatenate([self.times, times])
        self.times = np.bincount(places, weights, len(self.ids)).astype(np.int64)

    @property
    def num_ids(self) -> int:
        """The number of all ids; equal ids count each time."""
        return int(self.times.sum())

    @property
    def num_different(self) -> int:
        """The number of different ids: the rows that a table of dynamic ids needs."""
        return len(self.ids)

    def num_used(self, times: int) -> int:
        """The number of different ids that occur at least `times` times."""
        return int((self.times >= times).sum())

    def share_of_most_frequent(self, number: int) -> float:
        """The share of the `number` most frequent ids in all ids; 0 if there is no id."""
        most = np.sort(self.times)[-number:]
        return float(most.sum() / max(1, self.num_ids))


def count_ids(data_dir: str, split: records.Split) -> Iterator[Counts]:
    """Yields the counts of each column of integers or text of `split`, which is read once.

    A feature of several integers has a column for each place, and one for all places. Text is
    hashed to 63 bits: of n different texts, two count as equal with a probability of n^2 / 2^64.
    """
    import tensorflow as tf

    features = read_features(data_dir)
    names = [name for name, feature in features.items() if _has_ids(feature)]
    if not names:
        raise DataError(f"{features.source} has no feature of integers or text, so no ids.")
    counters = {name: _counters(features[name]) for name in names}
    batches = records.batched_records(split, _BATCH)
    parsed = (features.parse_example(tf.constant(batch), names) for batch in batches)
    try:
        for example in parsed:
            for name, value in example.items():
                if value.dtype == tf.string:
                    hashed = tf.strings.to_hash_bucket_fast(value, 2**63 - 1)
                    # Hashes are not negative, so a single empty text has an id of its own.
                    value = tf.where(value == "", tf.constant(PADDING, tf.int64), hashed)
                ids = tf.cast(value, tf.int64).numpy()
                whole, *places = counters[name]
                whole.add(ids)
                for place, counter in enumerate(places):
                    counter.add(ids[:, place])
    except tf.errors.InvalidArgumentError as error:
        reason = error.message.splitlines()[0]
        raise DataError(
            f"A record of {data_dir} is not as its features.json says: {reason}"
        ) from None
    for whole, *places in counters.values():
        for counter in (*places, whole):
            counter.merge()
            yield counter


def _has_ids(feature: Feature) -> bool:
    is_whole = feature.kind == "tensor" and feature.dtype in _INTEGERS
    return (feature.is_text or is_whole) and len(feature.shape) < 2 and None not in feature.shape


def _counters(feature: Feature) -> list[Counts]:
    """The counter of all ids, and if there are several places, one for each."""
    is_list, is_text = bool(feature.shape), feature.is_text
    names = [feature.name]
    if is_list and feature.shape[0] != 1:
        places = range(feature.shape[0] or 0)
        names = [f"{feature.name}, all", *(f"{feature.name}[{place}]" for place in places)]
    return [Counts(name, is_list=is_list, is_text=is_text) for name in names]
