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
| EarlyStop | every task | ends training when evaluations no longer improve |
| Histograms | chief | variables and gradients to TensorBoard |
| Profile | chief | a trace for TensorBoard |
| SaveCheckpoint | every task | ends the run if variables are spoilt; the chief writes step-* |
| Export | chief | export/model.keras and export/saved_model |
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from data.order import Order
from strategies.base import Executor, Metrics, Position, add
from trainer.checkpoint import Checkpointer
from trainer.exits import first_line
from trainer.learner import Learner
from trainer.metrics import means
from trainer.options import EarlyStoppingConfig
from trainer.storage import STORAGE_ERRORS

log = logging.getLogger(__name__)

NEVER = 2**62


class NonFiniteLossError(RuntimeError):
    """The loss became nan or infinite."""


class Writer(Protocol):
    """Takes reports; see trainer/writers.py."""

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """One report. Values are numbers, or numbers by name as in Executor.counts."""


class Scale(Protocol):
    """What StopOnNonFinite asks a loss scale; see trainer/loss_scale.py."""

    @property
    def num_skipped(self) -> int:
        """Steps whose gradient overflowed, in the whole run."""

    @property
    def is_least(self) -> bool:
        """Whether it cannot be lowered."""


class Hook:
    """Called by the loop when no step is in flight anywhere.

    Attributes:
        done: Why training is complete before its last step; empty while it is not. All tasks that
            run the loop must come to it at the same step.
    """

    done: str = ""

    def begin(self, step: int) -> None:
        """Called before the first step of this process; `step` are done.

        And again, with fewer, when training has gone back to a checkpoint.
        """

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
        self._acted = -1

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

    def end_at(self, step: int) -> None:
        """Makes `step` the last one: training is complete there."""
        self.last_step = step

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
    """Ends the run when the loss is no longer a number. Comes first: nothing is saved after.

    In float16 a step whose gradient is not finite is skipped, and one such batch may have such a
    loss: that ends nothing, unless the scale of the loss cannot be lowered and all steps since the
    last call were skipped.
    """

    def __init__(self, loss_scale: Scale | None = None) -> None:
        """With the learner's `loss_scale`. Nothing seen yet."""
        self._loss_scale = loss_scale
        self._seen = 0
        self._skipped = 0

    def begin(self, step: int) -> None:
        """See Hook."""
        self._seen = step
        self._skipped = self._num_skipped()

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Looks at the sum of the losses of all steps since the last call.

        Raises:
            NonFiniteLossError: it is not finite; names the range of steps.
        """
        total, _ = metrics["loss"]
        skipped = self._num_skipped() - self._skipped
        self._skipped += skipped
        if self._loss_scale and skipped >= step - self._seen and self._loss_scale.is_least:
            raise NonFiniteLossError(
                f"The gradients of steps {self._seen + 1} to {step} are not finite in float16, "
                "though the loss is not scaled any more. Type --config.precision=mixed_bfloat16, "
                "whose range is that of float32, or lower --learning_rate."
            )
        if not math.isfinite(total) and not skipped:
            raise NonFiniteLossError(
                f"The loss became {total} somewhere in steps {self._seen + 1} to {step}. Lower "
                "--learning_rate, or look at that range with --config.steps_per_call=1. The last "
                "checkpoint is from before."
            )
        self._seen = step

    def _num_skipped(self) -> int:
        return self._loss_scale.num_skipped if self._loss_scale else 0


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
        self._started = math.nan

    def begin(self, step: int) -> None:
        """Starts the clock."""
        super().begin(step)
        now = self._clock()
        if math.isnan(self._started):
            self._started = now
        self._since = (step, now)
        self._metrics = {}

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
        position = self._executor.position
        steps_per_sec = (step - since_step) / max(now - since, 1e-9)
        values: dict[str, Any] = {
            **means(self._metrics),
            "learning_rate": self._learner.learning_rate,
            "examples": position.num_examples(self._order),
            "steps_per_sec": steps_per_sec,
            "examples_per_sec": steps_per_sec * self._order.batch_size,
            "seconds": now - self._started,
        }
        if position.skipped:
            values["examples_skipped"] = sum(position.skipped)
        if self._learner.loss_scale:
            values |= self._learner.loss_scale.report()
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
        latest_step: Its step.
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
        self.latest_step = -1

    def act(self, step: int) -> None:
        """Evaluates each example of the split once; not while a task waits to be stopped."""
        if self._executor.stopping and step < self.last_step:
            return
        started = self._clock()
        metrics = self._executor.evaluate(whole=step >= self.last_step)
        if not metrics:
            return
        self.latest = means(metrics)
        self.latest_step = step
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
        # In every task, though only the chief saves: what ends the run must end it in all of them.
        require_finite(self._learner, step)
        if self._checkpointer is not None:
            value = self.latest[self._best_metric]
            score = -value if self._best_metric == "loss" else value
            self._checkpointer.save_best(step, self._position(), score)


class EarlyStop(Hook):
    """Ends training when the evaluations no longer improve. All tasks that evaluate must have it.

    The chief decides, and the others do as it does: it alone has the evaluations of a run that is
    resumed.
    """

    def __init__(
        self,
        executor: Executor,
        evaluate: Evaluate,
        options: EarlyStoppingConfig,
        metric: str,
        *,
        history: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        """Comes after `evaluate`; `history` gives the reports of the run so far, the chief's."""
        self._executor = executor
        self._evaluate = evaluate
        self._options = options
        self._metric = metric
        self._history = history
        self._listeners: list[Callable[[int], None]] = []
        self._best = -math.inf
        self._num_worse = 0

    def on_stop(self, listener: Callable[[int], None]) -> None:
        """Has `listener` told the last step, if it comes before its time."""
        self._listeners.append(listener)

    def begin(self, step: int) -> None:
        """Judges the evaluations up to `step` again: a resumed run stops where a whole one does."""
        self._best, self._num_worse = -math.inf, 0
        for report in self._history():
            if report["split"] == "eval" and report["step"] <= step:
                self._judge(report[self._metric])

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Judges the evaluation of this step, if there was one."""
        if self._evaluate.latest_step != step:
            return
        self._judge(self._evaluate.latest[self._metric])
        is_over = self._num_worse >= self._options.patience
        if self._executor.everyones(int(is_over))[0]:
            self.done = (
                f"no better {self._metric} in {self._options.patience} evaluations: stopped early"
            )
            for listener in self._listeners:
                listener(step)

    def _judge(self, value: float | None) -> None:
        value = math.nan if value is None else value  # JSON has no nan, which is no improvement.
        score = -value if self._metric == "loss" else value
        if score > self._best + self._options.min_delta:
            self._best, self._num_worse = score, 0
        else:
            self._num_worse += 1


class SaveCheckpoint(PeriodicHook):
    """Checkpoints at multiples, and of the last step, also when training was interrupted.

    All tasks that run the loop must have it: they agree on whether the state is worth saving.
    """

    def __init__(
        self,
        executor: Executor,
        learner: Learner,
        checkpointer: Checkpointer | None,
        *,
        every_steps: int,
        last_step: int,
    ) -> None:
        """With a `checkpointer`, the chief's, it saves."""
        super().__init__(every_steps, last_step)
        self._executor = executor
        self._learner = learner
        self._checkpointer = checkpointer

    def act(self, step: int) -> None:
        """Has it saved; that may go on while training does."""
        require_finite(self._learner, step)
        if self._checkpointer is not None:
            self._checkpointer.save(step, self._executor.position, self._executor.counts())

    def end(self, step: int) -> None:
        """Saves what was not saved yet, and waits for it; what has failed is tried once more."""
        if self._acted < step:
            self._act(step)
        if self._checkpointer is not None and not self._checkpointer.has_saved(step):
            self._checkpointer.save(step, self._executor.position, self._executor.counts())
            self._checkpointer.wait()


class Histograms(PeriodicHook):
    """TensorBoard histograms of all trainable variables, and of their gradients on one batch."""

    def __init__(
        self,
        learner: Learner,
        next_batch: Callable[[], Any],
        writing: Callable[[int], contextlib.AbstractContextManager[None]],
        *,
        every_steps: int,
    ) -> None:
        """`next_batch` gives a batch (inputs, labels); in `writing(step)` tf.summary writes."""
        super().__init__(every_steps, NEVER)
        self._learner = learner
        self._next_batch = next_batch
        self._writing = writing
        self._gradients = tf.function(lambda batch: learner.gradients(batch, training=False)[0])

    def act(self, step: int) -> None:
        """Writes them. `training=False`: looking must not move batch statistics."""
        gradients = self._gradients(self._next_batch())
        histograms = {}
        for variable, gradient in zip(
            self._learner.model.trainable_variables, gradients, strict=True
        ):
            histograms[f"variables/{variable.path}"] = tf.convert_to_tensor(variable.value)
            if gradient is not None:
                histograms[f"gradients/{variable.path}"] = tf.convert_to_tensor(gradient)
        try:
            with self._writing(step):
                for name, values in histograms.items():
                    tf.summary.histogram(name, values)
        except STORAGE_ERRORS as error:
            log.warning("The histograms of step %d are lost: %s", step, first_line(error))


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
            self._running = False
            try:
                tf.profiler.experimental.stop()
            except STORAGE_ERRORS as error:
                log.warning("The profile is lost: %s", first_line(error))


class Export(PeriodicHook):
    """The trained model as export/model.keras and export/saved_model, when training is complete.

    Attributes:
        failure: Why it could not be written, or empty.
    """

    def __init__(
        self, learner: Learner, build_model: Callable[[], Any], directory: str, *, last_step: int
    ) -> None:
        """`build_model` makes the model anew, outside any strategy: what is written knows none."""
        super().__init__(0, last_step)
        self._learner = learner
        self._build_model = build_model
        self._directory = directory
        self.failure = ""

    def act(self, step: int) -> None:
        """Writes both."""
        model = self._build_model()
        for variable, value in zip(model.variables, self._learner.weights(), strict=True):
            variable.assign(value)
        try:
            tf.io.gfile.makedirs(self._directory)
            model.save(f"{self._directory}/model.keras")
            model.export(f"{self._directory}/saved_model", verbose=False)
        except STORAGE_ERRORS as error:
            self.failure = f"{self._directory} could not be written: {first_line(error)}"
