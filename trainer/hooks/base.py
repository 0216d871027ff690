"""The Hook interface: what happens at some steps, separated from when it happens.

    class Hello(PeriodicHook):
        def act(self, step: int) -> None:
            print("hello from step", step)

    hooks = [Hello(every_steps=100), ...]

The loop calls every hook after every call of the executor. `next_step` only limits the next call,
so no interval has to divide another. Asynchronous steps may overshoot, so an action is due when a
multiple was crossed. building.py decides which task has which hook; no hook asks for its role.
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from strategies.metrics import Metrics
from trainer.config_file import errors_explained
from trainer.exit_codes import EXIT_RESTART

NEVER = 2**62


class Hook:
    """The loop calls it when no step is in flight in any process.

    Attributes:
        done: The reason why training is complete before its last step, or empty. All tasks that
            run the loop must set it at the same step. So a hook of `build_hooks`, which only the
            chief has, must not set it under multiworker.
        failure: The reason why an output of the run could not be written, or empty.
        failure_exit_code: The exit code of a run with this failure.
    """

    done: str = ""
    failure: str = ""
    failure_exit_code: int = EXIT_RESTART

    def begin(self, step: int) -> None:
        """Called before the first step of this process, when `step` steps are done.

        Called again, with a lower step, when training went back to a checkpoint.
        """

    def next_step(self, step: int) -> int:
        """Returns the first step after `step` at which this hook must be called."""
        return NEVER

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Called after each call of the executor, with the metrics of its steps."""

    def catch_up(self, step: int) -> None:
        """Called after `begin` if the run resumes at `step`.

        The former process may have ended before it called the hooks at `step`.
        """

    def end(self, step: int) -> None:
        """Called once after the last step, unless the run failed."""

    def result(self) -> Mapping[str, object]:
        """Returns what the hook adds to result.json: JSON values by key."""
        return {}


@dataclass(eq=False)
class CatchUp(Hook):
    """Calls `catch_up` of `hooks` once, after all of them have begun: it is the last hook."""

    hooks: Sequence[Hook]
    _is_done: bool = field(default=False, init=False)

    @override
    def begin(self, step: int) -> None:
        if not self._is_done:
            self._is_done = True
            for hook in self.hooks:
                hook.catch_up(step)


def next_multiple(step: int, every_steps: int, last_step: int = NEVER) -> int:
    """Returns the first step after `step` that is a multiple of `every_steps`, or `last_step`.

    With `every_steps` 0 there are no multiples; NEVER if there is no such step.
    """
    due = (step // every_steps + 1) * every_steps if every_steps else NEVER
    return min(due, last_step) if step < last_step else due


@dataclass(eq=False, kw_only=True)
class PeriodicHook(Hook, abc.ABC):
    """Acts once after a call that crossed multiples of `every_steps`, and at `last_step`.

    With `every_steps` 0 it acts only at `last_step`; with `last_step` NEVER only at multiples.
    """

    every_steps: int = 0
    last_step: int = NEVER
    _due: int = field(default=NEVER, init=False)
    _acted_step: int = field(default=-1, init=False)

    @abc.abstractmethod
    def act(self, step: int) -> None:
        """Does the work of the hook."""

    @override
    def begin(self, step: int) -> None:
        self._due = self.next_step(step)
        self._acted_step = -1

    @override
    def next_step(self, step: int) -> int:
        return next_multiple(step, self.every_steps, self.last_step)

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        if step >= self._due:
            self._act(step)
            self._due = self.next_step(step)

    @override
    def end(self, step: int) -> None:
        """Acts if a complete run has not acted, for example after a resume at the last step."""
        if step >= self.last_step and self._acted_step < step:
            self._act(step)

    def _act(self, step: int) -> None:
        self._acted_step = step
        self.act(step)


def built_by_user(what: str, build: Callable[..., object], *arguments: object) -> list[Any]:
    """Returns what `build` of a config file returns: a list, or one object. Errors name `what`.

    The caller checks the types.
    """
    with errors_explained(what):
        returned = build(*arguments)
        return list(returned) if isinstance(returned, Iterable) else [returned]
