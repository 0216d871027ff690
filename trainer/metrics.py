"""Metrics as values: (total, count) a name, which add up over steps, replicas and workers.

Not variables: two asynchronous workers would overwrite each other's (keras.metrics loses updates).
"""

from strategies.base import Metrics


def add(left: Metrics, right: Metrics) -> Metrics:
    """Metrics over the examples of both. An empty side is neutral."""
    if not left or not right:
        return dict(left or right)
    return {
        name: (total + right[name][0], count + right[name][1])
        for name, (total, count) in left.items()
    }


def means(metrics: Metrics) -> dict[str, float]:
    """The mean over all examples; nan where there were none."""
    return {
        name: total / count if count else float("nan") for name, (total, count) in metrics.items()
    }
