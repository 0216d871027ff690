"""The loop stops at the next step of any hook; each hook acts once when it is due."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from data.tfrecord.split import Split
from strategies.metrics import Metrics
from tests.unit.toy import Overshooting, Toy
from trainer.hooks.base import NEVER, CatchUp, Hook, PeriodicHook, next_multiple
from trainer.loop import train


class Called(Hook):
    """Notes every step at which the loop stopped, and the examples reported in between."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.steps: list[int] = []
        self.examples: list[float] = []
        self.ended: list[int] = []

    def begin(self, step: int) -> None:
        self.began.append(step)

    def __call__(self, step: int, metrics: Metrics) -> None:
        self.steps.append(step)
        self.examples.append(metrics["loss"][1])

    def end(self, step: int) -> None:
        self.ended.append(step)


class Every(PeriodicHook):
    """Notes the steps at which it acted."""

    def __init__(self, every_steps: int, last_step: int = NEVER) -> None:
        super().__init__(every_steps=every_steps, last_step=last_step)
        self.acted: list[int] = []

    def act(self, step: int) -> None:
        self.acted.append(step)


class StopAt(Hook):
    """Asks for a stop, as a signal would, once `step` is reached."""

    def __init__(self, toy: Toy, step: int) -> None:
        self._toy, self._step = toy, step

    def next_step(self, step: int) -> int:
        return self._step if step < self._step else NEVER

    def __call__(self, step: int, metrics: Metrics) -> None:
        if step >= self._step:
            self._toy.executor.request_stop()


def run(toy: Toy, hooks: Sequence[Hook], steps: int, steps_per_call: int = 1000) -> int:
    return train(toy.executor, toy.learner, hooks, steps=steps, steps_per_call=steps_per_call)


@pytest.mark.slow
def test_intervals_need_not_divide_each_other(toy: Toy) -> None:
    called, threes, fives = Called(), Every(3, 14), Every(5, 14)

    assert run(toy, [called, threes, fives], 14) == 14

    assert called.steps == [3, 5, 6, 9, 10, 12, 14]
    assert threes.acted == [3, 6, 9, 12, 14]
    assert fives.acted == [5, 10, 14]
    assert (called.began, called.ended) == ([0], [14])
    assert called.examples == [8 * n for n in (3, 2, 1, 3, 1, 2, 2)]
    assert toy.step == 14


def test_steps_per_call_limits_a_call_and_the_last_step_is_acted_on_once(toy: Toy) -> None:
    called, fives, rarely = Called(), Every(5, 10), Every(0, 10)
    run(toy, [called, fives, rarely], 10, steps_per_call=4)
    assert called.steps == [4, 5, 9, 10]
    assert (fives.acted, rarely.acted) == ([5, 10], [10])


def test_overshooting_steps_are_due_if_a_multiple_was_crossed(split: Split, tmp_path: Path) -> None:
    toy = Toy(split, tmp_path, executor=Overshooting)
    toy.start()
    called, elevens, twos = Called(), Every(11, 20), Every(2, 20)

    last = run(toy, [called, elevens, twos], 20)

    assert last == toy.step == called.steps[-1] > 20
    assert twos.acted == called.steps, "two multiples crossed at once are one occasion"
    crossed = [
        step
        for before, step in zip([0, *called.steps], called.steps, strict=False)
        if before // 11 < step // 11 or step >= 20
    ]
    assert elevens.acted == crossed
    assert len(crossed) < len(called.steps)


def test_complete_run_resumed_at_its_last_step_acts_once_more_and_trains_no_more(toy: Toy) -> None:
    run(toy, [], 6)
    called, fives, rarely, forever = Called(), Every(5, 6), Every(0, 6), Every(5)

    assert run(toy, [called, fives, rarely, forever], 6) == 6

    assert called.steps == []
    assert fives.acted == rarely.acted == [6]
    assert forever.acted == []


def test_stop_request_ends_the_loop_before_the_last_step(toy: Toy) -> None:
    called, fives = Called(), Every(5, 100)
    last = run(toy, [called, fives, StopAt(toy, 7)], 100, steps_per_call=2)
    assert 7 <= last < 20
    assert called.ended == [last]
    assert fives.acted == [5]


@pytest.mark.parametrize(("step", "every", "due"), [(0, 5, 5), (4, 5, 5), (5, 5, 10), (7, 3, 9)])
def test_next_multiple_is_after_the_step(step: int, every: int, due: int) -> None:
    assert next_multiple(step, every) == due
    assert next_multiple(step, 0) == NEVER


def test_hooks_catch_up_once_after_all_have_begun(toy: Toy) -> None:
    toy.executor.run(4)
    calls: list[str] = []

    class Noted(Hook):
        def begin(self, step: int) -> None:
            calls.append(f"begin {step}")

        def catch_up(self, step: int) -> None:
            calls.append(f"catch up {step}")

        def __call__(self, step: int, metrics: Metrics) -> None:
            calls.append(f"call {step}")

    noted = [Noted(), Noted()]
    hooks = [*noted, CatchUp(noted)]
    run(toy, hooks, 8)
    assert calls == ["begin 4"] * 2 + ["catch up 4"] * 2 + ["call 8"] * 2
    calls.clear()
    run(toy, hooks, 10)  # After a NaN.
    assert calls == ["begin 8"] * 2 + ["call 10"] * 2
