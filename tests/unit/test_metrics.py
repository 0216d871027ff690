"""(total, count) pairs add up, however the examples are divided."""

import math

import numpy as np

from strategies.metrics import Metrics, add_metrics, means


def test_mean_is_over_examples_and_not_over_parts() -> None:
    both = add_metrics(Metrics({"loss": (30.0, 10.0)}), Metrics({"loss": (1.0, 1.0)}))
    assert both == {"loss": (31.0, 11.0)}
    assert means(both) == {"loss": 31 / 11}


def test_empty_metrics_are_neutral_on_either_side() -> None:
    metrics = Metrics({"loss": (30.0, 10.0)})
    assert add_metrics(Metrics(), metrics) == add_metrics(metrics, Metrics()) == metrics
    assert add_metrics(Metrics(), Metrics()) == Metrics()


def test_mean_of_no_examples_is_nan() -> None:
    assert math.isnan(means(Metrics({"loss": (0.0, 0.0)}))["loss"])


def test_states_add_up_and_are_evaluated_after_the_sum() -> None:
    def root(states: np.ndarray) -> dict[str, float]:
        return {"rmse": float(np.sqrt(states[0] / states[1]))}

    parts = [Metrics({"loss": (1.0, 1.0)}, np.array(state), root) for state in ([9, 1], [7, 3])]
    assert means(add_metrics(*parts)) == {"loss": 1.0, "rmse": 2.0}
