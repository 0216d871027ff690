"""What a worker of synchronous parameter servers does with its assignments, in this process."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from data.order import replica_lanes
from strategies.gradients.compression import Compression
from strategies.ps.protocol import END, END_ASSIGNMENT, NONE, EndReason, Kind
from strategies.ps.sync.gradient_buffers import GradientBuffers
from strategies.ps.sync.worker_loop import WorkerLoop

WORKER = 5
SLOT = 1
END_OF_TICKETS = 50  # The first batch without tickets; a batch has two sub-batches.


class SubBatchNumbers(WorkerLoop):
    """A batch is the number of its sub-batch."""

    def _batch(self, number: Any, starts: Any, tickets: Any) -> Any:
        return number


class Desk:
    """A worker loop of slot 1 of 2, whose gradients are the numbers of the sub-batches."""

    def __init__(
        self, num_unrolled: int, compression: Compression, virtual_replicas: int = 0
    ) -> None:
        self.variable = tf.Variable([0.0, 0.0])
        # As the statistics of BatchNorm: what has changed when a gradient was computed.
        self.num_computed = tf.Variable(0)
        learner: Any = SimpleNamespace(
            step=tf.Variable(0, dtype=tf.int64),
            variables=[self.variable],
            num_dense=1,
            gradient_inputs=[self.variable],
            num_totals=2,
            virtual_replicas=virtual_replicas,
            ends_report=lambda step: tf.equal((step + 1) % 10, 0),
            layer_state=[],
            keeping_state=lambda: contextlib.nullcontext({}),
            gradients_at=self._gradients,
        )
        source: Any = SimpleNamespace(
            ticket_spec=lambda lanes: {"gather": tf.TensorSpec([None, len(lanes)], tf.int64)},
            prepare=lambda: tf.constant(True),
        )
        strategy = tf.distribute.get_strategy()
        self.buffers = GradientBuffers(learner, strategy, num_slots=2)
        lanes = [replica_lanes(4, index, 2) for index in range(2)]
        self.loop = SubBatchNumbers(
            learner, source, strategy, compression, self.buffers, lanes, num_unrolled=num_unrolled
        )

    def _gradients(self, batch: Any, values: Any) -> Any:
        with tf.control_dependencies([self.num_computed.assign_add(1)]):
            number = tf.cast(tf.identity(batch), tf.float32)
        metrics = tf.stack([number, 1.0])
        # As the rows of an embedding that XLA has computed: their number is not in the graph.
        gradient = tf.gather(values[0] + number, tf.where(tf.ones([2]))[:, 0])
        assert gradient.shape[0] is None
        return [gradient], tf.cast(metrics, tf.float64)

    def run(self) -> int:
        """Runs a worker loop on its assignments; returns its EndReason."""
        starts, tickets = tf.zeros([1], tf.int64), tf.constant([[[""], [""]]])
        end = tf.constant(END_OF_TICKETS, tf.int64)
        return int(self.loop.closure.function(self.loop.inputs(SLOT, starts, end, tickets)))

    def messages(self) -> tuple[list[list[int]], list[float]]:
        """All that were sent, and their metric."""
        number = tf.raw_ops.QueueSizeV2(handle=self.buffers._messages)
        messages, totals = self.buffers.receive(number)
        return messages.numpy().tolist(), totals.numpy()[:, 0].tolist()

    def assign(self, *assignments: tuple[int, int, int, int]) -> None:
        self.buffers.assign(SLOT, tf.constant(assignments, tf.int64))


@pytest.fixture(autouse=True)
def _worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tf.distribute.coordinator,
        "experimental_get_current_worker_index",
        lambda: tf.constant(WORKER),
    )


@pytest.fixture(scope="module", params=[1, 4])
def desk(request: pytest.FixtureRequest) -> Desk:
    return Desk(request.param, Compression())


@pytest.mark.parametrize("num_assignments", range(1, 7))
def test_loop_does_its_assignments_and_no_more(desk: Desk, num_assignments: int) -> None:
    before = int(desk.num_computed)
    assignments = [(10 + i, 20 + i, EndReason.CONTINUES, 30 + i) for i in range(num_assignments)]
    assignments[-1] = (*assignments[-1][:2], EndReason.FINAL, assignments[-1][3])
    desk.assign(*assignments, (99, 99, EndReason.CONTINUES, 99))

    assert desk.run() == EndReason.FINAL
    begun, *done = desk.messages()[0]
    assert begun == [Kind.BEGUN, SLOT, num_assignments + 1, WORKER, 0]
    assert done == [[Kind.DONE, SLOT, attempt, WORKER, step] for attempt, _, _, step in assignments]
    assert int(desk.num_computed) - before == num_assignments
    (buffer,), (tags,) = desk.buffers._gradients, desk.buffers._tags.values()
    assert buffer.numpy().tolist() == [[0.0, 0.0], [19.0 + num_assignments] * 2]
    assert tags.numpy().tolist() == [[-1, -1], [9 + num_assignments, 29 + num_assignments]]
    # An assignment after the last one is for the next loop.
    left = desk.buffers.take(desk.buffers.queues[SLOT]).numpy().tolist()
    assert left == [99, 99, EndReason.CONTINUES, 99]
    assert int(desk.buffers.num_queued(SLOT)) == 0


@pytest.mark.parametrize("num_assignments", range(6))
def test_loop_that_is_ended_says_so_once(desk: Desk, num_assignments: int) -> None:
    before = int(desk.num_computed)
    assignments = [(10 + i, 20 + i, EndReason.CONTINUES, 30 + i) for i in range(num_assignments)]
    desk.assign(*assignments, END_ASSIGNMENT)

    assert desk.run() == EndReason.GIVES_WAY
    (_, *messages), (_, *numbers) = desk.messages()
    assert [message[2] for message in messages] == [*(row[0] for row in assignments), END]
    assert [message[0] for message in messages] == [Kind.DONE] * (num_assignments + 1)
    assert numbers == [*(float(row[1]) for row in assignments), 0.0]
    assert int(desk.num_computed) - before == num_assignments


def test_loop_without_tickets_for_its_assignment_gives_it_back_and_ends(desk: Desk) -> None:
    """It is of an earlier call: its worker was silent, and another loop has its slot."""
    before, continues = int(desk.num_computed), int(EndReason.CONTINUES)
    last, first_without = 2 * END_OF_TICKETS - 1, 2 * END_OF_TICKETS
    desk.assign((7, last, continues, 0), (8, first_without, continues, 0), (9, 3, continues, 0))
    assert desk.run() == EndReason.GIVES_WAY
    messages, metrics = desk.messages()
    done = [message for message in messages if message[0] == Kind.DONE]
    assert done == [[Kind.DONE, SLOT, 7, WORKER, 0], [Kind.DONE, SLOT, 8, WORKER, NONE]]
    assert metrics[-2:] == [last, 0.0]
    assert int(desk.num_computed) - before == 1
    # The next one is for the other loop.
    assert desk.buffers.take(desk.buffers.queues[SLOT]).numpy()[0] == 9
    assert int(desk.buffers.num_queued(SLOT)) == 0


def test_residuals_are_those_of_gradients_that_were_assigned() -> None:
    """Skipped assignments between them make no difference."""
    written: dict[int, list[Any]] = {1: [], 4: []}
    for num_unrolled, found in written.items():
        desk = Desk(num_unrolled, Compression("bfloat16"))
        desk.variable.assign([1 / 3, 1 / 7])
        for attempt in range(3):
            desk.assign((attempt, 0, EndReason.GIVES_WAY, attempt))
            assert desk.run() == EndReason.GIVES_WAY
            found.append(desk.buffers._gradients[0].numpy()[SLOT].tolist())
    assert written[1] == written[4]
    assert written[1][0] != written[1][1], "nothing was left to add"
