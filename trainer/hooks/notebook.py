"""A progress bar below the cell of a notebook, in place of the terminal's."""

import sys
from typing import Any

from typing_extensions import override

from strategies.metrics import Metrics
from strategies.pace import Pace
from trainer.hooks.base import Hook
from trainer.run_files import clock


def is_kernel() -> bool:
    """Returns True in the kernel of a notebook; a shell of IPython in a terminal is none."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def time_left(pace: Pace | None, num_steps: int) -> str:
    """Returns `0:01:30 left` for `num_steps`; "" before a step has been timed."""
    secs_per_step = pace.secs_per_step() if pace else None
    return "" if secs_per_step is None else f"{clock(max(0, num_steps) * secs_per_step)} left"


class NotebookBar(Hook):
    """A bar towards `last_step`: HTML that is replaced after each call of the executor."""

    def __init__(self, last_step: int, pace: Pace) -> None:
        self._last_step = last_step
        self._pace = pace
        self._handle: Any = None  # Any: IPython has no types.

    @override
    def begin(self, step: int) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(self._shown(step), raw=True, display_id=True)

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        self._handle.update(self._shown(step), raw=True)

    def _shown(self, step: int) -> dict[str, str]:
        text = f"step {step:,}/{self._last_step:,}  {time_left(self._pace, self._last_step - step)}"
        bar = f'<progress value="{step}" max="{self._last_step}"></progress>'
        return {"text/plain": text, "text/html": f"{bar} {text}"}
