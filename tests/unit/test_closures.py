"""How the steps of one call are cut into closures, and what is fetched of them."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.base import PeerLostError
from strategies.ps import closure_sizes, fetched


def windows_of(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Windows of these lengths, then of the last one's without end."""
    first = 0
    for length in itertools.chain(lengths, itertools.repeat(lengths[-1])):
        yield first, length
        first += length


lengths_of_windows = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(st.integers(1, 400), st.integers(1, 9), lengths_of_windows)
def test_sizes_sum_to_the_steps_and_no_worker_has_more_than_its_share_at_once(
    num_steps: int, num_workers: int, lengths: list[int]
) -> None:
    sizes = closure_sizes(num_steps, num_workers, windows_of(lengths))
    assert sum(sizes) == num_steps
    assert min(sizes) >= 1
    assert max(sizes) <= max(1, num_steps // num_workers)


@given(st.integers(1, 400), st.integers(1, 9), lengths_of_windows)
def test_no_closure_reaches_across_two_windows(
    num_steps: int, num_workers: int, lengths: list[int]
) -> None:
    ends = itertools.accumulate(closure_sizes(num_steps, num_workers, windows_of(lengths)))
    window_ends = set()
    for first, length in windows_of(lengths):
        if first >= num_steps:
            break
        window_ends.add(min(first + length, num_steps))
    assert window_ends <= set(ends)


@given(st.integers(1, 400), st.integers(1, 9), lengths_of_windows)
def test_every_worker_has_a_closure_where_there_are_steps_enough(
    num_steps: int, num_workers: int, lengths: list[int]
) -> None:
    sizes = closure_sizes(num_steps, num_workers, windows_of(lengths))
    assert len(sizes) >= min(num_steps, num_workers)


class Closure:
    """One that was scheduled, as it answers one fetch after the other."""

    def __init__(self, *answers: int | Exception | None) -> None:
        self._answers = list(answers)

    def fetch(self) -> int | None:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_result_that_was_taken_back_is_one_that_was_lost() -> None:
    assert fetched(Closure(0)) == 0
    with pytest.raises(PeerLostError, match="The result of a worker was lost: no such handle"):
        fetched(Closure(None, None, ValueError("no such handle")))
    with pytest.raises(ValueError, match="of the function"):
        fetched(Closure(ValueError("of the function")))
