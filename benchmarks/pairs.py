"""Comparison of two programs: turns, ratios, medians. This module starts no program.

    pairs = list(turns(project, peer, num_rounds=5))
    summary = summarise([project / peer for project, peer in pairs])

The speed of a shared machine drifts. The two programs run one directly after the other, in an order
that changes from round to round, and the ratios are summarised, so a steady drift cancels.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def turns(
    project: Callable[[], float], peer: Callable[[], float], num_rounds: int
) -> Iterator[tuple[float, float]]:
    """The values (project, peer) of each round: peer first, then project first, and so on."""
    for number in range(num_rounds):
        if number % 2:
            of_project = project()
            of_peer = peer()
        else:
            of_peer = peer()
            of_project = project()
        yield of_project, of_peer


@dataclass(frozen=True)
class Summary:
    """A median with minimum and maximum."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        """`1.02 (0.98 to 1.05)`."""
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


def summarise(values: Sequence[float]) -> Summary:
    """The summary of one or more values."""
    return Summary(statistics.median(values), min(values), max(values))


def number(values: Sequence[float]) -> str:
    """The median, with at least three digits."""
    median = statistics.median(values)
    return f"{median:,.0f}" if median >= 100 else f"{median:.3g}"


def steady(values: Sequence[float]) -> float:
    """The median of the last half of `values`, in the order of their measurement."""
    return statistics.median(values[len(values) // 2 :])


def is_met(ratio: float, bar: float, *, at_most: bool) -> bool:
    """Returns True if `ratio` reaches the bar. `at_most`: smaller is better, as for times."""
    return ratio <= bar if at_most else ratio >= bar


def rate_of(reports: Sequence[Mapping[str, Any]], first_step: int = 0) -> float:
    """Steps a second after the first report, from the training reports of a run in order.

    The first report includes tracing. `first_step`: only reports from that step on count.

    Raises:
        ValueError: there are fewer than two reports.
    """
    counted = [report for report in reports if report["step"] >= first_step]
    if len(counted) < 2:
        raise ValueError(f"A rate needs two reports. Received: {len(counted)}. Train longer.")
    steps: float = counted[-1]["step"] - counted[0]["step"]
    secs: float = counted[-1]["seconds"] - counted[0]["seconds"]
    return steps / secs
