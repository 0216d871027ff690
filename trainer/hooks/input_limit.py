"""Says that the input limits the rate of a run: what it gives, and what the model would take.

    if limit := limit_of([report]):
        print(limit.text)

The console says it once (console.py), and the page of a run (trainer/report) of all reports.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer.run_files import two_digits

# A smaller share of the time of steps is not worth a change.
_LEAST_WAIT = 0.05
_CHANGES = (
    "--num_threads=N (by default the CPUs, at most 8), --config.data.cache_bytes=N if the parsed "
    "examples fit in memory, smaller images"
)


class InputLimit(NamedTuple):
    """`input_wait` is the share of the time of steps; the rates are examples a second."""

    input_wait: float
    data_rate: float
    model_rate: float

    @property
    def text(self) -> str:
        """One line, with what to change."""
        return (
            f"The input limits this run: steps wait for it {self.input_wait:.0%} of their time. "
            f"It gives {two_digits(self.data_rate)} examples/s; the model would take about "
            f"{two_digits(self.model_rate)}. Change: {_CHANGES} (docs/data.md#speed-and-memory)."
        )


def limit_of(reports: Sequence[Mapping[str, Any]]) -> InputLimit | None:
    """The limit that reports of training show together; None if steps hardly wait for input.

    Each report counts with its number of steps. A report without `input_wait` does not know it.
    """
    examples = seconds = waited = 0.0
    last_step = 0
    for report in reports:
        num_steps, last_step = report.get("step", 1) - last_step, report.get("step", 1)
        if "input_wait" not in report or not report["steps_per_sec"] or num_steps <= 0:
            continue
        took = num_steps / report["steps_per_sec"]
        seconds += took
        waited += took * report["input_wait"]
        examples += took * report["examples_per_sec"]
    if waited <= _LEAST_WAIT * seconds or waited >= seconds:
        return None
    return InputLimit(waited / seconds, examples / seconds, examples / (seconds - waited))
