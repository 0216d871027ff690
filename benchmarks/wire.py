"""`python -m benchmarks.wire`: bytes per step, and loss, with messages of 32 and 16 bits.

    python -m benchmarks.wire --mnist_source=DIRECTORY_WITH_THE_IDX_FILES

The 784-100-10 perceptron: 79,510 weights, 0.318 MB in float32. The loopback interface counts the
bytes, in the tasks' network namespace, from the first report to the last. Without a network
namespace it is the machine's loopback interface, which no other program may use. Under ps the bytes
include the variables that each worker reads, which --read_dtype rounds. A loss is the mean training
loss since the previous report. Prints Markdown; takes some minutes.
"""

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from absl import app, flags

from benchmarks.table import MNIST_SOURCE, machine, prepare_mnist, train_reports, watched
from data.system.flags import parse_flags

_STEPS = 3000
_REPORT_STEPS = 300
# Reports whose loss is shown.
_SHOWN_STEPS = (300, 900, 1800, 3000)

_STRATEGIES = (
    ("--strategy=multiworker", "--workers=2"),
    ("--strategy=multiworker", "--workers=4"),
    ("--strategy=ps", "--sync_replicas", "--workers=2"),
    ("--strategy=ps", "--workers=2"),
)
_DTYPES: tuple[tuple[str, ...], ...] = tuple(
    (f"--wire_dtype={dtype}",) for dtype in ("float32", "float16", "bfloat16")
)
_READ_DTYPES: tuple[tuple[str, ...], ...] = tuple(
    (f"--wire_dtype={dtype}", f"--read_dtype={dtype}") for dtype in ("float16", "bfloat16")
)
_CONFIG = (
    "--config=configs/mnist_replica.py",
    "--num_threads=1",
    f"--train_steps={_STEPS}",
    f"--config.log_every_steps={_REPORT_STEPS}",
    "--config.eval_every_steps=0",
    "--config.export=False",
)


def loopback_bytes(process: psutil.Process) -> int:
    """Bytes received by the loopback interface in the network namespace of `process`."""
    table = Path(f"/proc/{process.pid}/net/dev").read_text()
    found = re.search(r"^\s*lo:\s*(\d+)", table, re.MULTILINE)
    assert found, table
    return int(found[1])


def run(argv: Sequence[str], model_dir: Path) -> tuple[float, list[dict[str, Any]], dict[str, Any]]:
    """Trains; returns the bytes per step, the reports and the result.

    Raises:
        RuntimeError: the run failed, or was too short to measure bytes.
    """
    seen: list[tuple[int, int]] = []  # (step, bytes)

    def look(pid: int) -> None:
        reports = train_reports(model_dir)
        if reports and (not seen or reports[-1]["step"] > seen[-1][0]):
            # The run is ending if there is no worker process.
            with contextlib.suppress(StopIteration, psutil.NoSuchProcess, OSError):
                children = psutil.Process(pid).children()
                task = next(child for child in children if child.name().startswith("worker-"))
                seen.append((reports[-1]["step"], loopback_bytes(task)))

    watched([sys.executable, "-m", "trainer", *argv, f"--model_dir={model_dir}"], look)
    if len(seen) < 2:
        raise RuntimeError(f"{' '.join(argv)}: it was too short to measure bytes")
    (first_step, first), (last_step, last) = seen[0], seen[-1]
    result: dict[str, Any] = json.loads((model_dir / "result.json").read_text())
    return (last - first) / (last_step - first_step), train_reports(model_dir), result


def rows(data: Path, directory: Path) -> Iterator[str]:
    """Yields a row of the table for each strategy and type."""
    for number, strategy in enumerate(_STRATEGIES):
        of_float32 = 0.0
        dtypes = _DTYPES + (_READ_DTYPES if "--strategy=ps" in strategy else ())
        for index, dtype in enumerate(dtypes):
            argv = [*strategy, *_CONFIG, f"--data_dir={data}", *dtype]
            num_bytes, reports, result = run(argv, directory / f"{number}-{index}")
            of_float32 = of_float32 or num_bytes
            at = {report["step"]: report["loss"] for report in reports}
            losses = " | ".join(f"{at[step]:.4f}" if step in at else "" for step in _SHOWN_STEPS)
            yield (
                f"| `{' '.join(strategy)}` | `{' '.join(dtype)}` | {num_bytes / 1e6:.3f} | "
                f"{num_bytes / of_float32:.2f} | {losses} | {result['eval']['accuracy']:.4f} |"
            )


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    print(f"{machine()}, {_STEPS:,} steps of 100 examples, Adam 0.01:\n")
    shown = " | ".join(f"loss at {step:,}" for step in _SHOWN_STEPS)
    print(f"| command | types | MB a step | of float32 | {shown} | test accuracy |")
    print("| --- " * (5 + len(_SHOWN_STEPS)) + "|")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare_mnist(MNIST_SOURCE.value, directory / "mnist")
        for row in rows(directory / "mnist", directory):
            print(row, flush=True)


if __name__ == "__main__":
    flags.mark_flag_as_required(MNIST_SOURCE.name)
    app.run(main, flags_parser=parse_flags("benchmarks.wire"))
