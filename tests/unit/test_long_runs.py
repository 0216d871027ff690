"""What benchmarks.long_runs makes of its samples: lines through them, and a verdict."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.long_runs import (
    Progress,
    Sample,
    Trend,
    is_flat,
    is_rate_flat,
    newest_report,
    of_thirds,
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


def progress(rates: list[float], cpu_secs: float = 0.01) -> list[Progress]:
    """A sample each 10 s, with the rate until the next one, and the CPU time of a step."""
    found = [Progress(0.0, 0, 20.0, 0.0)]
    for rate in rates:
        last = found[-1]
        steps = last.steps + round(10 * rate)
        found.append(Progress(last.seconds + 10, steps, last.reported_secs + 10, steps * cpu_secs))
    return found


def test_rate_is_that_of_the_first_and_last_third_after_the_warm_up() -> None:
    rates = [1.0] * 30 + [100.0] * 60 + [98.0] * 60
    rate, cpu = of_thirds(progress(rates), warmup_secs=300)
    assert (rate.first, rate.last) == pytest.approx((100, 98))
    assert (cpu.first, cpu.last) == pytest.approx((10, 10))
    # The thirds are 800 s apart, less a sample.
    assert rate.per_hour == pytest.approx(-2 * 3600 / 790)


def test_short_disturbances_do_not_change_the_rate() -> None:
    rates = [100.0] * 90
    rates[5:8] = [10.0] * 3
    rates[70:74] = [20.0] * 4
    rate, _ = of_thirds(progress(rates), warmup_secs=0)
    assert (rate.first, rate.last) == pytest.approx((100, 100))


def test_too_short_run_and_run_without_steps_have_no_rate() -> None:
    with pytest.raises(ValueError, match="only 3 of 5"):
        of_thirds(progress([1.0] * 4), warmup_secs=20)
    with pytest.raises(ValueError, match="no step"):
        of_thirds(progress([1.0] * 10 + [0.0] * 10), warmup_secs=0)


def test_newest_report_is_that_of_the_last_complete_report_of_training(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    old = '{"split": "train", "step": 100}\n'
    metrics.write_text(old * 10_000 + '{"split": "train", "step": 200}\n{"split": "eval"}\n{"spl')
    assert newest_report(metrics)["step"] == 200
    metrics.write_text('{"split": "eval"}\n')
    with pytest.raises(ValueError, match="no report of training"):
        newest_report(metrics)


@pytest.mark.parametrize(
    ("rate", "cpu_millisecs", "flat"),
    [
        (97.1, 12.0, True),
        (96.9, 10.2, True),  # Another program took the time.
        (96.9, 10.4, False),
        (120.0, 12.0, True),
    ],
)
def test_rate_is_flat_unless_a_step_also_takes_more_cpu_time(
    rate: float, cpu_millisecs: float, flat: bool
) -> None:
    changes = Trend(100.0, rate, 0.0), Trend(10.0, cpu_millisecs, 0.0)
    assert is_rate_flat(*changes) is flat


def test_what_grows_is_named() -> None:
    found = progress([100.0] * 30 + [90.0] * 30)
    slower = [
        dataclasses.replace(at, cpu_secs=at.cpu_secs * (1 + at.seconds / 1000)) for at in found
    ]
    steady = [Sample(100 * MIB, 20, 8)] * len(found)
    leaking = [Sample(100 * MIB, 20 + i / 10, 8) for i in range(len(found))]
    rows, grown = table("ps", {"chief 0": steady, "ps 0": leaking}, slower, 0)
    assert len(rows) == 8
    assert grown == ["descriptors of ps 0", "steps/s of the run"]
    assert rows[0] == "| ps | chief 0 | memory | 100.0 | 100.0 | 0.0 | yes |"
    assert rows[-2].startswith("| ps | the run | steps/s | 100.0 | 90.0 |")
    sentence = summary("ps", grown, *of_thirds(slower, 0))
    assert sentence.startswith(
        "ps: not flat: descriptors of ps 0, steps/s of the run; steps/s changed by -10.0%, the CPU "
    )
