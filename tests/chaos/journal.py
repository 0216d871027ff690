"""A hook that records the time of each step of the chief, and pauses so that faults can happen.

MODEL_DIR.journal.jsonl   {"time": 1795273455.4, "process": 7701, "begins": true, "step": 40}
MODEL_DIR.pause           while this file is there: the seconds of a pause after each call

Both are beside the directory of the run, whose disk may be full.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from strategies.metrics import Metrics
from trainer.config import Config
from trainer.hooks.base import Hook


def journal_of(model_dir: Path) -> Path:
    return model_dir.with_name(f"{model_dir.name}.journal.jsonl")


def pause_of(model_dir: Path) -> Path:
    return model_dir.with_name(f"{model_dir.name}.pause")


class Journal(Hook):
    """One line when a process begins to train, and one after each call of the executor."""

    def __init__(self, model_dir: Path) -> None:
        self._path = journal_of(model_dir)
        self._pause = pause_of(model_dir)

    def begin(self, step: int) -> None:
        self._write(step, begins=True)

    def __call__(self, step: int, metrics: Metrics) -> None:
        self._write(step, begins=False)
        with contextlib.suppress(FileNotFoundError):
            time.sleep(float(self._pause.read_text()))

    def _write(self, step: int, *, begins: bool) -> None:
        line = {"time": time.time(), "process": os.getpid(), "begins": begins, "step": step}
        # In one call, so that a line is complete or missing.
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def often(config: Config) -> None:
    """Makes a run save, evaluate and report often, so that faults also happen meanwhile."""
    config.steps_per_call = 5
    config.log_every_steps = 10
    config.checkpoint_every_steps = 20
    config.eval_every_steps = 60
    config.export = False


def build_hooks(config: Config, model_dir: str) -> Sequence[Hook]:
    return [Journal(Path(model_dir))]
