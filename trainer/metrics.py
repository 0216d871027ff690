"""Metrics as values: (total, count) a name, which add up over steps, replicas and workers.

Not variables: two asynchronous workers would overwrite each other's (keras.metrics loses updates).
"""

from strategies.base import Metrics


def means(metrics: Metrics) -> dict[str, float]:
    """The mean over all examples; nan where there were none."""
    return {
        name: total / count if count else float("nan") for name, (total, count) in metrics.items()
    }
