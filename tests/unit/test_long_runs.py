"""What benchmarks.long_runs makes of its samples: lines through them, and a verdict."""

from pathlib import Path

import pytest

from benchmarks.long_runs import (
    Pace,
    Progress,
    Sample,
    Trend,
    is_flat,
    is_pace_kept,
    newest_report,
    pace,
    summary,
    table,
    trend,
)

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


def test_pace_is_that_of_the_reports() -> None:
    first, last = Progress(10.0, 1000, 30.0, 40.0), Progress(21.0, 2200, 40.0, 46.0)
    assert pace([first, last]) == Pace(120.0, 5.0)
    with pytest.raises(ValueError, match="no step in 11 s"):
        pace([first, Progress(21.0, 1000, 30.0, 41.0)])


def test_newest_report_is_that_of_the_last_complete_report_of_training(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    old = '{"split": "train", "step": 100}\n'
    metrics.write_text(old * 10_000 + '{"split": "train", "step": 200}\n{"split": "eval"}\n{"spl')
    assert newest_report(metrics)["step"] == 200
    metrics.write_text('{"split": "eval"}\n')
    with pytest.raises(ValueError, match="no report of training"):
        newest_report(metrics)


@pytest.mark.parametrize(
    ("rate", "cpu_millisecs", "is_kept"),
    [
        (97.1, 12.0, True),
        (96.9, 10.2, True),  # Another program took the time.
        (96.9, 10.4, False),
        (120.0, 12.0, True),
    ],
)
def test_pace_is_lost_if_a_step_also_takes_more_cpu_time(
    rate: float, cpu_millisecs: float, is_kept: bool
) -> None:
    assert is_pace_kept(Pace(rate, cpu_millisecs), Pace(100.0, 10.0)) is is_kept


def test_what_grows_is_named() -> None:
    steady = [Sample(100 * MIB, 20, 8)] * 60
    leaking = [Sample(100 * MIB, 20 + i / 10, 8) for i in range(60)]
    times = [10.0 * i for i in range(60)]
    rows, grown = table("ps", times, {"chief 0": steady, "ps 0": leaking}, 0)
    assert len(rows) == 6
    assert grown == ["descriptors of ps 0"]
    assert rows[0] == "| ps | chief 0 | memory | 100.0 | 100.0 | 0.0 | yes |"
    assert rows[4] == "| ps | ps 0 | descriptors | 20.0 | 25.9 | 36.0 | no |"
    assert summary("ps", grown, Pace(90, 5.5), Pace(100, 5.0)) == (
        "ps: not flat: descriptors of ps 0; 90 steps/s, -10.0% to a new run at the same time; "
        "5.50 ms of CPU time for a step, +10.0%."
    )
