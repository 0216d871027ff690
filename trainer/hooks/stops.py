"""Hooks that end training by an error, before other hooks report or save the state."""

import contextlib
import math
from dataclasses import dataclass, field

from typing_extensions import override

from strategies.lost_peers import PeerLostError
from strategies.metrics import Metrics
from trainer.checkpoints.finite import NonFiniteLossError
from trainer.hooks.base import Hook
from trainer.run_files import newest_generation
from trainer.step.loss_scale import LossScale


@dataclass(eq=False)
class StopOnNonFinite(Hook):
    """Raises NonFiniteLossError, in every task, for a NaN or infinite loss.

    In float16 a step whose gradient is not finite is skipped, and its loss may be infinite. This
    is no error, unless the scale is at its minimum and all steps since the last call were skipped.
    """

    loss_scale: LossScale | None = None  # None if the model does not compute in float16.
    _last_step: int = field(default=0, init=False)
    _num_skipped_before: int = field(default=0, init=False)

    @override
    def begin(self, step: int) -> None:
        self._last_step = step
        self._num_skipped_before = self._num_skipped()

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        total, _ = metrics["loss"]
        skipped = self._num_skipped() - self._num_skipped_before
        self._num_skipped_before += skipped
        first, num_steps = self._last_step + 1, step - self._last_step
        if self.loss_scale and skipped >= num_steps and self.loss_scale.is_at_minimum:
            raise NonFiniteLossError(
                f"The gradients of steps {first} to {step} are not finite in float16, even without "
                "a loss scale. Type --config.precision=mixed_bfloat16, or lower --learning_rate."
            )
        if not math.isfinite(total) and not skipped:
            raise NonFiniteLossError(
                f"The loss became {total} somewhere in steps {first} to {step}. Lower "
                "--learning_rate, or look at that range with --config.steps_per_call=1. The last "
                "checkpoint is from before."
            )
        self._last_step = step

    def _num_skipped(self) -> int:
        return self.loss_scale.num_skipped if self.loss_scale else 0


@dataclass(eq=False)
class StopIfReplaced(Hook):
    """Raises PeerLostError if another group of hosts has replaced that of this elastic chief.

    It comes before the other hooks of a chief, so nothing is reported or saved afterwards, except
    the last complete step. Another group replaces one whose hosts are all frozen, for example.
    """

    model_dir: str
    generation: int

    @override
    def begin(self, step: int) -> None:
        newest = 0
        with contextlib.suppress(OSError):  # What cannot be read cannot be written either.
            newest = newest_generation(self.model_dir)
        if newest > self.generation:
            reason = f"group {newest} trains in {self.model_dir}, not group {self.generation}"
            raise PeerLostError("Other hosts have taken over", RuntimeError(reason))

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        self.begin(step)
