"""The figures of `python -m benchmarks.watching`, from turns whose result is known."""

import re

import pytest

from tests.unit.benchmark_modules import imported

watching = imported("benchmarks.watching")


def test_increase_is_that_of_the_sums_of_all_turns() -> None:
    plain = [watching.Turn(2.0, steps, 1.0, 0.0) for steps in (900, 1100, 900, 1100)]
    watched = [watching.Turn(2.0, steps, 1.0, 0.01) for steps in (1090, 890, 1090, 890)]
    assert watching.total(watched) == pytest.approx((8.0, 3960, 4.0, 0.04))
    for of, percent in (("rate", -1.0), ("cpu_per_step", 1.01)):
        text = watching.increase(watched, plain, lambda turn, of=of: getattr(turn, of))
        found = re.fullmatch(r"([+-][\d.]+)% \(\+-([\d.]+)\)", text)
        assert found
        assert float(found[1]) == pytest.approx(percent, abs=0.01)
        assert float(found[2]) > 5, "the turns differ by a fifth"


def test_equal_turns_have_no_error() -> None:
    turns = [watching.Turn(2.0, 1000, 1.0, 0.02)] * 5
    assert watching.increase(turns, turns, lambda turn: turn.rate) == "+0.00% (+-0.00)"
    row = watching.row("mirrored", turns, turns)
    assert row.startswith("| mirrored | 500 | 500 | +0.00%")
    assert row.endswith("| 1.00% |")
