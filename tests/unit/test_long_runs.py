"""What benchmarks.long_runs makes of its samples: lines through them, and a verdict."""

import pytest

from benchmarks.long_runs import Sample, Trend, is_flat, rates, summary, table, trend

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
        ("rate", 100, 97.1, True),
        ("rate", 100, 96.9, False),
        ("rate", 100, 120, True),
    ],
)
def test_flat_is_what_the_synopsis_says(name: str, first: float, last: float, flat: bool) -> None:
    assert is_flat(name, Trend(first, last, 0.0)) is flat


def test_rate_is_that_between_reports_and_none_without_a_new_one() -> None:
    reports = [(10.0, 100), (20.0, 300), (20.0, 300), (40.0, 500)]
    assert rates(reports) == [(20.0, 20.0), (40.0, 10.0)]


def test_what_grows_is_named() -> None:
    times = list(range(0, 600, 10))
    steady = [Sample(100 * MIB, 20, 8)] * len(times)
    leaking = [Sample(100 * MIB, 20 + i / 10, 8) for i in range(len(times))]
    of_rates = [(float(at), 100 - at / 100) for at in times]
    rows, grown = table("ps", times, {"chief 0": steady, "ps 0": leaking}, of_rates, 200)
    assert len(rows) == 7
    assert grown == ["descriptors of ps 0", "rate of the run"]
    assert rows[0] == "| ps | chief 0 | memory | 100.0 | 100.0 | 0.0 | yes |"
    rate = trend([at for at, _ in of_rates], [rate for _, rate in of_rates], 200)
    sentence = summary("ps", grown, rate)
    assert sentence == (
        "ps: not flat: descriptors of ps 0, rate of the run; the rate changed by -4.0%."
    )
