"""`python -m benchmarks.stragglers`: the effect of backup workers on synchronous ps.

    python -m benchmarks.stragglers --data_dir=datasets/digits

Three workers of equal speed, then with one slow worker; steps with the first two gradients, and
with all three. Runs the real program, one run after the other, and prints Markdown. The rate is the
mean over all reports except the first, which includes tracing.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.table import machine, run
from data.system.flags import parse_flags

_DATA_DIR = flags.DEFINE_string(
    "data_dir", "datasets/digits", "Directory with TFRecord files of the digits."
)
_DELAY_MS = flags.DEFINE_integer("delay_ms", 200, "Delay of each gradient of the slow worker.")
_TRAIN_STEPS = flags.DEFINE_integer("train_steps", 300, "Steps of a run.")

_NUM_WORKERS = 3


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    print(f"{machine()}:\n")
    print("| gradients a step | slow worker | steps/s | loss | accuracy | dropped, by worker |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        for delay_ms in (0, _DELAY_MS.value):
            for num_gradients in (_NUM_WORKERS, _NUM_WORKERS - 1):
                model_dir = Path(name) / f"{num_gradients}-{delay_ms}"
                result, _ = run(
                    [
                        "--strategy=ps",
                        "--sync_replicas",
                        f"--workers={_NUM_WORKERS}",
                        f"--replicas_to_aggregate={num_gradients}",
                        "--config=benchmarks/slow_worker.py",
                        f"--data_dir={_DATA_DIR.value}",
                        f"--config.delay_ms={delay_ms}",
                        f"--train_steps={_TRAIN_STEPS.value}",
                        "--config.log_every_steps=20",
                        "--num_threads=1",
                    ],
                    model_dir,
                )
                lines = (model_dir / "metrics.jsonl").read_text().splitlines()
                reports = [line for line in map(json.loads, lines) if line["split"] == "train"]
                rate = statistics.harmonic_mean([r["steps_per_sec"] for r in reports[1:]])
                slow = f"+{delay_ms} ms" if delay_ms else "none"
                loss, accuracy = result["eval"]["loss"], result["eval"]["accuracy"]
                dropped = ", ".join(map(str, result["worker_dropped"].values()))
                print(
                    f"| {num_gradients} of {_NUM_WORKERS} | {slow} | {rate:.1f} | "
                    f"{loss:.4f} | {accuracy:.4f} | {dropped} |",
                    flush=True,
                )


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.stragglers"))
