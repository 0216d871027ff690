"""Statistics of how well an order mixes records, to compare with a uniform shuffle.

    epoch = order.records(0, num_batches)
    print(measure(epoch), measure(uniform(num_examples, batch_size)))

| statistic | says | uniform shuffle of N records in batches of B |
| --- | --- | --- |
| rank correlation | whether an epoch still goes through the file from start to end | 0 |
| neighbours in a batch | how often two neighbours in the file share a batch | (B - 1) / (N - 1) |
| near another | the part of a batch with another record within 32 places | about 64 (B - 1) / N |
"""

import dataclasses

import numpy as np

from data.order import Int64s

_NEAR = 32


@dataclasses.dataclass(frozen=True)
class Mixing:
    """The statistics of one epoch.

    `rank_correlation`: between place in the epoch and place in the file (Spearman), -1 to 1.
    `neighbours_in_a_batch`: the fraction of neighbours in the file that share a batch, 0 to 1.
    `near_another`: the fraction of a batch with another record less than 32 places away, 0 to 1.
    """

    rank_correlation: float
    neighbours_in_a_batch: float
    near_another: float


def measure(batches: Int64s) -> Mixing:
    """Statistics of the full batches of an epoch: int64 [number of batches, B], record numbers."""
    records = batches.reshape(-1)
    batch_of = np.full(int(records.max()) + 1, -1)
    batch_of[records] = np.repeat(np.arange(len(batches)), batches.shape[1])
    read = (batch_of[1:] >= 0) & (batch_of[:-1] >= 0)
    together = (batch_of[1:] == batch_of[:-1]) & read
    gaps = np.diff(np.sort(batches, axis=1), prepend=-_NEAR, append=np.iinfo(np.int64).max)
    return Mixing(
        rank_correlation=float(np.corrcoef(np.arange(len(records)), records)[0, 1]),
        neighbours_in_a_batch=float(together.sum() / read.sum()),
        near_another=float(np.mean(np.minimum(gaps[:, 1:], gaps[:, :-1]) < _NEAR)),
    )


def uniform(num_examples: int, batch_size: int) -> Int64s:
    """The full batches of an epoch in a uniform random order."""
    shuffled = np.random.default_rng(0).permutation(num_examples)
    num_used = num_examples - num_examples % batch_size
    return shuffled[:num_used].reshape(-1, batch_size)
