"""`python -m benchmarks.trace JSON`: when a step of `multiworker` computes, and when it sums.

    python -m benchmarks.trace docs/images/overlap.json --rates=500mbit --host_examples=1024
    python docs/images/draw.py

Trains the perceptron of benchmarks/deep.py on two hosts with a slow link (benchmarks/network.py),
first with one sum after the backward pass, then with buckets. TensorFlow logs the start and the end
of each op of worker 0. Writes the times of one step of each run, in milliseconds from its start;
docs/images/draw.py draws them. The log makes a step a little longer. The flags are those of
benchmarks.network; the first of --rates and of --host_examples counts.
"""

import dataclasses
import datetime
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.hosts import hosts, reason_why_not
from benchmarks.network import NUM_TEST, NUM_TRAIN, Setting, program
from benchmarks.network_run import measured
from benchmarks.table import machine, prepare, write_random_mnist
from data.system.flags import parse_flags

_FLAGS = flags.FLAGS

_WAYS = ("one_sum", "program")
_TIMEOUT_SECS = 600.0
# Ops of a kind with a shorter pause between them are drawn as one bar.
_MERGE_SECS = 0.004
_LINE = re.compile(
    r"(\d+\.\d+) +\d+ executor\.cc:\d+\] (Process node|Synchronous kernel done|Async kernel done): "
    r"(\d+) step (-?\d+) \{\{node (\S+?)\}\} = (\w+)\["
)


@dataclasses.dataclass(frozen=True)
class Bar:
    """From the start to the end of an op, or of several ops of a kind; in seconds."""

    kind: str
    begin: float
    end: float


def bars_of(log: Iterable[str]) -> Iterator[Bar]:
    """The ops of interest in a log of TensorFlow's executor, in the order of their ends."""
    begun: dict[tuple[str, ...], float] = {}
    for line in log:
        if not (found := _LINE.search(line)):
            continue
        time, what, *node, op = found.groups()
        if kind := _kind_of(op, line):
            key = *node, op
            if what == "Process node":
                begun[key] = float(time)
            # A sum that ends without its thread was not computed: the loop around it has ended.
            elif key in begun and (kind != "sum" or what.startswith("Async")):
                yield Bar(kind, begun.pop(key), float(time))


def _kind_of(op: str, line: str) -> str | None:
    if op.endswith("FusedMatMul"):
        return "forward"
    if op.endswith("MatMul") or op in ("ReluGrad", "BiasAddGrad"):
        return "backward"
    if op.startswith("SparseSoftmaxCrossEntropy"):
        return "loss"
    if op.startswith("ResourceApply"):
        return "update"
    if op in ("CollectiveReduceV2", "CollectiveGatherV2") and "T=DT_FLOAT" in line:
        return "sum"
    return None


def step_of(bars: Sequence[Bar], number: int) -> list[Bar]:
    """The bars of training step `number`, from 0; their times count from its first op.

    Raises:
        ValueError: the log does not have this step and the begin of the next one.
    """
    losses = sorted(bar.begin for bar in bars if bar.kind == "loss")
    starts = []
    for former, loss in zip([0.0, *losses], losses, strict=False):
        forward = [b.begin for b in bars if b.kind == "forward" and former < b.begin < loss]
        if forward:
            starts.append(min(forward))
    steps = []
    for begin, end in itertools.pairwise(starts):
        inside = [bar for bar in bars if begin <= bar.begin < end and bar.kind != "loss"]
        # Evaluation has no sums. Nor has the end of a loop, where ops are skipped.
        if any(bar.kind == "sum" for bar in inside):
            steps.append([Bar(bar.kind, bar.begin - begin, bar.end - begin) for bar in inside])
    if len(steps) <= number:
        raise ValueError(f"the log has {len(steps)} complete steps, and step {number} is needed")
    return steps[number]


def merged(bars: Sequence[Bar]) -> list[Bar]:
    """Ops of a kind that follow each other become one bar; sums stay as they are."""
    done = [bar for bar in bars if bar.kind == "sum"]
    computed = sorted((bar for bar in bars if bar.kind != "sum"), key=lambda bar: bar.begin)
    for index, bar in enumerate(computed):
        last = done[-1] if index else bar
        if index and last.kind == bar.kind and bar.begin - last.end < _MERGE_SECS:
            done[-1] = Bar(bar.kind, last.begin, max(last.end, bar.end))
        else:
            done.append(bar)
    return sorted(done, key=lambda bar: bar.begin)


def traced(way: str, setting: Setting, data: Path, where: Path) -> dict[str, Any]:
    """Runs one way; returns its step as JSON. Raises RunError, ValueError."""
    with hosts(setting.num_hosts) as places:
        for host in places:
            host.limit_rate(setting.rate)
        made = program(way, setting, places, data, where, None)
        first, *others = made.processes
        logged = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "executor=2"}
        first = dataclasses.replace(first, env={**first.env, **logged})
        made = dataclasses.replace(made, processes=[first, *others])
        taken = measured(made, places, where, timeout_secs=_TIMEOUT_SECS)
    with (where / "0.log").open(errors="replace") as log:
        bars = list(bars_of(log))
    # In the middle of the run: warm, and not the last of a call.
    step = merged(step_of(bars, 9))
    print(f"{way}: {taken.secs:.2f} s a step, this one {max(bar.end for bar in step):.2f} s")
    return {
        "way": way,
        "bars": [
            {"kind": bar.kind, "begin": round(1e3 * bar.begin, 1), "end": round(1e3 * bar.end, 1)}
            for bar in step
        ],
    }


def main(argv: Sequence[str]) -> None:
    """Writes the JSON file."""
    if len(argv) != 2:
        sys.exit("Name the file to write: python -m benchmarks.trace docs/images/overlap.json")
    if why := reason_why_not():
        sys.exit(f"{why}. It is needed to make hosts on this machine.")
    setting = Setting(_FLAGS.rates[0], int(_FLAGS.host_examples[0]), 2)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_random_mnist(directory / "random", NUM_TRAIN, NUM_TEST)
        prepare("mnist", directory / "mnist", f"--source={directory / 'random'}")
        steps = []
        for way in _WAYS:
            (directory / way).mkdir()
            steps.append(traced(way, setting, directory / "mnist", directory / way))
    found = {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "link": setting.rate,
        "examples": setting.examples,
        "steps": steps,
    }
    Path(argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.trace"))
