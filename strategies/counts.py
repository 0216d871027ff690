"""What workers did, by name: added up over the parts of a run that was stopped and went on.

counts = with_shares(added(saved, counted_since_the_start))
"""

from collections.abc import Mapping
from typing import Any

# {"worker_steps": {"worker 0": 7}}; in place of a number there may be a histogram, {value: number}.
Counts = Mapping[str, Mapping[str, Any]]


def added(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> dict[Any, Any]:
    """Both, number by number. What only one has stays as it is; shares are left out."""
    total: dict[Any, Any] = {}
    for part in (_with_numbers(left), _with_numbers(right)):
        for key, value in part.items():
            if key == "worker_share":
                continue
            if isinstance(value, Mapping):
                total[key] = added(total.get(key, {}), value)
            else:
                total[key] = total.get(key, 0) + value
    return total


def with_shares(counts: Counts) -> Counts:
    """`counts`, and each worker's part of all steps: even shares are a cluster in balance."""
    steps = counts["worker_steps"]
    total = max(1, sum(steps.values()))
    return {**counts, "worker_share": {name: round(n / total, 4) for name, n in steps.items()}}


def _with_numbers(counts: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """`counts` with numbers for keys that are numbers: JSON has made strings of them."""
    return {int(k) if isinstance(k, str) and k.isdigit() else k: v for k, v in counts.items()}
