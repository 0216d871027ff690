"""`python -m benchmarks.checkpointing`: the time that checkpoints and checksums cost.

    python -m benchmarks.checkpointing                  # some minutes, on an idle machine

Trains a model of ten million parameters (benchmarks/wide.py) with Adam. Each round takes the same
number of steps three times, in a changing order: without a checkpoint, with a checkpoint that is
written during the steps, and with a checkpoint that training waits for. The loss of time is
relative to the steps without a checkpoint in the same round. Prints Markdown: medians of all
rounds, with minimum and maximum. If other programs run, use the CPU time: it shows the loss on a
busy machine.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf
from absl import app, flags

from benchmarks.table import machine
from data.prepare.preparing import prepare
from data.system.flags import parse_flags
from strategies.base import Position
from strategies.mirrored import MirroredExecutor, replica_devices, use_gpus
from trainer.build import build_checkpointer, build_learner
from trainer.checkpoints.file_checks import contents_of
from trainer.config import load_recipe
from trainer.inputs import open_inputs

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds to measure.")
_STEPS = flags.DEFINE_integer("steps", 100, "Steps to a checkpoint.")


class Trainer:
    """A training run that saves checkpoints when this program asks for them."""

    def __init__(self, directory: str) -> None:
        """Prepares the data; runs the first steps and checkpoints, which include tracing."""
        prepare("digits", f"{directory}/digits")
        recipe = load_recipe("benchmarks/wide.py")
        recipe.config.data_dir = f"{directory}/digits"
        inputs = open_inputs(recipe)
        self.executor = MirroredExecutor.on(replica_devices(1, use_gpus(None)))
        self.learner = self.executor.build(lambda: build_learner(recipe))
        self.checkpoints = f"{directory}/run/checkpoints"
        self.checkpointer = build_checkpointer(recipe, f"{directory}/run", inputs, self.learner)
        self.executor.start(self.learner, inputs.train, inputs.evaluation, Position())
        for _ in range(2):
            self.executor.run(5)
            self.save_and_wait()

    def save(self) -> None:
        """Starts to write a checkpoint."""
        step = int(self.learner.step.numpy())
        self.checkpointer.save(step, self.executor.position, {})

    def timed(self, save: Callable[[], None]) -> tuple[float, float, float]:
        """Seconds of `save`; seconds of `save` and the steps after it; CPU seconds of both."""
        # One step, because the same state would not be saved again.
        self.executor.run(1)
        started, used = time.perf_counter(), time.process_time()
        save()
        saved = time.perf_counter()
        self.executor.run(_STEPS.value)
        self.checkpointer.wait()
        ended = time.perf_counter()
        return saved - started, ended - started, time.process_time() - used

    def save_and_wait(self) -> None:
        """Writes a checkpoint in the foreground."""
        self.save()
        self.checkpointer.wait()


def shown(values: Sequence[float]) -> str:
    """`median (minimum to maximum)`."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def more(values: Sequence[float], without: Sequence[float]) -> str:
    """The increase of `values` over `without`, round by round, in percent."""
    percent = [100 * (value / other - 1) for value, other in zip(values, without, strict=True)]
    return f"{statistics.median(percent):.1f}% ({min(percent):.1f} to {max(percent):.1f})"


def main(argv: Sequence[str]) -> None:
    """Prints the tables."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(directory)
        ways: dict[str, Callable[[], None]] = {
            "none": lambda: None,
            "written meanwhile": trainer.save,
            "waited for": trainer.save_and_wait,
        }
        names = list(ways)
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        for number in range(_ROUNDS.value):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(trainer.timed(ways[name]))
        newest = max(Path(trainer.checkpoints).glob("step-*"))
        files = [str(path) for path in newest.glob("variables*")]
        num_bytes = sum(int(contents_of(file)["bytes"]) for file in files)
        checksum_secs, restore_secs = [], []
        for _ in range(_ROUNDS.value):
            started = time.perf_counter()
            for file in files:
                contents_of(file)
            checksum_secs.append(time.perf_counter() - started)
            started = time.perf_counter()
            trainer.checkpointer.restore()
            restore_secs.append(time.perf_counter() - started)
        print(
            f"{machine()}; {trainer.learner.model.count_params():,} parameters, "
            f"{num_bytes / 1e6:.0f} MB a checkpoint, TensorFlow {tf.__version__}:\n"
        )
        every = f"a checkpoint every {_STEPS.value} steps"
        print(f"| {every} | training stands, s | all, s | lost | CPU s | more |")
        print("| --- | --- | --- | --- | --- | --- |")
        _, takes_without, uses_without = zip(*times["none"], strict=True)
        for name in names:
            stands, takes, uses = zip(*times[name], strict=True)
            print(
                f"| {name} | {shown(stands)} | {shown(takes)} | {more(takes, takes_without)} | "
                f"{shown(uses)} | {more(uses, uses_without)} |"
            )
        checksums, restoring = shown(checksum_secs), shown(restore_secs)
        print(f"\nIts checksums take {checksums} s, restoring it {restoring} s.")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.checkpointing"))
