"""Counts of what each worker did, summed over all parts of a run that was stopped and resumed.

counts = with_shares(added(saved, counted_since_start))
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

# Any: a key is a worker's name or a number, a value is a number or a histogram {value: number}.
Counts: TypeAlias = dict[Any, Any]
# {"worker_steps": {"worker 0": 7}, "staleness": {"worker 0": {0: 6, 1: 1}}}
WorkerStats: TypeAlias = Mapping[str, Counts]


def added(left: Mapping[str, object], right: Mapping[str, object]) -> Counts:
    """The sum of both, number by number. A key of one side is copied; shares are left out."""
    total: Counts = {}
    for part in (left, right):
        for name, value in part.items():
            if name == "worker_share":
                continue
            # JSON has turned the keys of histograms into strings.
            key = int(name) if str(name).isdigit() else name
            if isinstance(value, Mapping):
                total[key] = added(total.get(key, {}), value)
            else:
                total[key] = total.get(key, 0) + value
    return total


def mean_staleness(counts: Mapping[str, int]) -> float:
    """The mean of a histogram {staleness: number of gradients} of a report; NaN if it is empty."""
    total = sum(counts.values())
    return sum(int(age) * number for age, number in counts.items()) / total if total else math.nan


def with_shares(counts: WorkerStats) -> WorkerStats:
    """Adds each worker's share of all steps; equal shares show a balanced cluster."""
    steps = counts["worker_steps"]
    total = max(1, sum(steps.values()))
    return {**counts, "worker_share": {name: round(n / total, 4) for name, n in steps.items()}}
