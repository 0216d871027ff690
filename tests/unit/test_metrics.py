"""(total, count) pairs add up, whatever the parts."""

import math

from strategies.base import add
from trainer.metrics import means


def test_mean_is_over_examples_and_not_over_parts() -> None:
    both = add({"loss": (30.0, 10.0)}, {"loss": (1.0, 1.0)})
    assert both == {"loss": (31.0, 11.0)}
    assert means(both) == {"loss": 31 / 11}


def test_nothing_is_neutral_on_either_side() -> None:
    metrics = {"loss": (30.0, 10.0)}
    assert add({}, metrics) == add(metrics, {}) == metrics
    assert add({}, {}) == {}


def test_no_examples_have_no_mean() -> None:
    assert math.isnan(means({"loss": (0.0, 0.0)})["loss"])
