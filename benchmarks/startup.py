"""`python -m benchmarks.startup`: time from Enter to the first step, and memory, in every mode.

    python -m benchmarks.startup --rounds=3             # about 30 min
    python -m benchmarks.startup --models=efficientnetv2b0 --modes=multiworker,ps

Each run is the real program with one thread per process, which trains 3 steps on small random
examples (tests/models). Prints Markdown, the median of the rounds, which take turns:

* first step: seconds from the command to the report of the first step, with imports and tracing;
* memory: the largest resident set of any task of each kind until the end, in 10^6 bytes.
"""

import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.large_models import Measured, train
from benchmarks.table import machine
from tests.models.examples import write_examples
from trainer.tf_setup import set_environment

_CONFIGS = {
    "mlp": ("--config=tests/models/images.py:mlp",),
    "resnet20": ("--config=tests/models/images.py:resnet20",),
    "transformer": (
        "--config=tests/models/language_model.py",
        "--config.width=128",
        "--config.blocks=4",
    ),
    "efficientnetv2b0": ("--config=tests/models/images.py:efficientnetv2b0",),
}
_ARGV = {
    "mirrored": ("--strategy=mirrored",),
    "mirrored 2": ("--strategy=mirrored", "--replicas=2"),
    "multiworker": ("--strategy=multiworker", "--workers=2"),
    "ps sync": ("--strategy=ps", "--sync_replicas", "--workers=2", "--ps=1"),
    "ps": ("--strategy=ps", "--workers=2", "--ps=1"),
}
_MODELS = flags.DEFINE_list("models", list(_CONFIGS), "The models to start.")
_MODES = flags.DEFINE_list(
    "modes",
    list(_ARGV),
    "The modes to start; `mirrored 2` is mirrored with 2 replicas.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds to measure.", lower_bound=1)
_SHORT_RUN = (
    "--num_threads=1",
    "--train_steps=3",
    "--config.log_every_steps=1",
    "--config.export=False",
)


def _row(model: str, mode: str, runs: Sequence[Measured]) -> str:
    starts = [run.start_secs for run in runs]
    memory: Counter[str] = Counter()
    for run in runs:
        memory |= run.memory
    sizes = ", ".join(f"{kind} {size / 1e6:,.0f}" for kind, size in memory.items())
    spread = f"{statistics.median(starts):.1f} ({min(starts):.1f} to {max(starts):.1f})"
    return f"| {model} | {mode} | {spread} | {sizes} |"


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    set_environment()
    print(f"{machine()}:\n")
    print("| model | mode | first step | memory |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_examples(directory / "data")
        for model in _MODELS.value:
            runs: dict[str, list[Measured]] = {mode: [] for mode in _MODES.value}
            for number in range(_ROUNDS.value):
                for mode, done in runs.items():
                    words = (*_ARGV[mode], *_CONFIGS[model], *_SHORT_RUN)
                    model_dir = directory / f"{model}-{mode}-{number}"
                    done.append(train((*words, f"--data_dir={directory}/data"), model_dir))
            for mode, done in runs.items():
                print(_row(model, mode, done), flush=True)


if __name__ == "__main__":
    app.run(main)
