"""What benchmarks.long_runs makes of its samples: lines through them, and a verdict."""

from pathlib import Path

import pytest

from benchmarks.long_runs import Progress, Sample, Trend, is_flat, rates, table, trend
from benchmarks.table import newest_report

MIB = 2**20


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
        ("steps/s", 100, 97.1, True),
        ("steps/s", 100, 96.9, False),
        ("steps/s", 100, 120, True),
        ("CPU ms a step", 2, 2.05, True),
        ("CPU ms a step", 2, 2.07, False),
    ],
)
def test_flat_is_what_the_synopsis_says(name: str, first: float, last: float, flat: bool) -> None:
    assert is_flat(name, Trend(first, last, 0.0)) is flat


def progress(per_sec: list[float], cpu_secs: float = 0.01) -> list[Progress]:
    """A sample each 10 s, with the rate until the next one, and the CPU time of a step."""
    found = [Progress(0.0, 0, 20.0, 0.0)]
    for rate in per_sec:
        last = found[-1]
        steps = last.steps + round(10 * rate)
        found.append(Progress(last.seconds + 10, steps, last.reported_secs + 10, steps * cpu_secs))
    return found


def test_too_few_samples_or_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="only 1 of 5"):
        trend([0, 10, 20, 30, 40], [0] * 5, warmup_secs=40)
    with pytest.raises(ValueError, match="no step in the 60 seconds before 120 s"):
        rates(progress([1.0] * 6 + [0.0] * 6))


def test_newest_report_is_that_of_the_last_complete_report_of_training(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    old = '{"split": "train", "step": 100}\n'
    metrics.write_text(old * 10_000 + '{"split": "train", "step": 200}\n{"split": "eval"}\n{"spl')
    assert newest_report(metrics)["step"] == 200
    metrics.write_text('{"split": "eval"}\n')
    with pytest.raises(ValueError, match="no report of training"):
        newest_report(metrics)


def test_what_is_not_flat_is_named() -> None:
    steady = [Sample(100 * MIB, 20, 8)] * 61
    leaking = [Sample(100 * MIB, 20 + i / 10, 8) for i in range(61)]
    slower = progress([100 - i / 4 for i in range(60)])
    times = [at.seconds for at in slower]
    rows, not_flat = table("ps", times, {"chief 0": steady, "ps 0": leaking}, slower, 0)
    assert len(rows) == 8
    assert not_flat == ["descriptors of ps 0", "steps/s of the run"]
    assert rows[0] == "| ps | chief 0 | memory | 100.0 | 100.0 | 0.0 | yes |"
    assert rows[4] == "| ps | ps 0 | descriptors | 20.00 | 26.00 | 36.00 | no |"
    assert rows[7] == "| ps | the run | CPU ms a step | 10.00 | 10.00 | 0.00 | yes |"
