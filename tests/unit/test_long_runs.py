"""What benchmarks.long_runs makes of its samples: lines through them, and a verdict."""

from pathlib import Path

import pytest

from benchmarks.long_runs import (
    Comparison,
    Progress,
    Sample,
    Trend,
    compared,
    is_flat,
    summary,
    table,
    trend,
)
from benchmarks.table import newest_report

MIB = 2**20


def test_line_is_through_the_samples_after_the_warm_up() -> None:
    times = [0, 10, 20, 30, 40]
    found = trend(times, [900, 500, 100, 110, 120], warmup_secs=20)
    assert (found.first, found.last) == pytest.approx((100, 120))
    assert found.per_hour == pytest.approx(3600)
    with pytest.raises(ValueError, match="only 1 of 5"):
        trend(times, [0] * 5, warmup_secs=40)


def test_noise_without_growth_is_flat() -> None:
    times = list(range(0, 1800, 10))
    values = [200 * MIB + (i % 7) * MIB for i in range(len(times))]
    assert is_flat("memory", trend(times, values, 300))


@pytest.mark.parametrize(
    ("name", "first", "last", "flat"),
    [
        ("memory", 300 * MIB, 305 * MIB, True),
        ("memory", 300 * MIB, 307 * MIB, False),
        ("memory", 20 * MIB, 23 * MIB, True),
        ("memory", 300 * MIB, 200 * MIB, True),
        ("descriptors", 50, 50.9, True),
        ("descriptors", 50, 51, False),
        ("threads", 12, 13, False),
    ],
)
def test_flat_is_what_the_synopsis_says(name: str, first: float, last: float, flat: bool) -> None:
    assert is_flat(name, Trend(first, last, 0.0)) is flat


def progress(rates: list[float], cpu_secs: float = 0.01) -> list[Progress]:
    """A sample each 10 s, with the rate until the next one, and the CPU time of a step."""
    found = [Progress(0.0, 0, 20.0, 0.0)]
    for rate in rates:
        last = found[-1]
        steps = last.steps + round(10 * rate)
        found.append(Progress(last.seconds + 10, steps, last.reported_secs + 10, steps * cpu_secs))
    return found


def test_run_is_compared_with_a_new_one_under_the_same_load() -> None:
    loads = [1.0, 0.5, 0.8, 0.9, 1.0, 0.4, 0.7, 1.0, 0.6, 0.9] * 3
    old = progress([100 * load for load in loads], cpu_secs=0.011)
    found = compared(old, progress([200 * load for load in loads]))
    assert (found.ratio, found.cpu_ratio) == pytest.approx((0.5, 1.1))
    assert found.error < 1e-6
    assert not found.is_flat, "it waits for something"
    noisy = [100 * load * (0.8 if i % 3 else 1.3) for i, load in enumerate(loads[::-1])]
    assert compared(progress(noisy), progress([100 * load for load in loads])).error > 0.03
    with pytest.raises(ValueError, match="only 5 samples"):
        compared(progress([1.0] * 4), progress([1.0] * 40))
    with pytest.raises(ValueError, match="no step"):
        compared(progress([1.0] * 40), progress([1.0] * 20 + [0.0] * 20))


@pytest.mark.parametrize(
    ("ratio", "error", "flat"), [(0.971, 0.0, True), (0.96, 0.001, False), (0.96, 0.006, True)]
)
def test_rate_may_fall_by_3_percent_and_the_error(ratio: float, error: float, flat: bool) -> None:
    assert Comparison(100.0, ratio, error, 1.0).is_flat is flat


def test_newest_report_is_that_of_the_last_complete_report_of_training(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    old = '{"split": "train", "step": 100}\n'
    metrics.write_text(old * 10_000 + '{"split": "train", "step": 200}\n{"split": "eval"}\n{"spl')
    assert newest_report(metrics)["step"] == 200
    metrics.write_text('{"split": "eval"}\n')
    with pytest.raises(ValueError, match="no report of training"):
        newest_report(metrics)


def test_what_grows_is_named() -> None:
    steady = [Sample(100 * MIB, 20, 8)] * 60
    leaking = [Sample(100 * MIB, 20 + i / 10, 8) for i in range(60)]
    times = [10.0 * i for i in range(60)]
    rows, grown = table("ps", times, {"chief 0": steady, "ps 0": leaking}, 0)
    assert len(rows) == 6
    assert grown == ["descriptors of ps 0"]
    assert rows[0] == "| ps | chief 0 | memory | 100.0 | 100.0 | 0.0 | yes |"
    assert rows[4] == "| ps | ps 0 | descriptors | 20.0 | 25.9 | 36.0 | no |"
    assert summary("ps", grown, Comparison(90.0, 0.9, 0.012, 1.1)) == (
        "ps: not flat: descriptors of ps 0; 90 steps/s, -10.0% (+-1.2) to a new run at the same "
        "time; CPU time for a step +10.0%."
    )
