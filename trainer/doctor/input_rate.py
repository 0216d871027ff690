"""What the input gives: the rate of a short read, and what the reports of a former run show.

lines = input_lines(inputs, model_dir)
"""

import time
from collections.abc import Sequence

from data.disk_reader import DiskReader
from data.reader import Reader
from data.system.files import is_url
from trainer.hooks.input_limit import limit_of
from trainer.inputs import Inputs, data_errors_explained
from trainer.run_files import RunFiles

_READ_SECS = 2.0


def input_lines(inputs: Inputs, model_dir: str) -> Sequence[str]:
    """Returns lines to print. Reads training batches for about two seconds.

    Nothing is read over the network, or if the examples are cached in memory. Other programs on
    this machine change the rate, so it is information, and no finding.
    """
    lines = []
    reader = inputs.train
    if not (reader.caches_examples or any(is_url(shard.path) for shard in reader.split.shards)):
        with data_errors_explained(inputs):
            rate = _examples_per_sec(reader)
        lines.append(
            f"the input gives about {rate:,.0f} examples/s here without a model; steps that take "
            "more would wait for it (docs/data.md#speed-and-memory)"
        )
    reports = RunFiles(model_dir).read_reports()
    if limit := limit_of([report for report in reports if report.get("split") == "train"]):
        lines.append(f"{model_dir}: {limit.text}")
    return lines


def _examples_per_sec(reader: Reader) -> float:
    batches = iter(DiskReader(reader).batches(0, range(reader.order.lanes)))
    next(batches)  # Threads have started, and files are open.
    began, num_batches = time.monotonic(), 0
    while time.monotonic() < began + _READ_SECS:
        next(batches)
        num_batches += 1
    return num_batches * reader.batch_examples() / (time.monotonic() - began)
