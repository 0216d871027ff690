"""Metrics as values: a (total, count) pair for each mean, and summed states of other metrics.

    metrics = add_metrics(executor.run(100), executor.run(50))
    means(metrics)                              # {"loss": 0.31, "accuracy": 0.92, "auc": 0.9}

All of them add up over steps, replicas and workers. They are values and not variables, because two
asynchronous workers would overwrite each other's updates (keras.metrics loses updates).
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Pairs = Mapping[str, tuple[float, float]]
Floats = npt.NDArray[np.float64]


class Metrics(dict[str, tuple[float, float]]):
    """The (total, count) of each mean over the examples of some steps, by name.

    Attributes:
        states: The summed states of the metrics that are not a mean over examples, float64 [n].
        results: Computes these metrics from `states`.
        lookups: Of each table, by the name of its layer: the different ids that each replica used
            in each training step, and all ids.
        part_digests: Of the gradients of each part of a batch, with virtual replicas: integers.
    """

    def __init__(
        self,
        pairs: Pairs | None = None,
        states: Floats | None = None,
        results: Callable[[Floats], Mapping[str, float]] | None = None,
        lookups: Pairs | None = None,
        part_digests: Floats | None = None,
    ) -> None:
        super().__init__(pairs or {})
        self.states = np.zeros([0]) if states is None else states
        self.results = results
        self.lookups = lookups or {}
        self.part_digests = np.zeros([0]) if part_digests is None else part_digests


def add_metrics(left: Metrics, right: Metrics) -> Metrics:
    """Metrics over the examples of both. An empty side is neutral."""
    if not left or not right:
        return left or right
    lookups = _sum_of_pairs(left.lookups, right.lookups)
    pairs = _sum_of_pairs(left, right)
    states, digests = left.states + right.states, left.part_digests + right.part_digests
    return Metrics(pairs, states, left.results, lookups, digests)


def means(metrics: Metrics) -> dict[str, float]:
    """Each metric over all examples; a mean over no examples is NaN."""
    found = {
        name: total / count if count else float("nan") for name, (total, count) in metrics.items()
    }
    return {**found, **(metrics.results(metrics.states) if metrics.results else {})}


def _sum_of_pairs(left: Pairs, right: Pairs) -> dict[str, tuple[float, float]]:
    return {name: (a + right[name][0], b + right[name][1]) for name, (a, b) in left.items()}
