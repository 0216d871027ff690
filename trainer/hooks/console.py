"""Console: what a run prints, one line per report.

    console = Console(1000, executor.pace, is_quiet=False)
    console.say("resuming from step 400")
    hooks = [..., console, Report(executor, learner, [console], ...), ...]

Lines fit the width of the terminal: the words that matter least are left out. In a pipe they are
complete. The chief of a local cluster writes to a pipe, and gets the width from its launcher. The
live view (trainer/live) also gets the step, a few times a second.
"""

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

import rich.console
from typing_extensions import override

from strategies.metrics import Metrics
from strategies.pace import Pace
from trainer.hooks.base import Hook
from trainer.hooks.input_limit import limit_of
from trainer.hooks.terminal import COMPILING, has_live_view, passed_width, progress_line
from trainer.hooks.writers import Values, Writer
from trainer.run_files import NO_METRICS, clock, metric_words, two_digits

log = logging.getLogger(__name__)

_MAX_SHOWN_WORKERS = 8
_SECS_PER_PROGRESS = 0.4


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


class _Console(rich.console.Console):
    """Raises an error of a closed pipe, as of `| head`: rich would end the process."""

    @override
    def on_broken_pipe(self) -> None:
        raise  # The BrokenPipeError that rich handles here.


class Console(Writer):
    """One line per report of a run that ends at `last_step`.

    `pace` is the executor's, for the time left; None in a task that does not train. With `is_quiet`
    only what is `important` is printed. If steps wait for input, each report says so; the second in
    a row also says what to change.
    """

    def __init__(self, last_step: int, pace: Pace | None = None, *, is_quiet: bool = False) -> None:
        # A kernel has colours, but no terminal: NotebookBar shows the progress.
        force_terminal = False if is_kernel() else None
        self._console = _Console(
            highlight=False, force_jupyter=False, force_terminal=force_terminal
        )
        self._last_step = last_step
        self._pace = pace
        self._has_failed = False
        self._has_begun = False
        self._was_limited = self._has_named_limit = False  # By the input.
        self._is_quiet = is_quiet
        self._next_progress = 0.0

    @override
    def begin(self, step: int) -> None:
        if not self._has_begun:
            self.say(COMPILING)
        self._has_begun = True

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        if has_live_view() and time.monotonic() >= self._next_progress:
            self.say(progress_line(step))
            self._next_progress = time.monotonic() + _SECS_PER_PROGRESS

    def say(self, text: str, *, important: bool = False) -> None:
        """Prints a line. If standard output cannot be written, warns once.

        On a terminal, text is wrapped between words.
        """
        if self._is_quiet and not important:
            return
        soft_wrap = not self._console.is_terminal
        try:
            self._console.print(text, markup=False, soft_wrap=soft_wrap)
        except OSError as error:  # For example a file on a full disk.
            if not self._has_failed:
                log.warning("The console cannot be written: %s. Training continues.", error)
            self._has_failed = True

    @override
    def write(self, step: int, split: str, values: Values) -> None:
        """Prints `step 400/1,000  train  loss 0.1230  epoch 17.8  12,345 examples/s  ... left`."""
        needed = [f"step {step:,}/{self._last_step:,}", f"{split:5}"]
        needed += metric_words({n: v for n, v in values.items() if n not in NO_METRICS})
        more: dict[str, int] = {}  # The order in which words are left out, the highest first.
        if "examples_per_sec" in values:
            more[f"epoch {values['epoch']:.1f}"] = 1
            more[f"{two_digits(values['examples_per_sec'])} examples/s"] = 2
            more[f"{two_digits(1 / max(values['steps_per_sec'], 1e-9))} s/batch"] = 3
            more[time_left(self._pace, self._last_step - step)] = 0
        else:
            more[f"{values['examples']:,} examples"] = 0
        if "worker_share" in values:
            more[f"({_balance(values['worker_share'])})"] = 4
        limit = limit_of([values]) if split == "train" else None
        if limit:
            more[f"waits for input {limit.input_wait:.0%}"] = 5
        width = self._console.width if self._console.is_terminal else passed_width()
        self.say(_fitting(needed, more, width))
        if split == "train":
            # Not after one report: the first batches of a run may come late.
            if limit and self._was_limited and not self._has_named_limit:
                self._has_named_limit = True
                self.say(limit.text)
            self._was_limited = limit is not None


class NotebookBar(Hook):
    """A bar towards `last_step` below the cell of a notebook: HTML, in place of the terminal's."""

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


def _fitting(needed: list[str], more: Mapping[str, int], width: int | None) -> str:
    """Joins the words to a line; leaves out words of `more`, the highest numbers first."""
    kept = [word for word in more if word]
    line = "  ".join([*needed, *kept])
    while width is not None and len(line) > width and kept:
        kept.remove(max(kept, key=more.__getitem__))
        line = "  ".join([*needed, *kept])
    return line


def _balance(shares: Mapping[str, float]) -> str:
    """`worker 0: 51%  worker 1: 49%`; of many workers the two with the least and the most work."""
    if len(shares) <= _MAX_SHOWN_WORKERS:
        return "  ".join(f"{name}: {share:.0%}" for name, share in shares.items())
    ends = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    return "  ".join([f"{len(shares)} workers", *(f"{name}: {shares[name]:.1%}" for name in ends)])
