"""What every strategy promises in strategies/base.py, tested in the same way for each of them.

    EXECUTORS=ps-sync-2 python -m tests.unit.test_executor_contract

Here the strategies of one process are tested. tests/cluster/test_executor_contract.py runs this
file for each strategy that needs a process, or several, of its own.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt
import pytest

from data.disk_reader import DiskReader
from data.reader import Reader
from data.system.errors import UsageError
from strategies.base import Executor
from strategies.metrics import Metrics, means
from strategies.mirrored import MirroredExecutor
from strategies.position import Position, Reached
from tests.cluster import parity
from tests.damage import flip_bit
from tests.unit import comparing
from tests.unit.comparing import assert_same
from tests.unit.one_device import OneDeviceExecutor
from tests.unit.replicas import replicas
from tests.unit.toy import BATCH, CLASSES, NUM_EXAMPLES, make_reader, write_split
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.last_step import save_left_step
from trainer.learner import Learner
from trainer.step.losses import sparse_categorical_crossentropy

KINDS = os.environ.get("EXECUTORS", "mirrored-1 mirrored-2 one-device").split()
RATE = 0.5
assert_close = functools.partial(comparing.assert_close, atol=1e-5)

Make: TypeAlias = Callable[[], Executor]
Weights: TypeAlias = list[npt.NDArray[Any]]


@pytest.fixture(scope="module", params=KINDS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes executors of one kind."""
    name, _, number = request.param.rpartition("-")
    if name == "mirrored":
        yield lambda: MirroredExecutor(replicas(int(number)))
    elif request.param == "one-device":
        yield OneDeviceExecutor
    else:
        os.environ["TF_CONFIG"] = os.environ.get("EXECUTORS_TF_CONFIG", "")
        make = parity.executors(request.param)
        yield make
        if name == "multiworker":
            make().close()  # A worker that leaves early ends the other one.


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return make_reader(write_split(tmp_path_factory.mktemp("toy")))


@dataclass
class Run:
    """A softmax regression on 110 examples."""

    executor: Executor
    reader: Reader
    directory: Path

    def __post_init__(self) -> None:
        self.learner = self.executor.build(self._make_learner)
        directory, io_device = str(self.directory / "checkpoints"), self.executor.io_device
        self.checkpointer = Checkpointer(directory, self.learner, {}, keep=2, io_device=io_device)

    @staticmethod
    def _make_learner() -> Learner:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(CLASSES)])
        optimizer = keras.optimizers.SGD(RATE)
        return Learner(model, optimizer, sparse_categorical_crossentropy, {}, batch_size=BATCH)

    def start(self, position: Position | None = None) -> "Run":
        self.executor.start(self.learner, self.reader, self.reader, position or Position())
        return self

    def weights(self) -> Weights:
        return [np.asarray(variable.numpy()) for variable in self.learner.variables]

    @property
    def step(self) -> int:
        return int(self.learner.step.numpy())

    @property
    def num_examples(self) -> int:
        return self.executor.position.num_examples(self.reader.order)

    def save(self) -> None:
        self.checkpointer.save(*self.executor.reached())
        self.checkpointer.wait()

    def restore(self) -> Position:
        saved = self.checkpointer.restore()
        assert saved is not None
        return saved.position


NewRun: TypeAlias = Callable[[], Run]


@pytest.fixture
def new_run(make: Make, reader: Reader, tmp_path: Path) -> NewRun:
    return lambda: Run(make(), reader, tmp_path)


def after_steps(weights: Weights, reader: Reader, first_batch: int, num_steps: int) -> Weights:
    """The weights after steps of gradient descent, computed without TensorFlow."""
    kernel, bias = weights
    batches = DiskReader(reader).batches(first_batch, range(reader.order.lanes), num_steps)
    for inputs, labels in batches.as_numpy_iterator():
        scores = np.exp(inputs @ kernel + bias)
        error = scores / scores.sum(axis=1, keepdims=True) - np.eye(CLASSES)[labels]
        kernel = kernel - RATE / BATCH * inputs.T @ error
        bias = bias - RATE / BATCH * error.sum(axis=0)
    return [kernel, bias]


@pytest.mark.slow
@pytest.mark.parametrize("start", [Position(), Position(20, (), (16,))], ids=["first", "later"])
def test_steps_are_those_of_gradient_descent_from_the_position(
    start: Position, new_run: NewRun
) -> None:
    run = new_run().start(start)
    before, num_before = run.weights(), run.num_examples
    assert run.executor.run(0) == Metrics()
    calls: list[int] = []
    run.executor.on_progress = lambda: calls.append(run.step)
    for number, num_steps in enumerate((1, 4, 2), start=1):
        assert run.executor.run(num_steps)["loss"][1] == num_steps * BATCH
        assert len(calls) >= number
    assert run.step == 7
    assert run.num_examples == num_before + 7 * BATCH
    assert run.executor.position.skipped == start.skipped
    assert_close(run.weights(), after_steps(before, run.reader, start.next_batch, 7))


@pytest.mark.slow
def test_workers_have_made_all_steps(new_run: NewRun) -> None:
    run = new_run().start()
    run.executor.counts_before = counts = {"worker_steps": {"worker 0": 100}}
    run.executor.run(4)
    stats = run.executor.worker_stats()
    if stats:
        num_steps = sum(stats["worker_steps"].values())
        assert num_steps == 4 * run.executor.replicas_per_step + 100
    assert run.executor.reached() == Reached(4, run.executor.position, stats)
    assert counts == {"worker_steps": {"worker 0": 100}}


@pytest.mark.slow
def test_evaluation_counts_each_example_once_and_changes_nothing(new_run: NewRun) -> None:
    run = new_run().start()
    run.executor.run(3)
    before = run.weights()
    found = run.executor.evaluate()
    assert found["loss"][1] == NUM_EXAMPLES
    assert 0 < means(found)["loss"] < np.log(CLASSES)
    assert run.executor.evaluate() == found, "the sizes of calls have an effect"
    assert_same(run.weights(), before)
    assert run.num_examples == 3 * BATCH


@pytest.mark.slow
def test_resumed_run_and_a_return_to_a_checkpoint_repeat_the_steps(new_run: NewRun) -> None:
    run = new_run().start()
    expected = after_steps(run.weights(), run.reader, 0, 8)
    run.executor.run(5)
    run.save()
    run.executor.run(2)
    run.executor.roll_back(lambda: (run.restore(), {}))
    resumed = new_run()
    resumed.start(resumed.restore())
    for each in (run, resumed):
        assert (each.step, each.num_examples) == (5, 5 * BATCH)
        each.executor.run(3)
        assert (each.step, each.num_examples) == (8, 8 * BATCH)
        assert_close(each.weights(), expected)


@pytest.mark.slow
def test_stop_request_ends_the_run_after_a_step_at_least(new_run: NewRun) -> None:
    run = new_run().start()
    executor = run.executor
    assert (executor.stop_requested, executor.stopping) == (False, False)
    executor.request_stop()
    assert (executor.stop_requested, executor.stopping) == (True, False)
    executor.run(10_000)
    assert (executor.stop_requested, executor.stopping) == (True, True)
    step = run.step
    assert 1 <= step < 100
    assert run.executor.run(5) == Metrics()
    assert run.step == step
    assert run.executor.evaluate(must_complete=False) == Metrics()
    assert run.executor.evaluate()["loss"][1] == NUM_EXAMPLES


@pytest.mark.slow
def test_variables_are_of_a_complete_step_unless_they_were_being_changed(new_run: NewRun) -> None:
    run = new_run().start()
    run.executor.run(2)
    before = run.weights()
    assert run.executor.return_to_complete_step() == run.executor.reached()
    assert_close(run.weights(), before)
    with pytest.raises(KeyError), run.executor.changing("a change"):
        raise KeyError
    assert run.executor.return_to_complete_step() is None


def test_each_task_learns_the_numbers_of_all(make: Make) -> None:
    executor = make()
    numbers = executor.gathered(7)
    assert numbers == [7] * len(numbers)
    assert len(numbers) in (1, executor.num_replicas)


def test_sub_batches_of_another_topology_are_refused(new_run: NewRun) -> None:
    with pytest.raises(UsageError, match="unfinished sub-batch"):
        new_run().start(Position(2, ((0, 1, 2),)))


@pytest.mark.skipif(not KINDS[0].startswith("ps"), reason="the state ends with this process")
def test_next_chief_takes_over_the_last_step(new_run: NewRun) -> None:
    former = new_run().start()
    assert former.executor.recovery is not None
    identity = former.checkpointer.run_identity
    expected = after_steps(former.weights(), former.reader, 0, 8)
    former.executor.recovery.publish(former.checkpointer.variables, identity)
    former.executor.run(5)
    run = new_run()
    recovery, variables = run.executor.recovery, run.checkpointer.variables
    assert recovery is not None
    before = run.weights()
    assert recovery.take_over(variables, "another run", lambda: 0) is None
    assert recovery.take_over(variables, identity, lambda: 5) is None
    assert_close(run.weights(), before)
    former.checkpointer.save(7, Position(7), {})  # It is damaged, and has its size.
    former.checkpointer.wait()
    flip_bit(former.directory / "checkpoints/step-00000007/variables.index", 7)
    save_left_step(recovery, run.learner, run.checkpointer)
    run.start(run.restore())
    assert run.step == 5
    recovery.publish(variables, identity)
    run.executor.run(3)
    assert run.num_examples == 8 * BATCH
    assert_close(run.weights(), expected)


if __name__ == "__main__":
    exit_code = pytest.main([__file__, "-q", "-n", "0", "-p", "no:cacheprovider"])
    # Servers in this process cannot be stopped, and would prevent its end.
    sys.stdout.flush()
    os._exit(exit_code)
