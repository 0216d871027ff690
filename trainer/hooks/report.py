"""Report: training metrics to the console, metrics.jsonl and TensorBoard every `every_steps`.

Rates are those of the steps alone: without compilation, evaluation and checkpoints. `input_wait` is
the share of their time in which steps waited for input, of this process. `seconds` is the time
since this process began to train, with all of these. `gpu_peak_bytes` is the most memory that was
in use so far on one of its GPUs.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from typing_extensions import override

from data.order import Order
from strategies.base import Executor
from strategies.gpus import peak_bytes
from strategies.metrics import Metrics, add_metrics, means
from strategies.pace import Pace
from trainer.hooks.base import PeriodicHook
from trainer.hooks.writers import Writer
from trainer.learner import Learner
from trainer.run_files import NUM_STEPS


@dataclass(eq=False)
class Report(PeriodicHook):
    """Writes the training metrics of the steps since the last report to all writers."""

    executor: Executor
    learner: Learner
    writers: Sequence[Writer]
    _: KW_ONLY
    order: Order
    _metrics: Metrics = field(default_factory=Metrics, init=False)
    _last_step: int = field(default=0, init=False)
    _last_time: float = field(default=0.0, init=False)
    _last_pace: Pace = field(default_factory=Pace, init=False)
    _start_time: float = field(default=math.nan, init=False)

    @override
    def begin(self, step: int) -> None:
        super().begin(step)
        if math.isnan(self._start_time):
            self._start_time = self.executor.clock()
        self._begin_interval(step)

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        self._metrics = add_metrics(self._metrics, metrics)
        super().__call__(step, metrics)

    @override
    def act(self, step: int) -> None:
        if not self._metrics:
            return
        now = self.executor.clock()
        position = self.executor.position
        pace, last = self.executor.pace, self._last_pace
        num_steps, seconds = pace.num_steps - last.num_steps, pace.seconds - last.seconds
        if num_steps:
            steps_per_sec = num_steps / max(seconds, 1e-9)
        else:  # Only the first call is in the interval: the rate includes the compilation.
            steps_per_sec = (step - self._last_step) / max(now - self._last_time, 1e-9)
        values: dict[str, object] = {
            **means(self._metrics),
            "learning_rate": self.learner.learning_rate,
            "examples": position.num_examples(self.order),
            "epoch": position.num_examples(self.order) / self.order.num_examples,
            NUM_STEPS: step - self._last_step,
            "steps_per_sec": steps_per_sec,
            "examples_per_sec": steps_per_sec * self.order.batch_size,
            "seconds": now - self._start_time,
        }
        waited = pace.input_secs - last.input_secs
        if seconds > 0 and waited > 0:  # Otherwise it is not known.
            values["input_wait"] = min(waited / seconds, 1.0)
        if peaks := peak_bytes():
            values["gpu_peak_bytes"] = max(peaks.values())
        if position.skipped:
            values["examples_skipped"] = sum(position.skipped)
        if self.learner.loss_scale:
            values |= self.learner.loss_scale.report()
        values |= self.executor.worker_stats()
        if tables := self.learner.tables:
            steps, row_bytes = max(1, step - self._last_step), self.executor.row_bytes
            values |= tables.report(self._metrics.lookups, steps, row_bytes)
        for writer in self.writers:
            writer.write(step, "train", values)
        self._begin_interval(step)

    @override
    def end(self, step: int) -> None:
        self.act(step)

    def _begin_interval(self, step: int) -> None:
        self._metrics = Metrics()
        self._last_step, self._last_time = step, self.executor.clock()
        self._last_pace = dataclasses.replace(self.executor.pace)
