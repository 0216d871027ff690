"""`python -m benchmarks.linear_scaling`: test accuracy with batches of 100 and 800, equal epochs.

    python -m benchmarks.linear_scaling --mnist_source=DIRECTORY_WITH_THE_IDX_FILES

The learning rate is proportional to the batch size, with a warm-up in the first epochs (Goyal et
al., "Accurate, Large Minibatch SGD", 2017); in the last row it is not. SGD on the 784-100-10
perceptron with half a cosine. Each row is the mean over seeds. Prints Markdown; takes minutes.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.table import MNIST_SOURCE, machine, prepare_mnist, run
from data.system.flags import parse_flags

_SEEDS = range(3)
_EPOCHS = 20
_EXAMPLES = 60_000
_BASE, _LARGE = 100, 800
_RATE = 0.1
_WARMUP_EPOCHS = 5

_CONFIG = (
    "--strategy=mirrored",
    "--config=configs/mnist_replica.py",
    "--config.optimizer=sgd",
    f"--learning_rate={_RATE}",
    "--config.schedule.kind=cosine",
    "--config.export=False",
)
_SCALED = (
    f"--config.schedule.base_batch_size={_BASE}",
    f"--config.schedule.warmup_steps={_WARMUP_EPOCHS * _EXAMPLES // _LARGE}",
    # From the rate of the small batch.
    f"--config.schedule.warmup_start={_BASE / _LARGE}",
)


def row(batch_size: int, scaled: bool, data: Path, directory: Path) -> str:
    """A row of the table: mean and range of the test accuracy over seeds."""
    steps = _EPOCHS * _EXAMPLES // batch_size
    accuracies = []
    for seed in _SEEDS:
        argv = [*_CONFIG, f"--data_dir={data}", f"--config.seed={seed}"]
        argv += [f"--batch_size={batch_size}", f"--train_steps={steps}"]
        argv += _SCALED if scaled else ()
        result, _ = run(argv, directory / f"{batch_size}-{scaled}-{seed}")
        accuracies.append(result["eval"]["accuracy"])
    scale = batch_size / _BASE if scaled else 1
    return (
        f"| {batch_size} | {_RATE * scale:g} | {steps:,} | {statistics.mean(accuracies):.4f} | "
        f"{min(accuracies):.4f} to {max(accuracies):.4f} |"
    )


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    print(f"{machine()}, {len(_SEEDS)} seeds:\n")
    print("| batch | highest rate | steps | test accuracy | from seed to seed |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        data = directory / "mnist"
        prepare_mnist(MNIST_SOURCE.value, data)
        for batch_size, scaled in ((_BASE, False), (_LARGE, True), (_LARGE, False)):
            print(row(batch_size, scaled, data, directory), flush=True)


if __name__ == "__main__":
    flags.mark_flag_as_required(MNIST_SOURCE.name)
    app.run(main, flags_parser=parse_flags("benchmarks.linear_scaling"))
