"""`python -m benchmarks.slow_tables`: synchronous ps with an embedding table, on slow links.

    python -m data.prepare clicks --num_clicks=400000
    python -m benchmarks.slow_tables --rates=500mbit,2gbit

A chief, two workers and two parameter servers have a host each (benchmarks/hosts.py: needs root),
and train DLRM with rows of 64 numbers. Prints the step time for each rate and each type in which
rows travel, as Markdown. Each worker has a core; with two cores the servers share them.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.hosts import Host, hosts, reason_why_not
from benchmarks.network_run import Process, Program, measured
from benchmarks.pairs import summarise
from benchmarks.table import machine
from data.system.flags import parse_flags

_RATES = flags.DEFINE_list("rates", ["500mbit", "2gbit"], "Rates of the links, as `tc` takes them.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds to measure.", lower_bound=1)
_DATA_DIR = flags.DEFINE_string("clicks_dir", "datasets/clicks", "Where the clicks are.")
_TIMEOUT_SECS = flags.DEFINE_float("timeout_secs", 600.0, "A program that takes longer has failed.")

_PORT = 2222
_TASKS = (("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1))
_TRAINING = (
    "--strategy=ps",
    "--sync_replicas",
    "--num_threads=1",
    "--config=configs/dlrm.py",
    "--config.width=64",
    "--train_steps=240",
    "--config.log_every_steps=40",
    "--config.eval_every_steps=0",
    "--config.checkpoint_every_steps=0",
    "--config.export=False",
)
_TYPES: tuple[tuple[str, ...], ...] = (
    (),
    ("--wire_dtype=bfloat16",),
    ("--wire_dtype=bfloat16", "--read_dtype=bfloat16"),
)


def program(types: Sequence[str], places: Sequence[Host], model_dir: Path) -> Program:
    """Trains DLRM with the flags `types`; task i is on `places[i]`."""
    cluster: dict[str, list[str]] = {}
    for (job, _), place in zip(_TASKS, places, strict=True):
        cluster.setdefault(job, []).append(f"{place.address}:{_PORT}")
    command = [sys.executable, "-m", "trainer", *_TRAINING, *types, f"--model_dir={model_dir}"]
    command.append(f"--data_dir={Path(_DATA_DIR.value).resolve()}")
    processes = []
    for job, index in _TASKS:
        tf_config = {"cluster": cluster, "task": {"type": job, "index": index}}
        env = {"TF_CONFIG": json.dumps(tf_config)}
        core = index if job == "worker" else None
        processes.append(Process(command, env, core, model_dir if job == "chief" else None))
    return Program(" ".join(types) or "float32", processes)


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if reason := reason_why_not():
        sys.exit(f"benchmarks.slow_tables needs network namespaces: {reason}")
    print(f"{machine()}, milliseconds of a step, median (least to most):\n")
    print("| types | " + " | ".join(_RATES.value) + " |")
    print("| --- |" + " --- |" * len(_RATES.value))
    found: dict[tuple[str, ...], list[str]] = {types: [] for types in _TYPES}
    for rate in _RATES.value:
        with hosts(len(_TASKS)) as places:
            for place in places:
                place.limit_rate(rate)
            millis: dict[tuple[str, ...], list[float]] = {types: [] for types in _TYPES}
            for _ in range(_ROUNDS.value):
                for types in _TYPES:
                    with tempfile.TemporaryDirectory() as name:
                        where = Path(name)
                        run = program(types, places, where / "run")
                        taken = measured(run, places, where, timeout_secs=_TIMEOUT_SECS.value)
                    millis[types].append(1000 * taken.secs)
        for types, values in millis.items():
            of = summarise(values)
            found[types].append(f"{of.median:.0f} ({of.least:.0f} to {of.most:.0f})")
    for types, cells in found.items():
        print(f"| `{' '.join(types) or 'float32'}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.slow_tables"))
