"""`python -m benchmarks.slow_tables`: synchronous ps with an embedding table, on slow links.

    python -m data.prepare clicks --num_clicks=400000
    python -m benchmarks.slow_tables --rates=500mbit,2gbit

A chief, the workers and two parameter servers have a host each (benchmarks/hosts.py: needs root),
and train DLRM with rows of 64 numbers. Prints the step time for each rate and each way in which
rows travel, as Markdown. Each worker has a core, which the servers share. If there are more cores
than workers, all processes share all of them, so a worker can send while it computes.
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
from data.system.cores import num_cores
from data.system.flags import parse_flags

_RATES = flags.DEFINE_list("rates", ["500mbit", "2gbit"], "Rates of the links, as `tc` takes them.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds to measure.", lower_bound=1)
_WORKERS = flags.DEFINE_integer(
    "workers", 2, "Workers of a cluster on this machine.", lower_bound=1
)
_DATA_DIR = flags.DEFINE_string("clicks_dir", "datasets/clicks", "Where the clicks are.")
_TIMEOUT_SECS = flags.DEFINE_float("timeout_secs", 600.0, "A program that takes longer has failed.")

_PORT = 2222
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
_WAYS: tuple[tuple[str, ...], ...] = (
    (),
    ("--embedding_staleness=1",),
    ("--wire_dtype=bfloat16", "--read_dtype=bfloat16"),
    ("--wire_dtype=bfloat16", "--read_dtype=bfloat16", "--embedding_staleness=1"),
)


def tasks() -> list[tuple[str, int]]:
    """The job and the index of each task."""
    numbers = {"chief": 1, "worker": _WORKERS.value, "ps": 2}
    return [(job, index) for job, number in numbers.items() for index in range(number)]


def program(way: Sequence[str], places: Sequence[Host], model_dir: Path) -> Program:
    """Trains DLRM with the flags `way`; task i is on `places[i]`."""
    cluster: dict[str, list[str]] = {}
    for (job, _), place in zip(tasks(), places, strict=True):
        cluster.setdefault(job, []).append(f"{place.address}:{_PORT}")
    command = [sys.executable, "-m", "trainer", *_TRAINING, *way, f"--model_dir={model_dir}"]
    command.append(f"--data_dir={Path(_DATA_DIR.value).resolve()}")
    processes = []
    has_own_core = _WORKERS.value >= num_cores()
    for job, index in tasks():
        tf_config = {"cluster": cluster, "task": {"type": job, "index": index}}
        env = {"TF_CONFIG": json.dumps(tf_config)}
        core = index if job == "worker" and has_own_core else None
        processes.append(Process(command, env, core, model_dir if job == "chief" else None))
    return Program(" ".join(way) or "float32", processes)


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if reason := reason_why_not():
        sys.exit(f"benchmarks.slow_tables needs network namespaces: {reason}")
    print(f"{machine()}, milliseconds of a step, median (least to most):\n")
    print("| rows | " + " | ".join(_RATES.value) + " |")
    print("| --- |" + " --- |" * len(_RATES.value))
    found: dict[tuple[str, ...], list[str]] = {way: [] for way in _WAYS}
    for rate in _RATES.value:
        with hosts(len(tasks())) as places:
            for place in places:
                place.limit_rate(rate)
            millis: dict[tuple[str, ...], list[float]] = {way: [] for way in _WAYS}
            for _ in range(_ROUNDS.value):
                for way in _WAYS:
                    with tempfile.TemporaryDirectory() as name:
                        where = Path(name)
                        run = program(way, places, where / "run")
                        taken = measured(run, places, where, timeout_secs=_TIMEOUT_SECS.value)
                    millis[way].append(1000 * taken.secs)
        for way, values in millis.items():
            of = summarise(values)
            found[way].append(f"{of.median:.0f} ({of.least:.0f} to {of.most:.0f})")
    for way, cells in found.items():
        print(f"| `{' '.join(way) or 'float32'}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.slow_tables"))
