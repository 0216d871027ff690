"""Executor: the contract that makes the strategy only a flag.

    executor = MirroredExecutor.on(["CPU:0"])           # connects; creates no variable
    learner = executor.build(make_learner)              # variables are placed by the strategy
    executor.start(learner, source, evaluation, Position())
    metrics = executor.run(100)                         # no step is in flight when it returns
    executor.close()                                    # a barrier: no task leaves first

| who | does |
| --- | --- |
| Learner (trainer/learner/) | the maths of one step, the same under every strategy |
| Executor | chooses the devices, processes and examples of each step; waits for all of them |
| Reader (data/reader.py) | the examples of batch s, whichever process reads them |
| the loop and its hooks | when to stop, report and save; they do not know the strategy |
"""

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.reader import Reader
from data.system.compat.mirrored_numbers import allow_numbers_of_mirrored
from data.system.stopwatch import Stopwatch
from strategies.metrics import Metrics, add_metrics
from strategies.pace import CallSize, Pace
from strategies.position import Position, Reached
from strategies.step_errors import errors_explained
from strategies.worker_stats import WorkerStats

if TYPE_CHECKING:
    from strategies.local_steps import LocalSteps
    from strategies.ps.recovery import ServerRecovery

# What changes the variables in `_run`: an argument of `Executor.changing`.
STEPS = "steps"

# A tensor; among gradients also tf.IndexedSlices, or None for a variable without a gradient.
Tensor: TypeAlias = tf.Tensor
# Any nest (tuples, dicts) of tensors with a leading dimension of examples, as the config's `parse`
# returns it. Python has no type for such a nest.
Batch: TypeAlias = Any

Made = TypeVar("Made")

# What to do if there was not enough memory.
_SMALLER_STEP = "Raise --config.micro_batches (the same step in less memory) or lower --batch_size"


class Learner(Protocol):
    """The part of a learner that an Executor uses. Metric totals are float64 [num_totals].

    Attributes:
        variables: The trainable variables: dense ones, then the parts of tables.
        num_dense: The number of dense variables; the gradients of the others are tf.IndexedSlices.
        step: The integer variable that counts steps.
        local_steps: None if the gradients of each step are summed over replicas.
        virtual_replicas: The number of parts of a batch that are computed alone; 0 if that does not
            matter.
    """

    variables: list[tf.Variable]
    num_dense: int
    step: tf.Variable
    local_steps: "LocalSteps | None"
    virtual_replicas: int

    @property
    def num_totals(self) -> int:
        """The size of the metric totals. Totals add up over steps, replicas and workers."""

    def to_metrics(self, totals: npt.NDArray[np.float64]) -> Metrics:
        """Converts summed totals to Metrics. With virtual replicas, digests may follow them."""

    @property
    def compiles(self) -> bool:
        """True if XLA may compile all that a replica computes in a step."""

    def stop_compiling(self, error: tf.errors.OpError) -> bool:
        """Returns True if XLA cannot compile and is not used any more: the graph is made anew."""

    @property
    def layer_state(self) -> Sequence[tf.Variable]:
        """The variables that `gradients` changes, each replica its own copy: moving statistics."""

    def keeping_state(self) -> contextlib.AbstractContextManager[Mapping[int, Tensor]]:
        """Inside, `gradients_at` puts new values into the mapping, and changes no variable.

        The key is the index of the variable in `gradient_inputs`.
        """

    @property
    def gradient_inputs(self) -> Sequence[tf.Variable]:
        """The variables that `gradients_at` takes; empty if the learner reads its own."""

    @property
    def evaluation_inputs(self) -> Sequence[tf.Variable]:
        """The variables that `evaluate_at` takes; empty if the learner reads its own."""

    @property
    def forward_state(self) -> Sequence[tf.Variable]:
        """The variables that `gradients` may change; `apply` changes all others."""

    def gradients(self, batch: Batch) -> tuple[Sequence[Tensor], tf.Tensor]:
        """One replica's part of the gradient, as `variables` are ordered, and its metric totals."""

    def gradients_at(
        self, batch: Batch, values: Sequence[tf.Tensor]
    ) -> tuple[Sequence[Tensor], tf.Tensor]:
        """`gradients`, computed at `values` of `gradient_inputs` that were read before."""

    def apply(self, gradients: Sequence[Tensor]) -> tf.Tensor:
        """Applies summed gradients to the variables, then counts the step; returns the count."""

    def evaluate(self, batch: Batch) -> tf.Tensor:
        """Metric totals of one replica's part of a batch; changes nothing."""

    def evaluate_at(self, batch: Batch, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """`evaluate`, computed at `values` of `evaluation_inputs` that were read before."""

    def ends_report(self, step: Tensor) -> Tensor:
        """True, bool [], if step `step` + 1 is the last one of a report, or of the run."""


class Peers(Protocol):
    """The other tasks of a run."""

    def watch(self, timeout_secs: float, on_lost: Callable[[str], None]) -> None:
        """Watches the other tasks; a task that is unresponsive for `timeout_secs` is lost.

        Returns immediately. If the run cannot continue without the lost task, calls `on_lost` with
        a message, on another thread. TensorFlow itself only reports tasks that end.
        """

    def abandon(self, why: str) -> bool:
        """Makes `run` raise a PeerLostError now if it waits for others, or when it next would.

        Called on another thread, when another task is lost. Returns False if it is not possible.
        """


class Executor(abc.ABC):
    """Runs a learner's steps on one strategy's devices.

    The promise that everything else relies on: **when `run(n)` returns, no step is in flight
    anywhere**, so the caller may read or save any variable. Variables are set back to a checkpoint
    only before `start` and within `roll_back`.

    Attributes:
        strategy: The strategy in whose scope variables are created.
        num_replicas: Number of replicas that share the work.
        replicas_per_step: Number of replicas that share the batch of one step.
        is_chief: True in the task that writes.
        io_device: The device whose file system holds the checkpoints; None is the local one.
        peers: The other tasks; None if there are none.
        recovery: The state that is left when the chief dies; None if all of it dies with the chief.
        placement: The places of the variables, one line a place; empty if each replica has all.
        counts_before: `worker_stats` of earlier parts of this run, from the checkpoint.
        stop_requested: True if this task was asked to stop.
        stopping: True if a stop was requested. All tasks that run the loop agree after each `run`.
        on_progress: Called after each call of about a second within `run` and `evaluate`.
        pace: The steps and the time of `run`. Evaluation, checkpoints and hooks are not in it.
        clock: The time in seconds.
        stopwatch: Divides the time of this process into causes.
    """

    is_chief: bool = True
    io_device: str | None = None
    peers: Peers | None = None
    recovery: "ServerRecovery | None" = None
    placement: str = ""
    _learner: Learner
    _evaluation: Reader

    def __init__(self, strategy: tf.distribute.Strategy, num_replicas: int) -> None:
        self.strategy = strategy
        self.num_replicas = self.replicas_per_step = num_replicas
        self.counts_before: WorkerStats = {}
        self.stop_requested = self.stopping = False
        self.on_progress: Callable[[], None] = lambda: None
        self.pace = Pace()
        self.clock: Callable[[], float] = time.monotonic
        self.stopwatch = Stopwatch()
        self._input_secs = 0.0  # `_run` adds the time in which its steps waited, if it is known.
        self._used_graphs: set[str] = set()  # `_run` adds a graph's name, for `pace`.
        self._has_evaluated = False
        self._changing = ""  # The change that may have ended halfway; "" if there is none.
        self._run_size = CallSize()
        self._evaluation_size = CallSize()

    # Before training: build, then start.

    def build(self, make: Callable[[], Made]) -> Made:
        """Returns `make()`, with its variables placed by the strategy.

        May call `make` more than once; it must make the same each time.
        """
        allow_numbers_of_mirrored()
        with self.strategy.scope():
            return make()

    def start(
        self,
        learner: Learner,
        source: Reader,
        evaluation: Reader,
        position: Position,
        recorded: Mapping[str, float] | None = None,
    ) -> Mapping[str, float]:
        """Prepares `run` on the examples of `source` from `position`, and `evaluate`.

        Called once, in all tasks together, after the variables are created and restored. Returns
        the choices that config.json records, because a resumed run must repeat them. `recorded` is
        this record of the resumed run, if there is one; only the chief's counts.

        Raises:
            UsageError: `position` has open sub-batches, which this executor would leave out.
        """
        self._learner, self._evaluation = learner, evaluation
        self._replica_examples = source.order.batch_size // self.replicas_per_step
        chosen = self._choose(recorded or {})
        self._prepare(source, position)
        return chosen

    def _choose(self, recorded: Mapping[str, float]) -> Mapping[str, float]:
        """Makes the choices of `start`; returns their record."""
        return {}

    @abc.abstractmethod
    def _prepare(self, source: Reader, position: Position) -> None:
        """Makes the graphs of `_run` and `_evaluate`, and calls `_set_position`."""

    # Training.

    def run(self, num_steps: int) -> Metrics:
        """Runs `num_steps` steps and waits for all of them.

        Runs a few more under asynchronous ps, and up to the next average of local steps. Runs fewer
        after a stop request, which is seen about once a second; under asynchronous ps after at most
        16 seconds, if all workers have the same rate: they make the steps they have been given.

        Raises:
            PeerLostError: a task without which no step is possible is lost.
            DataFaultError: the data of these steps cannot be read or used.
            UsageError: they need more memory than a device has.
        """
        metrics = Metrics()
        while num_steps > 0 and not self.stopping:
            size = self._steps_of_call(num_steps)
            started, num_graphs = self.clock(), len(self._used_graphs)
            waited_before = self._input_secs
            self.stopwatch.switch("compute" if num_graphs else "graph")
            smaller = f"{_SMALLER_STEP}: now a replica has {self._replica_examples:,} examples"
            losses_explained = self._losses_explained("during a step")
            with errors_explained(smaller), losses_explained, self.changing(STEPS):
                more, seconds = self._run(size)
            if len(self._used_graphs) > num_graphs:  # The call compiled a graph.
                self.stopwatch.relabel("graph")
            elif not self.stopping:  # Otherwise it may have run fewer steps.
                self.pace.add(size, self.clock() - started, self._input_secs - waited_before)
            self.stopwatch.switch("compute")
            metrics = add_metrics(metrics, more)
            num_steps -= size
            self._run_size.adapt(size, seconds)
            self.on_progress()
        return metrics

    def _steps_of_call(self, num_steps: int) -> int:
        """The size of the next call of `_run`: at most `num_steps`, but for local steps."""
        return min(num_steps, self._run_size.size)

    @abc.abstractmethod
    def _run(self, num_steps: int) -> tuple[Metrics, float]:
        """Runs `num_steps` steps, sets `stopping`, and returns the metrics and the duration.

        Adds the names of the graphs that it uses to `_used_graphs`. Returns the same duration in
        all tasks that run the loop: it decides the next call's size.
        """

    @property
    @abc.abstractmethod
    def position(self) -> Position:
        """The position after the last `run`: it is saved, and resumed from."""

    def roll_back(self, restore: Callable[[], tuple[Position, WorkerStats]]) -> None:
        """Returns to a checkpoint, after a NaN: calls `restore`, continues at its position.

        `restore` sets the variables back; no late gradient is in flight meanwhile. Called in all
        tasks together.
        """
        with self.changing("a return to a checkpoint"):
            self._drain()
            position, self.counts_before = restore()
            self._set_position(position)
            self._drop_kept()

    def _drain(self) -> None:
        """Waits for everything in flight, including late gradients that belong to no step."""

    def _drop_kept(self) -> None:
        """Drops what graphs keep of the abandoned steps, such as residuals: makes new graphs."""

    @abc.abstractmethod
    def _set_position(self, position: Position) -> None:
        """Makes the next step consume the examples at `position`; resets what is counted to 0."""

    # Evaluation.

    def evaluate(self, *, must_complete: bool = True) -> Metrics:
        """Metrics over each example of the evaluation Reader, exactly once.

        Unless `must_complete`, a stop request ends it early, and the result is empty. Raises the
        errors of `run`.
        """
        metrics = Metrics()
        smaller = "Lower --config.eval_batch_size, which is --batch_size by default"
        first, end, unit = 0, self._evaluation.num_evaluation_batches, self._evaluation_unit
        with self.stopwatch.spend("evaluate" if self._has_evaluated else "graph"):
            while first < end:
                # Batches past the end are empty and count nothing.
                num_units = min(self._evaluation_size.size, -(-(end - first) // unit))
                with errors_explained(smaller), self._losses_explained("in evaluation"):
                    metrics, seconds = self._evaluate(first, num_units * unit)
                if not self._has_evaluated:  # The first call compiled the graph.
                    self._has_evaluated = True
                    self.stopwatch.switch("evaluate")
                first += num_units * unit
                self._evaluation_size.adapt(num_units, seconds)
                self.on_progress()
                if self.stopping and not must_complete:
                    return Metrics()
        return metrics

    @property
    def _evaluation_unit(self) -> int:
        """The smallest number of batches that one call of `_evaluate` can take."""
        return 1

    @abc.abstractmethod
    def _evaluate(self, first_batch: int, num_batches: int) -> tuple[Metrics, float]:
        """Evaluates `num_batches` batches; returns metrics of all batches so far, and the duration.

        Sets `stopping`, and returns the same duration in all tasks, as `_run` does. Called in the
        order of the batches, from 0; `num_batches` is a multiple of `_evaluation_unit`. The result
        must be bitwise equal for every division into calls.
        """

    def _losses_explained(self, when: str) -> contextlib.AbstractContextManager[None]:
        """Inside, errors of TensorFlow become PeerLostErrors if another task was lost."""
        return contextlib.nullcontext()

    # Reports and agreement.

    def gathered(self, number: int) -> list[int]:
        """The `number` of each task that runs the loop, the chief's first; all call it together.

        A task with several replicas has one entry for each replica.
        """
        return [number]

    def worker_stats(self) -> WorkerStats:
        """Counts of each worker over the whole run; empty if all workers do the same."""
        return {}

    def row_bytes(self, width: int, value_bytes: int) -> int:
        """The bytes between processes for an id of a step; a row has `width` x `value_bytes`."""
        return 0

    # The end.

    @contextlib.contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """If the context ends with an error, the variables may be those of no complete step."""
        self._changing = what
        yield
        self._changing = ""

    def return_to_complete_step(self) -> Reached | None:
        """After an error: sets the variables back to the last complete step, and returns it.

        Returns None if that is not possible, because the error came in the middle of a change.
        """
        return None if self._changing else self.reached()

    def reached(self) -> Reached:
        """How far the run has come, when no step is in flight."""
        return Reached(int(self._learner.step.numpy()), self.position, self.worker_stats())

    def request_stop(self) -> None:
        """Asks for a stop after the current `run`. Safe in a signal handler."""
        self.stop_requested = True

    def close(self, exit_code: int = 0) -> None:
        """Ends the run in all tasks together; servers exit with `exit_code`."""


def value_of(tensor: Tensor | tf.Variable) -> npt.NDArray[Any]:
    """The value of a tensor or variable, which may be in another task.

    For each `numpy()` of a tensor of another task TensorFlow keeps 1.4 KB in that task, until it
    ends. For a copy by an op, and for `numpy()` of a variable, it does not.
    """
    with tf.device(None), tf.device("CPU:0"):  # None leaves the scopes of other tasks' devices.
        value: npt.NDArray[Any] = tf.identity(tensor).numpy()
    return value


def read_now(variable: tf.Variable) -> tf.Tensor:
    """The value of `variable` when this op runs, ordered after the writes before it.

    Under ps `variable.read_value()` may be cached: the value of the first read within the same
    `strategy.run`.
    """
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def present(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of gradients, of which some may be sparse, and some None."""
    tensors = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            tensors += [gradient.values, gradient.indices]
        elif gradient is not None:
            tensors.append(gradient)
    return tensors


def num_bytes(tensor: Tensor | tf.Variable) -> int:
    """Bytes of a tensor, or of a variable's value; its shape must be known."""
    return int(tensor.shape.num_elements()) * int(tensor.dtype.size)
