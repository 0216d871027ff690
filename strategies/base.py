"""Executor: the contract that makes the strategy only a flag.

    executor = build_executor(...)              # connects; no variable yet
    learner = executor.build(make_learner)      # variables are made where the strategy wants them
    executor.start(learner, source, evaluation, position)
    metrics = executor.run(100)                 # nothing is in flight when it returns
    executor.close()                            # nobody leaves first

| who | does |
| --- | --- |
| Learner (trainer/learner.py) | the maths of one step, the same under every strategy |
| Executor | which devices and processes run it, on which examples, and when all are done |
| Reader (data/pipeline.py) | the examples of batch s, whoever reads them |
| the loop and its hooks | when to stop, report, save; they never ask which strategy it is |
"""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.order import Order
from strategies.counts import Counts

# (total, count) of each metric over the examples of some steps.
Metrics = dict[str, tuple[float, float]]

# How often a wish to stop is looked for, at most, while steps take less.
_LOOK_SECS = 1.0

# A batch: nested tensors with a leading dimension of examples. TensorFlow has no types for these.
Batch = Any
Tensor = Any

Made = TypeVar("Made")


class PeerLostError(RuntimeError):
    """Another task of the cluster is gone; what was saved is whole. Exit code 75."""

    def __init__(self, what: str, cause: Exception) -> None:
        """`what` happened, and of TensorFlow's long `cause` the first line that tells why."""
        lines = [line.strip() for line in str(cause).splitlines()]
        headings = ("Graph execution error", "root error(s) found")
        told = [line for line in lines if line and not any(h in line for h in headings)]
        super().__init__(f"{what}: {(told or [type(cause).__name__])[0][:200]}")


class DataFaultError(RuntimeError):
    """TensorFlow could not read, parse or use the data of a step; its cause says more."""


@dataclass(frozen=True)
class Position:
    """What of the endless order no step has consumed.

    Attributes:
        next_batch: The batches from here on.
        open_shares: And these of batches before it: (batch, first lane, last lane).
        skipped: How many examples before it no step will consume, for each time that training
            went back from a loss that was no number and on behind the examples that led there.
    """

    next_batch: int = 0
    open_shares: tuple[tuple[int, int, int], ...] = ()
    skipped: tuple[int, ...] = ()

    def num_examples(self, order: Order) -> int:
        """Examples that steps have consumed."""
        open_lanes = sum(last + 1 - first for _, first, last in self.open_shares)
        rows = order.batch_size // order.lanes
        return self.next_batch * order.batch_size - open_lanes * rows - sum(self.skipped)

    def behind(self, end: "Position", order: Order) -> "Position":
        """Where training that goes back to here goes on, if nothing up to `end` is to be consumed.

        `end` is where the same training had come to: it has skipped what this has, and no more.
        """
        num_skipped = end.next_batch * order.batch_size - sum(self.skipped)
        num_skipped -= self.num_examples(order)
        return Position(end.next_batch, (), (*self.skipped, num_skipped))


class PositionError(ValueError):
    """This executor cannot go on from where another one stopped. Exit code 2."""


class Learner(Protocol):
    """What an Executor needs of a learner."""

    @property
    def metric_names(self) -> Sequence[str]:
        """Names of the rows of the metrics."""

    @property
    def variables(self) -> Sequence[Tensor]:
        """The trainable tf.Variables."""

    @property
    def step(self) -> Tensor:
        """The integer variable that counts steps."""

    @property
    def computed_with(self) -> Sequence[Tensor]:
        """The tf.Variables of `gradients_at`; none if the learner reads its own."""

    def gradients(self, batch: Batch) -> tuple[Sequence[Tensor], Tensor]:
        """A replica's part of the gradient, in the order of `variables`; and its metrics.

        These are float64 [metrics, 2].
        """

    def gradients_at(
        self, batch: Batch, values: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """`gradients` at `values` of `computed_with`, read before."""

    def apply(self, gradients: Sequence[Tensor]) -> Tensor:
        """Changes the variables by summed gradients, then counts the step; returns the count."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Metrics of this replica's share, nothing changes. float64 [metrics, 2]."""

    @property
    def evaluated_with(self) -> Sequence[Tensor]:
        """The tf.Variables of `evaluate_at`; none if the learner reads its own."""

    def evaluate_at(self, batch: Batch, values: Sequence[Tensor]) -> Tensor:
        """`evaluate` at `values` of `evaluated_with`, read before."""


class _Pace:
    """How much to do at once, so that it takes about `_LOOK_SECS`; the same in all tasks."""

    def __init__(self) -> None:
        """Begins with one."""
        self.size = 1

    def adapt(self, size: int, seconds: float) -> None:
        """What `size` took. By doubling: the first time includes tracing, and says little."""
        if seconds < _LOOK_SECS / 2 and size == self.size:
            self.size *= 2
        elif seconds > _LOOK_SECS:
            self.size = max(1, size // 2)


class Executor(abc.ABC):
    """Runs a learner's steps on one strategy's devices.

    The promise everything else stands on: **when `run(n)` returns, no step is in flight
    anywhere**, so the caller may read, save or restore any variable.

    Attributes:
        strategy: The tf.distribute.Strategy.
        is_chief: Whether this task is the one that writes.
        io_device: The device whose file system holds the checkpoints; None is the local one.
        on_progress: Called after each part of `run` and `evaluate`, which take about a second.
    """

    strategy: Any
    is_chief: bool = True
    io_device: str | None = None

    def __init__(self) -> None:
        """Nothing has asked for a stop."""
        self.on_progress: Callable[[], None] = lambda: None
        self._stop_requested = False
        self._stopping = False
        self._pace = _Pace()
        self._evaluation_pace = _Pace()

    @property
    @abc.abstractmethod
    def num_replicas(self) -> int:
        """How many replicas share the work."""

    @property
    def replicas_a_step(self) -> int:
        """How many replicas share the batch of one step."""
        return self.num_replicas

    def build(self, make: Callable[[], Made]) -> Made:
        """What `make` makes, with its variables where the strategy wants them.

        It may be called more than once, and must make the same each time.
        """
        with self.strategy.scope():
            return make()

    def placement_table(self) -> str:
        """Where the variables are, a line a place; empty where every replica has all of them."""
        return ""

    @abc.abstractmethod
    def start(self, learner: Learner, source: Any, evaluation: Any, position: Position) -> None:
        """Prepares steps of `learner` on `source` (data.pipeline.Reader) from `position`.

        `evaluation` is the Reader that `evaluate` reads whole. Called once, after variables are
        made and restored.

        Raises:
            PositionError: `position` has open shares, which this executor would leave out.
        """

    def go_back(self, restore: Callable[[], tuple[Position, Counts]]) -> None:
        """Calls `restore`, which sets the variables back, and goes on from where that says.

        Meanwhile nobody computes with them. Between two calls of `run`; all tasks call it together.
        """
        self._settle()
        self._forget()
        position, counts = restore()
        self._seek(position)
        self.go_on_counting(counts)

    def _forget(self) -> None:
        """Forgets what is kept beside the variables from step to step."""

    def _settle(self) -> None:
        """Returns when nothing is in flight, also of what is no step yet."""

    @abc.abstractmethod
    def _seek(self, position: Position) -> None:
        """The next step takes what is at `position`, and what is counted begins at 0.

        Raises:
            PositionError: as `start`.
        """

    def run(self, num_steps: int) -> Metrics:
        """Runs `num_steps` steps, or a few more where they are asynchronous, and waits for all.

        Looks for a wish to stop about once a second, so a model whose steps are slow can be stopped
        in seconds too; then it runs fewer.

        Raises:
            PeerLostError: a task without which no step is possible is gone.
            DataFaultError: the data of these steps cannot be read or used.
        """
        metrics: Metrics = {}
        while num_steps > 0 and not self._stopping:
            size = min(num_steps, self._pace.size)
            with _data_faults_marked():
                more, seconds = self._run(size)
            metrics = add(metrics, more)
            num_steps -= size
            self._pace.adapt(size, seconds)
            self.on_progress()
        return metrics

    @abc.abstractmethod
    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        """Runs `num_steps` steps; also sets `_stopping`, and returns how many seconds they took.

        All tasks that run the loop return the same seconds: they decide what comes next.
        """

    def evaluate(self, *, whole: bool = True) -> Metrics:
        """Metrics over each example of the evaluation Reader, exactly once.

        Unless it must be `whole`, empty if there is a wish to stop meanwhile.

        Raises:
            PeerLostError, DataFaultError: as `run`.
        """
        metrics: Metrics = {}
        first, end = 0, self._num_evaluation_batches
        while first < end:
            size = self._evaluation_pace.size
            # A multiple of the unit; what is past the end counts nothing.
            num_batches = min(size, -(-(end - first) // self._evaluation_unit))
            num_batches *= self._evaluation_unit
            with _data_faults_marked():
                metrics, seconds = self._evaluate(first, num_batches)
            first += num_batches
            self._evaluation_pace.adapt(num_batches // self._evaluation_unit, seconds)
            self.on_progress()
            if self._stopping and not whole:
                return {}
        return metrics

    @property
    @abc.abstractmethod
    def _num_evaluation_batches(self) -> int:
        """Batches of the evaluation Reader."""

    @property
    def _evaluation_unit(self) -> int:
        """How many batches are evaluated at least at once."""
        return 1

    @abc.abstractmethod
    def _evaluate(self, first_batch: int, num_batches: int) -> tuple[Metrics, float]:
        """Metrics of all batches up to these; sets `_stopping`, returns seconds, as `_run` does.

        Called in the order of the batches, from 0. `num_batches` is a multiple of
        `_evaluation_unit`. Where an evaluation is cut must make no difference, in any bit.
        """

    def everyones(self, number: int) -> list[int]:
        """The `number` of each task that runs the loop, the chief's first; all call it together."""
        return [number]

    @property
    @abc.abstractmethod
    def position(self) -> Position:
        """What no step has consumed when `run` has returned: what is saved, and resumed from."""

    def counts(self) -> Counts:
        """What is counted where workers differ, in the whole run: {"worker_steps": {...}}.

        Empty where all do the same.
        """
        return {}

    def go_on_counting(self, counts: Counts) -> None:
        """Counts on from what `counts` was when this run was saved; after `start`."""

    def watch_peers(self, timeout_secs: float, on_lost: Callable[[str], None]) -> None:
        """From now on, looks after the other tasks; one that is silent for so long is lost.

        Where the run cannot go on without it, `on_lost` is called with a message, on another
        thread. A task that ends is found by TensorFlow; this is for those that stand still.
        """

    def request_stop(self) -> None:
        """Asks for a stop after the current `run`. Safe in a signal handler."""
        self._stop_requested = True

    @property
    def stopping(self) -> bool:
        """Whether a task was asked to stop. All tasks that run the loop agree after each `run`."""
        return self._stopping

    def close(self, exit_code: int = 0) -> None:
        """Ends the run everywhere, so that nobody leaves first; servers end with `exit_code`."""

    def close_after_error(self, *, lost: bool) -> None:
        """Ends this task's part without waiting for others, who may be gone.

        Servers end with 0, unless a peer is `lost`: then they stay, for the chief that is started
        again.
        """


@contextlib.contextmanager
def _data_faults_marked() -> Iterator[None]:
    try:
        yield
    except (
        tf.errors.DataLossError,
        tf.errors.InvalidArgumentError,
        tf.errors.NotFoundError,
        tf.errors.PermissionDeniedError,
    ) as error:
        raise DataFaultError(error.message) from error


def refuse_open_shares(position: Position, order: Order) -> None:
    """Returns if `position` has none.

    Raises:
        PositionError: it has; says which flags can go on.
    """
    if position.open_shares:
        _, first, last = position.open_shares[0]
        num_shares = max(1, order.lanes // (last + 1 - first))
        raise PositionError(
            f"The checkpoint was saved with {len(position.open_shares)} share(s) of a batch handed "
            "out again and not done yet, as backup workers leave them. Go on with --strategy=ps "
            f"--sync_replicas --replicas_to_aggregate={num_shares}, or give another --model_dir."
        )


def read_now(variable: Any) -> Tensor:
    """The value of a tf.Variable when this op runs, ordered after the writes before it.

    Under ps `variable.read_value()` may be the value that the first read of the same
    `strategy.run` gave.
    """
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def add(left: Metrics, right: Metrics) -> Metrics:
    """Metrics over the examples of both. An empty side is neutral."""
    if not left or not right:
        return dict(left or right)
    return {
        name: (total + right[name][0], count + right[name][1])
        for name, (total, count) in left.items()
    }


def to_metrics(names: Sequence[str], sums: npt.NDArray[np.float64]) -> Metrics:
    """Named (total, count) pairs of `sums`, float64 [metrics, 2]."""
    return {name: (float(row[0]), float(row[1])) for name, row in zip(names, sums, strict=True)}
