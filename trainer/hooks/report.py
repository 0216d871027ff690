"""Report: training metrics to the console, metrics.jsonl and TensorBoard every `every_steps`."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from typing_extensions import override

from data.order import Order
from strategies.base import Executor
from strategies.metrics import Metrics, add_metrics, means
from trainer.hooks.base import PeriodicHook
from trainer.hooks.writers import Writer
from trainer.learner import Learner


@dataclass(eq=False)
class Report(PeriodicHook):
    """Writes the training metrics of the steps since the last report to all writers."""

    executor: Executor
    learner: Learner
    writers: Sequence[Writer]
    _: KW_ONLY
    order: Order
    clock: Callable[[], float] = time.monotonic
    _metrics: Metrics = field(default_factory=Metrics, init=False)
    _last_report: tuple[int, float] = field(default=(0, 0.0), init=False)  # (step, time)
    _start_time: float = field(default=math.nan, init=False)

    @override
    def begin(self, step: int) -> None:
        super().begin(step)
        now = self.clock()
        if math.isnan(self._start_time):
            self._start_time = now
        self._last_report = (step, now)
        self._metrics = Metrics()

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        self._metrics = add_metrics(self._metrics, metrics)
        super().__call__(step, metrics)

    @override
    def act(self, step: int) -> None:
        if not self._metrics:
            return
        now = self.clock()
        last_step, last_time = self._last_report
        position = self.executor.position
        steps_per_sec = (step - last_step) / max(now - last_time, 1e-9)
        values: dict[str, object] = {
            **means(self._metrics),
            "learning_rate": self.learner.learning_rate,
            "examples": position.num_examples(self.order),
            "steps_per_sec": steps_per_sec,
            "examples_per_sec": steps_per_sec * self.order.batch_size,
            "seconds": now - self._start_time,
        }
        if position.skipped:
            values["examples_skipped"] = sum(position.skipped)
        if self.learner.loss_scale:
            values |= self.learner.loss_scale.report()
        values |= self.executor.worker_stats()
        for writer in self.writers:
            writer.write(step, "train", values)
        self._metrics = Metrics()
        self._last_report = (step, now)

    @override
    def end(self, step: int) -> None:
        self.act(step)
