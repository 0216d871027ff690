"""(total, count) pairs add up, however the examples are divided."""

import math

from strategies.metrics import add_metrics, means


def test_mean_is_over_examples_and_not_over_parts() -> None:
    both = add_metrics({"loss": (30.0, 10.0)}, {"loss": (1.0, 1.0)})
    assert both == {"loss": (31.0, 11.0)}
    assert means(both) == {"loss": 31 / 11}


def test_empty_metrics_are_neutral_on_either_side() -> None:
    metrics = {"loss": (30.0, 10.0)}
    assert add_metrics({}, metrics) == add_metrics(metrics, {}) == metrics
    assert add_metrics({}, {}) == {}


def test_mean_of_no_examples_is_nan() -> None:
    assert math.isnan(means({"loss": (0.0, 0.0)})["loss"])
