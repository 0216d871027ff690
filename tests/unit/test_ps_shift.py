"""What a worker of synchronous parameter servers does with its orders, in this process."""

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from data.order import share
from strategies.ps_shift import Shift
from strategies.ps_staging import BEGUN, DONE, END, ENDING, GIVES_WAY, GOES_ON, IS_FINAL, Staging
from strategies.wire import Wire

WORKER = 5
SLOT = 1


class ShareNumbers(Shift):
    """A batch is the number of its share."""

    def _batch(self, number: Any, starts: Any, tickets: Any) -> Any:
        return number


class Desk:
    """A shift of slot 1 of 2, whose gradients are the numbers of the shares."""

    def __init__(self, num_unrolled: int, wire: Wire) -> None:
        self.variable = tf.Variable([0.0, 0.0])
        # As the statistics of BatchNorm: what has changed when a gradient was computed.
        self.num_computed = tf.Variable(0)
        learner: Any = SimpleNamespace(
            step=tf.Variable(0, dtype=tf.int64),
            variables=[self.variable],
            computed_with=[self.variable],
            metric_names=("number",),
            gradients_at=self._gradients,
        )
        source = SimpleNamespace(
            ticket_spec=lambda lanes: {"gather": tf.TensorSpec([None, len(lanes)], tf.int64)}
        )
        strategy = tf.distribute.get_strategy()
        self.staging = Staging(learner, strategy, num_slots=2)
        lanes = [share(4, index, 2) for index in range(2)]
        self.shift = ShareNumbers(
            learner, source, strategy, wire, self.staging, lanes, num_unrolled=num_unrolled
        )

    def _gradients(self, batch: Any, values: Any) -> Any:
        with tf.control_dependencies([self.num_computed.assign_add(1)]):
            number = tf.cast(tf.identity(batch), tf.float32)
        metrics = tf.stack([number, 1.0])[tf.newaxis]
        # As the rows of an embedding that XLA has computed: their number is not in the graph.
        gradient = tf.gather(values[0] + number, tf.where(tf.ones([2]))[:, 0])
        assert gradient.shape[0] is None
        return [gradient], tf.cast(metrics, tf.float64)

    def run(self) -> int:
        """A shift on what was given; its last flag."""
        starts, tickets = tf.zeros([1], tf.int64), tf.constant([[[""], [""]]])
        return int(self.shift.graph(*self.shift.arguments(SLOT, starts, tickets)))

    def messages(self) -> tuple[list[list[int]], list[float]]:
        """All that were sent, and their metric."""
        number = tf.raw_ops.QueueSizeV2(handle=self.staging._messages)
        messages, sums = self.staging.receive(number)
        return messages.numpy().tolist(), sums.numpy()[:, 0, 0].tolist()

    def give(self, *orders: tuple[int, int, int, int]) -> None:
        self.staging.give(SLOT, tf.constant(orders, tf.int64))


@pytest.fixture(autouse=True)
def _worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tf.distribute.coordinator,
        "experimental_get_current_worker_index",
        lambda: tf.constant(WORKER),
    )


@pytest.fixture(scope="module", params=[1, 4])
def desk(request: pytest.FixtureRequest) -> Desk:
    return Desk(request.param, Wire())


@pytest.mark.parametrize("num_orders", range(1, 7))
def test_shift_does_what_it_is_ordered_and_no_more(desk: Desk, num_orders: int) -> None:
    before = int(desk.num_computed)
    orders = [(10 + i, 20 + i, GOES_ON, 30 + i) for i in range(num_orders)]
    orders[-1] = (*orders[-1][:2], IS_FINAL, orders[-1][3])
    desk.give(*orders, (99, 99, GOES_ON, 99))

    assert desk.run() == IS_FINAL
    begun, *done = desk.messages()[0]
    assert begun == [BEGUN, SLOT, num_orders + 1, WORKER, 0]
    assert done == [[DONE, SLOT, attempt, WORKER, step] for attempt, _, _, step in orders]
    assert int(desk.num_computed) - before == num_orders
    (area,), (tags,) = desk.staging._gradients, desk.staging._tags.values()
    assert area.numpy().tolist() == [[0.0, 0.0], [19.0 + num_orders] * 2]
    assert tags.numpy().tolist() == [[-1, -1], [9 + num_orders, 29 + num_orders]]
    # What comes after the last order is for the next shift.
    assert desk.staging.take(desk.staging.orders[SLOT]).numpy().tolist() == [99, 99, GOES_ON, 99]
    assert int(desk.staging.num_given(SLOT)) == 0


@pytest.mark.parametrize("num_orders", range(6))
def test_shift_that_is_ended_says_so_once(desk: Desk, num_orders: int) -> None:
    before = int(desk.num_computed)
    orders = [(10 + i, 20 + i, GOES_ON, 30 + i) for i in range(num_orders)]
    desk.give(*orders, ENDING)

    assert desk.run() == GIVES_WAY
    (_, *messages), (_, *numbers) = desk.messages()
    assert [message[2] for message in messages] == [*(order[0] for order in orders), END]
    assert [message[0] for message in messages] == [DONE] * (num_orders + 1)
    assert numbers == [*(float(order[1]) for order in orders), 0.0]
    assert int(desk.num_computed) - before == num_orders


def test_rests_are_those_of_gradients_that_were_ordered() -> None:
    """Whether shares are skipped between them or not."""
    staged: dict[int, list[Any]] = {1: [], 4: []}
    for num_unrolled, found in staged.items():
        desk = Desk(num_unrolled, Wire("bfloat16"))
        desk.variable.assign([1 / 3, 1 / 7])
        for attempt in range(3):
            desk.give((attempt, 0, GIVES_WAY, attempt))
            assert desk.run() == GIVES_WAY
            found.append(desk.staging._gradients[0].numpy()[SLOT].tolist())
    assert staged[1] == staged[4]
    assert staged[1][0] != staged[1][1], "nothing was left to add"
