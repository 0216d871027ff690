"""The division of a round of local steps among workers of unequal speed.

    division = Division(every_secs=30, num_workers=2)
    while ...:
        (size, *_) = division.sizes(num_steps=100)  # batches: a step is one batch over all workers
        numbers = division.of(size)             # steps of each worker, [3, 1] if size is 2
        parts = parts_of(0, numbers, first_batch, lanes)    # what worker 0 reads for its steps
        ...                                     # it makes its steps; all rates are summed up
        division.learn(rates)                   # steps/s of each worker

A round of M batches has M sub-batches for each worker, which read the lanes of its own. A fast
worker makes all of its own, and then some of those that slow workers leave. So a round always has
whole batches: it follows from the step where the next one begins, and each example comes once in an
epoch, whatever the numbers are. All workers know all rates, and so compute the same numbers.

The rates are those of the last round. A run, or a resumed one, begins with two short rounds of
equal numbers, because its first step compiles.
"""

import itertools
import logging
import math
from collections.abc import Sequence

from data.reader import Part

log = logging.getLogger(__name__)

# The first of these rounds compiles, so that its rates say nothing. The second is measured.
_FIRST_SIZES = (1, 10)
# Of a worker's share in all steps since the last message, in parts of an equal share.
_LOGGED_CHANGE = 0.2


class Division:
    """The rates of all workers, and what follows from them: equal in all workers."""

    def __init__(self, every_secs: float, num_workers: int) -> None:
        """A round should take each worker `every_secs`."""
        self._every_secs = every_secs
        self._rates = [1.0] * num_workers
        self._num_rounds = 0
        self._logged = [1 / num_workers] * num_workers  # The shares of the last message.

    def sizes(self, num_steps: int, most: float = math.inf) -> list[int]:
        """The batches of each of the next rounds, up to the first end after `num_steps` steps.

        They are at most `most` together. Only of the next round, as long as rates are unknown.
        """
        if self._num_rounds < len(_FIRST_SIZES):
            size, num_rounds = _FIRST_SIZES[self._num_rounds], 1
        else:
            rate = sum(self._rates) / len(self._rates)
            size = max(1, round(self._every_secs * rate))
            num_rounds = -(-num_steps // size)
        ends = [min(size * (index + 1), most) for index in range(num_rounds)]
        return [int(end - begin) for begin, end in itertools.pairwise([0, *ends]) if end > begin]

    def of(self, size: int) -> list[int]:
        """The steps of each worker in a round of `size` batches."""
        return divided(size * len(self._rates), self._rates)

    def learn(self, rates: Sequence[float]) -> None:
        """Called after each round with the steps/s of all workers."""
        self._num_rounds += 1
        if self._num_rounds < len(_FIRST_SIZES):
            return
        self._rates = list(rates)
        shares = [rate / sum(rates) for rate in rates]
        change = max(abs(a - b) for a, b in zip(shares, self._logged, strict=True)) * len(shares)
        if change > _LOGGED_CHANGE:
            shown, self._logged = ", ".join(f"{share:.0%}" for share in shares), shares
            log.info("The workers, in their order, make %s of the local steps.", shown)


def divided(total: int, rates: Sequence[float]) -> list[int]:
    """Whole numbers from 1 up with the sum `total`, about in the ratio of `rates`.

    The largest quotient of a number and its rate, the time of the slowest worker, is small.
    """
    numbers = [max(1, int(total * rate / sum(rates))) for rate in rates]
    while sum(numbers) < total:
        index = min(range(len(rates)), key=lambda i: (numbers[i] + 1) / rates[i])
        numbers[index] += 1
    while sum(numbers) > total:
        index = max(
            (i for i in range(len(rates)) if numbers[i] > 1), key=lambda i: numbers[i] / rates[i]
        )
        numbers[index] -= 1
    return numbers


def parts_of(
    worker: int, numbers: Sequence[int], first_batch: int, lanes: Sequence[range]
) -> list[Part]:
    """What `worker` reads in a round: of its own lanes, then what slower workers leave.

    `lanes` are those of each worker in a batch, `numbers` the steps of each worker.
    """
    size = sum(numbers) // len(numbers)
    own = min(numbers[worker], size)
    parts = [Part(first_batch, own, lanes[worker])]
    # Fast workers take what is left in their order.
    before = sum(max(0, number - size) for number in numbers[:worker])
    wanted = numbers[worker] - own
    for slow, number in enumerate(numbers):
        left = max(0, size - number)
        skipped = min(before, left)
        taken = min(wanted, left - skipped)
        before, wanted = before - skipped, wanted - taken
        if taken:
            parts.append(Part(first_batch + number + skipped, taken, lanes[slow]))
    return parts
