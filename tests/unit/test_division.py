"""A round of local steps is divided among workers: wholly, exactly once, and as their speed is."""

from collections import Counter

import pytest

from strategies.division import Division, divided, parts_of


@pytest.mark.parametrize(
    ("total", "rates", "numbers"),
    [
        (8, [1.0, 1.0], [4, 4]),
        (10, [4.0, 1.0], [8, 2]),
        (20, [1.0, 4.0, 4.0, 4.0], [1, 7, 6, 6]),
        (2, [1e9, 1e-9], [1, 1]),  # Each worker makes a step, or its speed would stay unknown.
        (30, [1e9, 1.0, 1.0], [28, 1, 1]),
        (9, [3.0, 3.0, 3.0], [3, 3, 3]),
        (7, [2.0, 2.0], [4, 3]),
    ],
)
def test_steps_are_divided_by_rate(total: int, rates: list[float], numbers: list[int]) -> None:
    assert divided(total, rates) == numbers


@pytest.mark.parametrize(
    "numbers",
    [[5], [4, 4], [7, 1], [1, 7], [1, 2, 9], [9, 1, 2], [6, 1, 1, 12], [1, 12, 6, 1], [3, 6, 2, 5]],
)
def test_each_sub_batch_of_a_round_is_read_once(numbers: list[int]) -> None:
    size, first = sum(numbers) // len(numbers), 100
    lanes = [range(10 * worker, 10 * worker + 10) for worker in range(len(numbers))]
    read: Counter[tuple[int, int]] = Counter()
    for worker, number in enumerate(numbers):
        parts = parts_of(worker, numbers, first, lanes)
        assert sum(count or 0 for _, count, _ in parts) == number
        # The lanes of its own come first: they continue in the next round if all are equal.
        assert parts[0] == (first, min(number, size), lanes[worker])
        for begin, count, of_part in parts:
            read.update((batch, of_part.start) for batch in range(begin, begin + (count or 0)))
    batches = range(first, first + size)
    assert read == Counter((batch, of_lanes.start) for batch in batches for of_lanes in lanes)


def test_rates_are_used_after_a_round_that_compiles_and_one_that_is_measured() -> None:
    division = Division(every_secs=30, num_workers=2)
    sizes = []
    for rates in ([0.1, 0.2], [8.0, 2.0], [4.0, 4.0]):
        sizes.append(division.sizes(num_steps=1000))
        size = sizes[-1][0]
        assert sum(division.of(size)) == 2 * size
        division.learn(rates)
    assert sizes == [[1], [10], [150] * 7]  # 30 s of 5 steps/s in the mean.
    assert division.of(150) == [150, 150]


def test_rounds_follow_the_speed_of_a_worker() -> None:
    division = Division(every_secs=10, num_workers=2)
    for rates in ([1.0, 1.0], [10.0, 10.0], [10.0, 2.5]):
        division.learn(rates)
    assert division.sizes(num_steps=130, most=130) == [62, 62, 6]
    assert division.sizes(num_steps=100, most=50) == [50]
    [size] = division.sizes(num_steps=1)
    assert size == 62  # Of 10 s: 100 and 25 sub-batches, two a batch.
    assert division.of(size) == [100, 24]


def test_shares_are_logged_if_they_changed_since_the_last_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    division = Division(every_secs=1, num_workers=2)
    with caplog.at_level("INFO"):
        for share in (0.5, 0.5, 0.58, 0.42, 0.7, 0.62, 0.75, 0.5):
            division.learn([share, 1 - share])
    found = [record.getMessage().partition("make ")[2] for record in caplog.records]
    assert found == ["70%, 30% of the local steps.", "50%, 50% of the local steps."]
