"""Generated clicks on advertisements, shaped like Criteo's: 13 numbers, 26 columns of ids, a label.

The columns have the numbers of ids of Criteo's Kaggle data, times `id_scale`. The id with rank r
has a probability of about r ** -1.05 (Zipf). The probability of a click is the sigmoid of

    bias + sum of weight * number + sum of the effects of the ids + products of effects of columns

in which effects are hashes of (seed, column, id). A model that knew this formula would have the
best AUC, which clicks.json has, with the number of ids of each column. Example i depends on the
seed and i only.
"""

import functools
import json
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from data.prepare.sources import Options, Source, SourceSplit, test_fraction
from data.prepare.sources.examples import Classes, feature_files, tensor
from data.split_mix import finalized
from data.system.files import DataError
from data.tfrecord import examples
from data.tfrecord.crc import Int64s
from data.tfrecord.examples import fixed

FILE_NAME = "clicks.json"
EXAMPLES = 100_000
SCALE = 0.001
NUM_DENSE = 13
# The numbers of ids in the 26 columns of the Criteo Kaggle data.
CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
_EXPONENT = 1.05
_FEWEST_IDS = 3
_BIAS = -1.6
# Columns whose effects are multiplied.
_PAIRS = ((0, 13), (5, 8), (7, 24), (16, 19))

# Examples that are made together.
_BLOCK = 4096

_Floats = npt.NDArray[np.float64]


def source(name: str, path: str, options: Options) -> Source:
    """Generates `num_clicks` for training, and `test_fraction` of this number more for testing.

    No file is read: `path` is not used.
    """
    num_train = EXAMPLES if options.num_clicks is None else options.num_clicks
    scale = SCALE if options.id_scale is None else options.id_scale
    fraction = test_fraction(options)
    if num_train < 1:
        raise DataError(
            f"--num_clicks must be 1 or more. Received: {num_train}. Type --num_clicks=1000."
        )
    if not 0 < scale <= 1:
        raise DataError(
            f"--id_scale must be above 0, at most 1. Received: {scale}. Type --id_scale=0.01."
        )
    clicks = Clicks(options.seed or 0, scale)
    num_test = max(2, math.ceil(fraction * num_train))
    record_bytes = 8 * (NUM_DENSE + len(CARDINALITIES))
    splits = {
        split: SourceSplit(count, count * record_bytes, functools.partial(clicks.records, begin))
        for split, begin, count in (("train", 0, num_train), ("test", num_train, num_test))
    }
    best = clicks.best_auc(num_train, num_test)
    nodes = {
        "numbers": tensor("float32", (NUM_DENSE,)),
        "categorical": tensor("int32", (len(CARDINALITIES),)),
    }
    known = {
        "cardinalities": list(clicks.cardinalities),
        "zipf_exponent": _EXPONENT,
        "best_auc": round(best, 6),
    }
    files = feature_files(nodes, {"click": Classes(2)})
    files[FILE_NAME] = json.dumps(known, indent=2) + "\n"
    note = (
        f"{sum(clicks.cardinalities):,} ids in {len(CARDINALITIES)} columns; the best AUC on the "
        f"test split is {best:.4f}"
    )
    return Source(name, splits, files, [note])


class Clicks:
    """The examples of a seed; `cardinalities` has the number of ids of each column."""

    def __init__(self, seed: int, scale: float) -> None:
        self._seed = seed
        self.cardinalities = [max(_FEWEST_IDS, math.ceil(scale * n)) for n in CARDINALITIES]

    def records(self, begin: int, first: int, last: int) -> Iterator[bytes]:
        """The records of examples begin + first to begin + last - 1."""
        for low, high in _blocks(begin + first, begin + last):
            dense, ids, probabilities, draws = self._examples(low, high)
            numbers, categorical = fixed(dense.astype("<f4")), fixed(ids.astype("<i4"))
            clicked = (draws < probabilities).astype(np.int64)
            yield from examples.records(
                {"numbers": numbers, "categorical": categorical, "click": clicked}
            )

    def best_auc(self, begin: int, count: int) -> float:
        """The AUC of the true probabilities of `count` examples."""
        parts = [self._examples(low, high)[2:] for low, high in _blocks(begin, begin + count)]
        probabilities = np.concatenate([part[0] for part in parts])
        clicked = np.concatenate([part[1] < part[0] for part in parts])
        return auc(probabilities, clicked)

    def _examples(self, low: int, high: int) -> tuple[_Floats, Int64s, _Floats, _Floats]:
        """Examples low to high - 1, of one block: numbers, ids, probabilities and draws."""
        block, columns = low // _BLOCK, len(CARDINALITIES)
        # Raw bits: NumPy may change its distributions, but not these.
        bits = np.random.Philox(key=[self._seed, block]).random_raw(
            _BLOCK * (2 * NUM_DENSE + columns + 1)
        )
        uniform = ((bits >> np.uint64(11)) * 2.0**-53).reshape(_BLOCK, -1)
        uniform = uniform[low - block * _BLOCK : high - block * _BLOCK]
        lengths, angles, of_ids, draws = np.split(
            uniform, [NUM_DENSE, 2 * NUM_DENSE, 2 * NUM_DENSE + columns], axis=1
        )
        dense = np.sqrt(-2 * np.log1p(-lengths)) * np.cos(2 * np.pi * angles)
        ids = _zipf(of_ids, np.array(self.cardinalities, np.float64))
        effects = self._effects(ids)
        weights = self._effects(np.arange(NUM_DENSE)[np.newaxis, :], salt=1)[0]
        logits = _BIAS + 0.25 * dense @ weights + 0.25 * effects.sum(axis=1)
        for left, right in _PAIRS:
            logits += 0.5 * effects[:, left] * effects[:, right]
        return dense, ids, 1 / (1 + np.exp(-logits)), draws[:, 0]

    def _effects(self, ids: Int64s, salt: int = 0) -> _Floats:
        """A number for each id of each column: uniform, with mean 0 and variance 1."""
        columns = np.arange(ids.shape[1], dtype=np.uint64)
        start = np.uint64((self._seed * 2 + salt) & (2**32 - 1)) << np.uint64(32)
        states = ids.astype(np.uint64) + (columns << np.uint64(40)) + start
        mixed: npt.NDArray[np.uint64] = finalized(states)
        uniform = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return (uniform - 0.5) * math.sqrt(12)


def auc(scores: _Floats, is_positive: npt.NDArray[np.bool_]) -> float:
    """The probability that a positive example has a higher score than a negative one.

    Equal scores count as half. NaN if all examples are of one kind.
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = int(is_positive.sum())
    negatives = len(scores) - positives
    if not positives or not negatives:
        return math.nan
    found = ranks[is_positive].sum() - positives * (positives + 1) / 2
    return float(found / (positives * negatives))


def _zipf(uniform: _Floats, sizes: _Floats) -> Int64s:
    """Ids from 0 to size - 1 of each column, by the inverse of the continuous distribution."""
    power = 1 - _EXPONENT
    ranks = (1 + uniform * ((sizes + 1) ** power - 1)) ** (1 / power)
    return np.minimum(ranks.astype(np.int64) - 1, sizes.astype(np.int64) - 1)


def _blocks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """The parts of first to last - 1 that are in one block each."""
    while first < last:
        end = min(last, (first // _BLOCK + 1) * _BLOCK)
        yield first, end
        first = end
