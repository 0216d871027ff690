"""Callbacks: calls the callbacks of Keras that `build_callbacks(config)` of a config file returns.

    callbacks = build_callbacks(recipe)                      # checked, in every task
    hook = Callbacks(executor, learner, callbacks, ..., evaluate=evaluate)

Only the chief calls them. After each call every task that runs the loop gets two results from the
chief: the request to stop (`self.model.stop_training`), and the learning rate. An epoch has
(training examples / batch_size) steps, rounded up. docs/keras.md says which callbacks work.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import keras
import numpy as np
from keras.callbacks import Callback
from typing_extensions import override

from data.system.compat.keras_optimizers import given_rate
from strategies.base import Executor
from strategies.metrics import Metrics, add_metrics, means
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.config import Recipe
from trainer.config_file import errors_explained
from trainer.hooks.base import NEVER, Hook, built_by_user, next_multiple
from trainer.hooks.evaluate import Evaluate
from trainer.learner import Learner
from trainer.step.options import ConfigError

log = logging.getLogger(__name__)


_REFUSED: Mapping[type, str] = {
    keras.callbacks.BackupAndRestore: "a run with the same --model_dir resumes; leave it out",
    keras.callbacks.ProgbarLogger: "the console shows the progress; set config.log_every_steps",
    keras.callbacks.SwapEMAWeights: "set config.ema.decay: the averages are evaluated and exported",
    keras.callbacks.TensorBoard: "MODEL_DIR/tensorboard has the metrics of every run; set "
    "config.histogram_every_steps and config.profile_first_step for the rest",
}
_BATCH_METHODS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_NEVER_CALLED = ("on_test_batch_begin", "on_test_batch_end", "on_predict_begin", "on_predict_end")


def build_callbacks(recipe: Recipe) -> list[Callback]:
    """The callbacks of the config file.

    Raises ConfigError if one of them is no callback, or cannot do its work here.
    """
    if recipe.build_callbacks is None:
        return []
    what = f"build_callbacks(config) of {recipe.path}"
    callbacks = built_by_user(what, recipe.build_callbacks, recipe.config)
    for callback in callbacks:
        name = type(callback).__name__
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"{what} must return a list of keras.callbacks.Callback. Received: {callback!r}."
            )
        for refused, instead in _REFUSED.items():
            if isinstance(callback, refused):
                raise ConfigError(f"{what} returned {name}, which cannot work here: {instead}.")
        if getattr(callback, "restore_best_weights", False):
            raise ConfigError(
                f"{what} returned {name}(restore_best_weights=True), which would change the "
                "weights in one task only. Leave restore_best_weights out: MODEL_DIR/checkpoints "
                "keeps the best state as best-*, and config.best_metric chooses the metric."
            )
        for method in _NEVER_CALLED:
            if _overrides(callback, method):
                raise ConfigError(
                    f"{what} returned {name}, which defines {method}: an evaluation is one call, "
                    "and nothing is predicted. Use on_test_end, which gets its metrics."
                )
    return callbacks


def check_monitors(
    callbacks: Sequence[Callback], learner: Learner, path: str, *, evaluates: bool
) -> None:
    """Raises ConfigError if a callback of config file `path` watches a metric that is not there."""
    names = list(learner.objective.metric_names)
    if evaluates:
        names += [f"val_{name}" for name in names]
    for callback in callbacks:
        monitor = getattr(callback, "monitor", names[0])
        is_used = getattr(callback, "save_best_only", True)
        # Another attribute of this name may be an object of the user.
        if is_used and isinstance(monitor, str) and monitor not in names:
            raise ConfigError(
                f"{type(callback).__name__}(monitor={monitor!r}) of {path}: there is no such "
                f"metric. Known: {', '.join(names)}."
            )


def _overrides(callback: Callback, method: str) -> bool:
    # Keras marks its empty methods.
    return not getattr(getattr(callback, method), "_is_default", False)


def _needs_each_batch(callback: Callback) -> bool:
    """Returns True if `callback` must be called after every step, not after several at once."""
    if isinstance(callback, keras.callbacks.TerminateOnNaN):  # A loss that is NaN ends every run.
        return False
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch")
    return any(_overrides(callback, method) for method in _BATCH_METHODS)


@dataclass(eq=False)
class Callbacks(Hook):
    """Calls callbacks of Keras. All tasks that run the loop must have this hook.

    If a callback has a method for batches, each call of the executor is one step, which is slower.
    """

    executor: Executor
    learner: Learner
    callbacks: Sequence[Callback]
    _: KW_ONLY
    path: str  # Of the config file.
    steps_per_epoch: int
    last_step: int
    evaluate: Evaluate | None  # The hook that comes before this one, if this run evaluates.
    checkpointer: Checkpointer  # Notes in each checkpoint what the callbacks had been told.
    _metrics: Metrics = field(default_factory=Metrics, init=False)  # Of the epoch so far.
    _evaluation: dict[str, float] = field(default_factory=dict, init=False)  # Of the epoch so far.
    _logs: dict[str, float] = field(default_factory=dict, init=False)  # Of the last epoch.
    _epoch_end: int = field(default=NEVER, init=False)
    _begun_epoch: int = field(default=-1, init=False)  # The last that callbacks were told of.
    _ended_epoch: int = field(default=-1, init=False)
    # The last step of which callbacks were told; of a former process, too. -1 before training.
    # The rate has their effects up to there.
    _begun_step: int = field(default=-1, init=False)
    _has_begun: bool = field(default=False, init=False)
    _rate: Any = field(default=None, init=False)  # A variable, or a schedule.

    def __post_init__(self) -> None:
        self._each_batch = [cb for cb in self.callbacks if _needs_each_batch(cb)]
        if self._each_batch and self.executor.is_chief:
            names = ", ".join(type(callback).__name__ for callback in self._each_batch)
            log.warning(
                "%s of build_callbacks wants each batch: one step a call, which is slower.", names
            )
        check_monitors(self.callbacks, self.learner, self.path, evaluates=self.evaluate is not None)

    @override
    def begin(self, step: int) -> None:
        self._metrics, self._evaluation = Metrics(), {}
        self._epoch_end = next_multiple(step, self.steps_per_epoch, self.last_step)
        if self.executor.is_chief:
            # If this run goes back, the callbacks and the rate do not.
            if not self._has_begun:
                self._begin_training(step)
            self._begin_batch(step)
        self._agree(step)

    def _begin_training(self, step: int) -> None:
        self._has_begun = True
        begun = self.checkpointer.begun_step
        self._begun_step = (step or -1) if begun is None else begun
        model = self.learner.model
        model.stop_training = False
        # Not an attribute that Keras and TensorFlow track: checkpoints would change.
        object.__setattr__(model, "optimizer", self.learner.optimizer)
        epochs = -(-self.last_step // self.steps_per_epoch)
        params = {"verbose": 0, "epochs": epochs, "steps": self.steps_per_epoch}
        self._rate = given_rate(self.learner.optimizer)
        for callback in self.callbacks:
            callback.set_params(params)
            callback.set_model(model)
            self._choose_direction(callback)
        self._call("on_train_begin", {}, keeps_rate=self._begun_step >= 0)

    def _begin_batch(self, step: int) -> None:
        """Says that the next batch begins, and its epoch if it is new."""
        if step >= self.last_step or self.learner.model.stop_training:
            return
        epoch, batch = divmod(step, self.steps_per_epoch)
        if epoch > self._begun_epoch:
            self._begun_epoch = epoch
            is_repeated = self._begun_step // self.steps_per_epoch >= epoch
            self._call("on_epoch_begin", epoch, {}, keeps_rate=is_repeated)
        self._call("on_train_batch_begin", batch, {}, keeps_rate=self._begun_step >= step)

    @override
    def next_step(self, step: int) -> int:
        return step + 1 if self._each_batch else self._epoch_end

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        self._metrics = add_metrics(self._metrics, metrics)
        is_epoch_end = step >= self._epoch_end
        if self.executor.is_chief:
            self._after_batch(step, metrics, is_epoch_end)
        if is_epoch_end:
            self._metrics = Metrics()
            self._epoch_end = next_multiple(step, self.steps_per_epoch, self.last_step)
        self._agree(step)

    def _after_batch(self, step: int, metrics: Metrics, is_epoch_end: bool) -> None:
        batch = (step - 1) % self.steps_per_epoch
        self._call("on_train_batch_end", batch, means(metrics))
        if self.evaluate is not None and self.evaluate.latest_step == step:
            self._call("on_test_begin", {})
            self._call("on_test_end", dict(self.evaluate.latest))
            self._evaluation = {f"val_{name}": v for name, v in self.evaluate.latest.items()}
        if is_epoch_end:
            logs, self._evaluation = means(self._metrics) | self._evaluation, {}
            epoch = (self._epoch_end - 1) // self.steps_per_epoch
            if epoch > self._ended_epoch:
                self._ended_epoch, self._logs = epoch, logs
                self._call("on_epoch_end", epoch, dict(logs))
        self._begin_batch(step)

    @override
    def end(self, step: int) -> None:
        if self.executor.is_chief:
            self._call("on_train_end", dict(self._logs))

    def _agree(self, step: int) -> None:
        """Copies the chief's stop request and learning rate to every task."""
        rate = given_rate(self.learner.optimizer)
        rate = rate if isinstance(rate, keras.Variable) else None  # Or a schedule.
        ours = np.float32(0.0 if rate is None else rate.numpy())
        stops = bool(self.executor.is_chief and self.learner.model.stop_training)
        theirs = self.executor.gathered(stops << 32 | int(ours.view(np.uint32)))[0]
        chosen = np.uint32(theirs & 0xFFFFFFFF).view(np.float32)
        if rate is not None and chosen != ours:
            rate.assign(chosen)
        if theirs >> 32:
            self.done = "stopped by a callback"
        elif step < self.last_step:
            self._begun_step = max(self._begun_step, step)
            self.checkpointer.begun_step = self._begun_step

    def _call(self, method: str, *args: object, keeps_rate: bool = False) -> None:
        rate = self.learner.optimizer_rate if keeps_rate else None
        for callback in self.callbacks:
            what = f"{method} of {type(callback).__name__}, of build_callbacks in {self.path},"
            with errors_explained(what):
                getattr(callback, method)(*args)
            if given_rate(self.learner.optimizer) is not self._rate:
                raise ConfigError(
                    f"{what} gave optimizer.learning_rate a schedule or a function, which steps "
                    "that are compiled would not see. Set a number; or set config.schedule, or "
                    "give the schedule to the optimizer in build_optimizer."
                )
            if rate is not None:
                self.learner.optimizer.learning_rate = rate

    def _choose_direction(self, callback: Callback) -> None:
        """Chooses mode="auto" as config.best_metric does: from the metric."""
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and getattr(callback, "mode", "") == "auto":
            is_lower_better = self.learner.objective.is_lower_better(monitor.removeprefix("val_"))
            callback.mode = "min" if is_lower_better else "max"
