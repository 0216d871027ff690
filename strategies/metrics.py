"""Metrics as values: a (total, count) pair for each name.

    metrics = add_metrics(executor.run(100), executor.run(50))
    means(metrics)                                     # {"loss": 0.31, "accuracy": 0.92}

The pairs add up over steps, replicas and workers. They are values and not variables, because two
asynchronous workers would overwrite each other's updates (keras.metrics loses updates).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# (total, count) of each metric over the examples of some steps.
Metrics = dict[str, tuple[float, float]]


def add_metrics(left: Metrics, right: Metrics) -> Metrics:
    """Metrics over the examples of both. An empty side is neutral."""
    if not left or not right:
        return dict(left or right)
    return {
        name: (total + right[name][0], count + right[name][1])
        for name, (total, count) in left.items()
    }


def to_metrics(names: Sequence[str], totals: npt.NDArray[np.float64]) -> Metrics:
    """Names the (total, count) rows of `totals`, float64 [metrics, 2]."""
    return {name: (float(row[0]), float(row[1])) for name, row in zip(names, totals, strict=True)}


def means(metrics: Metrics) -> dict[str, float]:
    """The mean of each metric over all examples; NaN if there were none."""
    return {
        name: total / count if count else float("nan") for name, (total, count) in metrics.items()
    }
