import json
import math

from strategies.worker_stats import WorkerStats, added, mean_staleness, with_shares

BEFORE: WorkerStats = {
    "worker_steps": {"worker 0": 30, "worker 1": 10},
    "staleness": {"worker 0": {0: 25, 1: 5}, "worker 1": {0: 10}},
}
SINCE: WorkerStats = {
    "worker_steps": {"worker 0": 10, "worker 2": 50},
    "staleness": {"worker 0": {1: 4, 2: 6}, "worker 2": {0: 50}},
}


def test_counts_of_two_parts_of_a_run_are_added_number_by_number() -> None:
    saved = json.loads(json.dumps(with_shares(BEFORE)))
    assert added(saved, SINCE) == {
        "worker_steps": {"worker 0": 40, "worker 1": 10, "worker 2": 50},
        "staleness": {"worker 0": {0: 25, 1: 9, 2: 6}, "worker 1": {0: 10}, "worker 2": {0: 50}},
    }
    assert added({}, SINCE) == SINCE


def test_shares_are_of_all_steps() -> None:
    counts = with_shares(added(BEFORE, SINCE))
    assert counts["worker_share"] == {"worker 0": 0.4, "worker 1": 0.1, "worker 2": 0.5}
    assert with_shares({"worker_steps": {"worker 0": 0}})["worker_share"] == {"worker 0": 0.0}


def test_mean_staleness_is_that_of_all_gradients() -> None:
    assert mean_staleness({"0": 1, "2": 3}) == 1.5
    assert math.isnan(mean_staleness({}))
