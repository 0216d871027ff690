"""Hooks: what happens now and then, apart from when.

    class Hello(Hook):
        def next_step(self, step: int) -> int:
            return next_multiple(step, 100)

        def __call__(self, step: int, metrics: Metrics) -> None:
            print("hello from step", step)

`next_step` tells the loop where to stop next, so no interval has to divide another. Asynchronous
steps may overshoot, so "due" means that a multiple was crossed. Which task has which hook is
decided where hooks are built (trainer/build.py), not inside them.

| hook | on | what |
| --- | --- | --- |
| StopOnNonFinite | every task | ends the run before anything is saved |
| Report | chief | training metrics to all writers |
| Evaluate | every task | evaluation metrics to all writers, keeps the best checkpoint |
| Histograms | chief | variables and gradients to TensorBoard |
| Profile | chief | a trace for TensorBoard |
| SaveCheckpoint | chief | checkpoints/step-* |
| Export | chief | export/model.keras and export/saved_model |
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from data.order import Order
from strategies.base import Executor, Metrics, Position, add
from trainer.checkpoint import Checkpointer
from trainer.learner import Learner
from trainer.metrics import means

NEVER = 2**62


class NonFiniteLossError(RuntimeError):
    """The loss became nan or infinite."""


class Writer(Protocol):
    """Takes reports; see trainer/writers.py."""

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """One report. Values are numbers, or numbers by name as in Executor.counts."""


class Hook:
    """Called by the loop when no step is in flight anywhere."""

    def begin(self, step: int) -> None:
        """Called once, before the first step of this process; `step` are done."""

    def next_step(self, step: int) -> int:
        """The first step after `step` at which this hook wants to be called."""
        return NEVER

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Called after each call of the executor, with the metrics of its steps."""

    def end(self, step: int) -> None:
        """Called once after the last step, unless the run failed."""


def next_multiple(step: int, every_steps: int) -> int:
    """The first multiple of `every_steps` after `step`; never if it is 0."""
    return (step // every_steps + 1) * every_steps if every_steps else NEVER


class PeriodicHook(Hook):
    """Acts once for each multiple of `every_steps` crossed, and at `last_step`.

    With `every_steps` 0 it acts at `last_step` alone; with `last_step` NEVER at multiples alone.
    """

    def __init__(self, every_steps: int, last_step: int) -> None:
        """Not due yet."""
        self.every_steps = every_steps
        self.last_step = last_step
        self._due = NEVER
        self._acted = -1

    def act(self, step: int) -> None:
        """What the hook is for."""
        raise NotImplementedError

    def begin(self, step: int) -> None:
        """See Hook."""
        self._due = self.next_step(step)

    def next_step(self, step: int) -> int:
        """The next multiple, or the last step if that comes first."""
        due = next_multiple(step, self.every_steps)
        return min(due, self.last_step) if step < self.last_step else due

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Acts if due."""
        if step >= self._due:
            self._act(step)
            self._due = self.next_step(step)

    def end(self, step: int) -> None:
        """Acts if the run is complete and that was not done, as after a resume at the last step."""
        if step >= self.last_step and self._acted < step:
            self._act(step)

    def _act(self, step: int) -> None:
        self._acted = step
        self.act(step)


def require_finite(learner: Learner, step: int) -> None:
    """Returns if every trainable variable is finite: nothing else is worth saving.

    The loss of a step does not tell: it is of the variables before the step.

    Raises:
        NonFiniteLossError: one is not.
    """
    for variable in learner.variables:
        if not bool(tf.reduce_all(tf.math.is_finite(variable.read_value())).numpy()):
            raise NonFiniteLossError(
                f"At step {step} {variable.name} is no longer finite: a gradient overflowed. Lower "
                "--learning_rate. The last checkpoint is from before."
            )


class StopOnNonFinite(Hook):
    """Ends the run when the loss is no longer a number. Comes first: nothing is saved after."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._seen = 0

    def begin(self, step: int) -> None:
        """See Hook."""
        self._seen = step

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Looks at the sum of the losses of all steps since the last call.

        Raises:
            NonFiniteLossError: it is not finite; names the range of steps.
        """
        total, _ = metrics["loss"]
        if not math.isfinite(total):
            raise NonFiniteLossError(
                f"The loss became {total} somewhere in steps {self._seen + 1} to {step}. Lower "
                "--learning_rate, or look at that range with --config.steps_per_call=1. The last "
                "checkpoint is from before."
            )
        self._seen = step


class Report(PeriodicHook):
    """Training metrics of the steps since the last report, to all writers."""

    def __init__(
        self,
        executor: Executor,
        learner: Learner,
        writers: Sequence[Writer],
        *,
        every_steps: int,
        last_step: int,
        order: Order,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`order` turns positions into examples; `clock` gives seconds."""
        super().__init__(every_steps, last_step)
        self._executor = executor
        self._learner = learner
        self._writers = writers
        self._order = order
        self._clock = clock
        self._metrics: Metrics = {}
        self._since = (0, 0.0)
        self._started = 0.0

    def begin(self, step: int) -> None:
        """Starts the clock."""
        super().begin(step)
        self._started = self._clock()
        self._since = (step, self._started)

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Adds up; writes if due."""
        self._metrics = add(self._metrics, metrics)
        super().__call__(step, metrics)

    def act(self, step: int) -> None:
        """Writes what was added up."""
        if not self._metrics:
            return
        now = self._clock()
        since_step, since = self._since
        steps_per_sec = (step - since_step) / max(now - since, 1e-9)
        values: dict[str, Any] = {
            **means(self._metrics),
            "learning_rate": self._learner.learning_rate,
            "examples": self._executor.position.num_examples(self._order),
            "steps_per_sec": steps_per_sec,
            "examples_per_sec": steps_per_sec * self._order.batch_size,
            "seconds": now - self._started,
        }
        values |= {name: dict(by_worker) for name, by_worker in self._executor.counts().items()}
        for writer in self._writers:
            writer.write(step, "train", values)
        self._metrics = {}
        self._since = (step, now)

    def end(self, step: int) -> None:
        """Writes what is left, also when training was interrupted."""
        self.act(step)


class Evaluate(PeriodicHook):
    """Evaluation metrics to all writers. All tasks that run the loop must have it.

    Attributes:
        latest: The metrics of the last evaluation; empty before the first.
    """

    def __init__(
        self,
        executor: Executor,
        learner: Learner,
        writers: Sequence[Writer],
        *,
        every_steps: int,
        last_step: int,
        best_metric: str,
        checkpointer: Checkpointer | None,
        position: Callable[[], Position],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With a `checkpointer`, the chief's, the best state by `best_metric` is kept.

        `position` says where in the data the evaluated state stands.
        """
        super().__init__(every_steps, last_step)
        self._executor = executor
        self._learner = learner
        self._writers = writers
        self._best_metric = best_metric
        self._checkpointer = checkpointer
        self._position = position
        self._clock = clock
        self.latest: dict[str, float] = {}

    def act(self, step: int) -> None:
        """Evaluates each example of the split once; not while a task waits to be stopped."""
        if self._executor.stopping and step < self.last_step:
            return
        started = self._clock()
        metrics = self._executor.evaluate()
        self.latest = means(metrics)
        if not math.isfinite(self.latest["loss"]):
            raise NonFiniteLossError(
                f"The evaluation loss at step {step} is {self.latest['loss']}. Lower "
                "--learning_rate; the last checkpoint is from before."
            )
        values = {
            **self.latest,
            "examples": int(metrics["loss"][1]),
            "seconds": self._clock() - started,
        }
        for writer in self._writers:
            writer.write(step, "eval", values)
        if self._checkpointer is not None:
            require_finite(self._learner, step)
            value = self.latest[self._best_metric]
            score = -value if self._best_metric == "loss" else value
            self._checkpointer.save_best(step, self._position(), score)


class SaveCheckpoint(PeriodicHook):
    """Checkpoints at multiples, and of the last step, also when training was interrupted."""

    def __init__(
        self,
        executor: Executor,
        learner: Learner,
        checkpointer: Checkpointer,
        *,
        every_steps: int,
        last_step: int,
    ) -> None:
        """On the chief."""
        super().__init__(every_steps, last_step)
        self._executor = executor
        self._learner = learner
        self._checkpointer = checkpointer

    def act(self, step: int) -> None:
        """Saves."""
        require_finite(self._learner, step)
        self._checkpointer.save(step, self._executor.position, self._executor.counts())

    def end(self, step: int) -> None:
        """Saves what was not saved yet."""
        if self._acted < step:
            self._act(step)


class Histograms(PeriodicHook):
    """TensorBoard histograms of all trainable variables, and of their gradients on one batch."""

    def __init__(
        self, learner: Learner, next_batch: Callable[[], Any], writer: Any, *, every_steps: int
    ) -> None:
        """`next_batch` gives a batch (inputs, labels); `writer` is a tf.summary writer."""
        super().__init__(every_steps, NEVER)
        self._learner = learner
        self._next_batch = next_batch
        self._writer = writer
        self._gradients = tf.function(lambda batch: learner.gradients(batch, training=False)[0])

    def act(self, step: int) -> None:
        """Writes them. `training=False`: looking must not move batch statistics."""
        gradients = self._gradients(self._next_batch())
        with self._writer.as_default(step=step):
            for variable, gradient in zip(
                self._learner.model.trainable_variables, gradients, strict=True
            ):
                tf.summary.histogram(f"variables/{variable.path}", variable.value)
                if gradient is not None:
                    tf.summary.histogram(
                        f"gradients/{variable.path}", tf.convert_to_tensor(gradient)
                    )
        self._writer.flush()


class Profile(Hook):
    """A TensorFlow profile of steps first_step + 1 to first_step + num_steps."""

    def __init__(self, log_dir: str, *, first_step: int, num_steps: int) -> None:
        """`log_dir` is TensorBoard's."""
        self._log_dir = log_dir
        self._first = first_step
        self._last = first_step + num_steps
        self._running = False

    def next_step(self, step: int) -> int:
        """Where it starts, then where it ends."""
        if step < self._first:
            return self._first
        return self._last if self._running else NEVER

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Starts or ends the profiler."""
        if self._running and step >= self._last:
            self.end(step)
        elif not self._running and self._first <= step < self._last:
            tf.profiler.experimental.start(self._log_dir)
            self._running = True

    def end(self, step: int) -> None:
        """Ends a profile that training did not outlast."""
        if self._running:
            tf.profiler.experimental.stop()
            self._running = False


class Export(PeriodicHook):
    """The trained model as export/model.keras and export/saved_model, when training is complete."""

    def __init__(
        self, learner: Learner, build_model: Callable[[], Any], directory: str, *, last_step: int
    ) -> None:
        """`build_model` makes the model anew, outside any strategy: what is written knows none."""
        super().__init__(0, last_step)
        self._learner = learner
        self._build_model = build_model
        self._directory = directory

    def act(self, step: int) -> None:
        """Writes both."""
        model = self._build_model()
        for here, there in zip(model.variables, self._learner.model.variables, strict=True):
            here.assign(there.numpy())
        tf.io.gfile.makedirs(self._directory)
        model.save(f"{self._directory}/model.keras")
        model.export(f"{self._directory}/saved_model", verbose=False)
