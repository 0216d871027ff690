"""`python -m benchmarks.run`: a comparison of this program with its peers.

    python -m benchmarks.run --mnist_source=DIRECTORY_WITH_THE_IDX_FILES
    python -m benchmarks.run --rows=ps_tf1,workers --rounds=7 --mnist_source=...

Prints a Markdown table and the two commands of each row. Writes the figures as JSON after each
round. A row is a ratio: project and peer take turns, and the result is
the median of the ratios of all rounds (benchmarks/pairs.py).

The project is the real program, with TFRecord files and the hooks of the config. Its rate is over
all reports of metrics.jsonl except the first, which includes tracing. A peer (benchmarks/peers) has
its data in memory and a warm-up of the same number of steps. If a program has several processes,
each has one thread. All rows take about an hour on an idle machine.
"""

import functools
import importlib.metadata
import importlib.util
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from absl import app, flags

from benchmarks.pairs import is_met, number, rate_of, summarise, turns
from benchmarks.table import (
    MNIST_SOURCE,
    ProgramError,
    machine,
    prepare,
    train_reports,
    watched,
)
from data.system.flags import parse_flags

_ROWS = flags.DEFINE_list("rows", [], "Names of the rows to measure, in any order; all by default.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds to measure.", lower_bound=1)
_SCALE = flags.DEFINE_float(
    "scale", 1.0, "Multiplies the number of steps; 0.1 is a quick trial.", lower_bound=0
)
_OUT = flags.DEFINE_string("out", "benchmarks.json", "JSON file to write.")
_TORCH = flags.DEFINE_string(
    "torch_python", None, "A Python with PyTorch; by default this one, if it has PyTorch."
)
_TIMEOUT_SECS = flags.DEFINE_float("timeout_secs", 900.0, "A program that takes longer has failed.")

_WARMUP_STEPS = 500
_NO_TORCH = (
    "left out: they need PyTorch. Make a separate environment, `pip install torch numpy` in it, "
    "and give --torch_python=ENVIRONMENT/bin/python"
)
_WORKERS = "workers"


@dataclass(frozen=True)
class Program:
    """A program to measure. {NAMES} in `command` are paths that depend on the machine.

    Attributes:
        command: The words of the command.
        read: Returns the value from the output, the model_dir and the seconds.
        times: Factor of the value.
        repeats: Number of runs; the value is their median.
        exit_codes: Exit codes of success.
    """

    command: tuple[str, ...]
    read: Callable[[str, Path, float], float]
    times: float = 1.0
    repeats: int = 1
    exit_codes: tuple[int, ...] = (0,)

    def needs(self, place: str) -> bool:
        """Returns True if the command names `place`."""
        return any(f"{{{place}}}" in word for word in self.command)

    def __str__(self) -> str:
        """The command as a user would type it."""
        return shlex.join(word.format_map(_Shown()) for word in self.command)


class _Shown(dict[str, str]):
    def __missing__(self, place: str) -> str:
        return "python" if place in ("python", "torch_python") else place.upper()


@dataclass(frozen=True)
class Row:
    """A row of the table. `at_most`: a small ratio is good."""

    name: str
    what: str
    unit: str
    project: Program
    peer: Program
    bar: float | None = None
    at_most: bool = False

    def needs(self, place: str) -> bool:
        """Returns True if one of the two commands names `place`."""
        return self.project.needs(place) or self.peer.needs(place)


def _trainer_rate(first_step: int, output: str, model_dir: Path, secs: float) -> float:
    return rate_of(train_reports(model_dir), first_step)


def _json_value(name: str, output: str, model_dir: Path, secs: float) -> float:
    value: float = json.loads(output.splitlines()[-1])[name]
    return value


def _seconds(output: str, model_dir: Path, secs: float) -> float:
    return secs


def trainer(
    *words: str, times: float = 1.0, first_step: int = 0, prefix: Sequence[str] = ()
) -> Program:
    """The project with the flags `words`; the value is steps a second, times `times`."""
    command = (*prefix, "{python}", "-m", "trainer", *words, "--model_dir={model_dir}")
    return Program(command, functools.partial(_trainer_rate, first_step), times)


def peer(name: str, *words: str, value: str = "steps_per_sec", python: str = "python") -> Program:
    """A program of benchmarks/peers."""
    command = (f"{{{python}}}", "-m", f"benchmarks.peers.{name}", *words)
    return Program(command, functools.partial(_json_value, value))


def measured_steps(steps: int, every: int = _WARMUP_STEPS) -> int:
    """`steps` scaled; a multiple of `every`, with at least two reports."""
    scale: float = _SCALE.value
    return max(2, round(steps * scale / every)) * every


def all_rows() -> list[Row]:
    """Every row but that of `workers`."""
    mlp = ("--config=configs/mnist_replica.py", "--data_dir={mnist}")
    one_thread = "--num_threads=1"
    ring = ("--strategy=multiworker", "--workers=2", "--communication=ring", one_thread)
    ps = ("--strategy=ps", "--workers=2", one_thread)

    def train_steps(steps: int, every: int = _WARMUP_STEPS) -> str:
        return f"--train_steps={measured_steps(steps, every)}"

    def peer_words(steps: int, every: int = _WARMUP_STEPS) -> tuple[str, ...]:
        measured = measured_steps(steps, every) - every
        return "--mnist_source={mnist_source}", f"--steps={measured}", f"--warmup_steps={every}"

    # One thread, as for in_graph: a step is over before a second thread has woken up.
    mirrored = trainer(
        "--strategy=mirrored", one_thread, *mlp, "--batch_size=100", train_steps(15_000)
    )
    ps_async = trainer(*ps, *mlp, "--batch_size=100", train_steps(4000))
    ps_sync = trainer(*ps, "--sync_replicas", *mlp, "--batch_size=200", train_steps(2000))
    on_ring = (*ring, *mlp, "--batch_size=200", train_steps(5000))
    multiworker = trainer(*on_ring)
    ddp = peer("ddp", "--batch_size=200", *peer_words(5000), python="torch_python")
    cnn = ("--config=benchmarks/lenet.py", "--data_dir={mnist}", train_steps(1000, 100))
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    half = measured_steps(20_000, 1000) // 2
    hooked = ("--strategy=mirrored", one_thread, *mlp, f"--train_steps={2 * half}")
    resnet = ("--config=configs/cifar10_resnet.py", "--data_dir={cifar10}")
    rows = [
        Row(
            "mirrored_in_graph",
            "mirrored, MLP, batch 100; a loop in one graph, the limit",
            "steps/s",
            mirrored,
            peer("in_graph", "--model=mlp", one_thread, *peer_words(15_000)),
            0.95,
        ),
        Row(
            "mirrored_keras_fit",
            "mirrored, MLP, batch 100; Keras' fit, XLA, 50 steps a call",
            "steps/s",
            mirrored,
            peer("keras_fit", *peer_words(15_000)),
            1.4,
        ),
        Row(
            "ps_tf1",
            "ps, 2 workers, batch 100; TensorFlow 1",
            "steps/s",
            ps_async,
            peer("tf1_ps", *peer_words(4000)),
            2.0,
        ),
        Row(
            "ps_tf2",
            "ps, 2 workers, batch 100; TensorFlow 2's tutorial, 10 steps a closure",
            "steps/s",
            ps_async,
            peer("tf2_ps", *peer_words(4000)),
        ),
        Row(
            "ps_sync_tf1",
            "ps --sync_replicas, 2 of 2, batch 200; TensorFlow 1's SyncReplicasOptimizer, 2 x 100",
            "steps/s",
            ps_sync,
            peer("tf1_ps", "--sync_replicas", *peer_words(2000)),
            1.5,
        ),
        Row(
            "multiworker_ddp",
            "multiworker, 2 workers, ring, MLP, batch 200; PyTorch DDP, gloo",
            "steps/s",
            multiworker,
            ddp,
            1.3,
        ),
        Row(
            "multiworker_ddp_bfloat16",
            "the same with --wire_dtype=bfloat16; PyTorch DDP, gloo, float32",
            "steps/s",
            trainer(*on_ring, "--wire_dtype=bfloat16"),
            ddp,
            1.5,
        ),
        Row(
            "multiworker_tf2",
            "multiworker, 2 workers, ring, MLP, batch 200; TensorFlow 2's tutorial, loop in graph",
            "steps/s",
            multiworker,
            peer("tf2_multiworker", *peer_words(5000)),
            1.8,
        ),
        Row(
            "multiworker_cnn",
            "multiworker, 2 workers, LeNet-5, batch 200; ourselves: 2 x one process on one core, "
            "batch 100",
            "examples/s",
            trainer(*ring, *cnn, "--batch_size=200", times=200),
            trainer(
                "--strategy=mirrored",
                one_thread,
                *cnn,
                "--batch_size=100",
                times=2 * 100,
                prefix=("taskset", "--cpu-list", str(core)),
            ),
            0.95,
        ),
        *(
            Row(
                f"all_reduce_{mb}",
                f"all-reduce of {mb} MB, 2 processes; gloo's",
                "MB/s",
                Program(
                    ("{python}", "-m", "benchmarks.all_reduce", f"--mb={mb}"),
                    functools.partial(_json_value, "bytes_per_sec"),
                    1e-6,
                ),
                Program(
                    ("{torch_python}", "-m", "benchmarks.peers.ddp", f"--all_reduce_mb={mb}"),
                    functools.partial(_json_value, "bytes_per_sec"),
                    1e-6,
                ),
                1.0 if mb == 100 else None,
            )
            for mb in (1, 10, 100)
        ),
        Row(
            "hooks",
            "mirrored, MLP, the config's hooks; ourselves: none between two reports, of the "
            "middle and the end",
            "steps/s",
            trainer(*hooked, first_step=half),
            trainer(
                *hooked,
                f"--config.log_every_steps={half}",
                "--config.eval_every_steps=0",
                "--config.checkpoint_every_steps=0",
                "--config.export=False",
                first_step=half,
            ),
            0.98,
        ),
        Row(
            "help",
            "time of --help; of importing absl alone",
            "s",
            # absl ends with 1 after its help.
            Program(
                ("{python}", "-m", "trainer", "--help"), _seconds, repeats=5, exit_codes=(0, 1)
            ),
            Program(("{python}", "-c", "import absl.app, absl.flags"), _seconds, repeats=5),
            1.5,
            at_most=True,
        ),
        Row(
            "resnet20",
            "mirrored, ResNet-20, batch 128, augmented; a loop in one graph, not augmented",
            "steps/s",
            trainer(
                "--strategy=mirrored",
                *resnet,
                train_steps(60, 10),
                "--config.log_every_steps=10",
                "--config.export=False",
            ),
            peer(
                "in_graph",
                "--model=resnet20",
                "--batch_size=128",
                "--steps_per_call=2",
                *peer_words(60, 10)[1:],
            ),
        ),
    ]
    return rows


_TOPOLOGIES = (
    ("multiworker", ("--strategy=multiworker", "--communication=ring")),
    ("ps", ("--strategy=ps",)),
    ("ps --sync_replicas", ("--strategy=ps", "--sync_replicas")),
)
_WORKER_COUNTS = (1, 2, 4, 10)


def worker_programs() -> dict[tuple[str, int], Program]:
    """Programs by (strategy, number of workers); each number divides a batch of 80."""
    return {
        (strategy, count): trainer(
            *words,
            f"--workers={count}",
            "--num_threads=1",
            "--data_dir={digits}",
            "--batch_size=80",
            f"--train_steps={measured_steps(500, 100)}",
        )
        for strategy, words in _TOPOLOGIES
        for count in _WORKER_COUNTS
    }


@dataclass
class Bench:
    """Runs programs, and saves the results after each round.

    Attributes:
        places: Paths by the names in commands.
        directory: Directory for the files of the programs.
        report: Content of the JSON file.
    """

    places: dict[str, str]
    directory: Path
    report: dict[str, Any] = field(default_factory=dict)

    def prepare(self, programs: Sequence[Program]) -> None:
        """Prepares the data that `programs` read."""
        needed = {
            name
            for name in ("mnist", "digits", "cifar10")
            if any(program.needs(name) for program in programs)
        }
        for name in needed:
            source = self.places.get("mnist_source")
            if name == "cifar10":
                source = str(self.directory / "random")
                _write_random_cifar10(Path(source))
            words = () if name == "digits" else (f"--source={source}",)
            prepare(name, self.directory / name, *words)
            self.places[name] = str(self.directory / name)

    def value(self, program: Program) -> float:
        """The value of a run.

        Raises:
            ProgramError: it failed, took too long, or gave no value.
        """
        return program.times * statistics.median(
            self._value(program) for _ in range(program.repeats)
        )

    def _value(self, program: Program) -> float:
        with tempfile.TemporaryDirectory(dir=self.directory) as name:
            model_dir = Path(name, "run")
            places = {**self.places, "model_dir": str(model_dir)}
            began = time.perf_counter()
            command = [word.format_map(places) for word in program.command]
            output = watched(
                command, timeout_secs=_TIMEOUT_SECS.value, exit_codes=program.exit_codes
            )
            secs = time.perf_counter() - began
            try:
                return program.read(output, model_dir, secs)
            except (IndexError, KeyError, OSError, ValueError) as error:
                raise ProgramError(f"{program}: no value: {error!r}") from error

    def save(self) -> None:
        """Writes the JSON file, completely or not at all."""
        partial = Path(f"{_OUT.value}.partial")
        partial.write_text(json.dumps(self.report, indent=2) + "\n")
        partial.replace(_OUT.value)

    def measure_row(self, row: Row) -> str:
        """Measures all rounds of `row`; returns its row of the table."""
        measured: dict[str, Any] = {
            "name": row.name,
            "what": row.what,
            "unit": row.unit,
            "project": {"command": str(row.project), "values": []},
            "peer": {"command": str(row.peer), "values": []},
            "ratio": None,
            "bar": row.bar,
            "at_most": row.at_most,
            "error": None,
        }
        self.report["rows"].append(measured)
        projects, peers = measured["project"]["values"], measured["peer"]["values"]
        project, other = (functools.partial(self.value, side) for side in (row.project, row.peer))
        try:
            for values in turns(project, other, _ROUNDS.value):
                projects.append(values[0])
                peers.append(values[1])
                ratios = [ours / theirs for ours, theirs in zip(projects, peers, strict=True)]
                ratio = summarise(ratios)
                measured["ratio"] = vars(ratio)
                self.save()
                say(f"{row.name} {len(ratios)}/{_ROUNDS.value}: {ratios[-1]:.2f}")
        except ProgramError as error:
            measured["error"] = str(error)
            self.save()
            say(f"{row.name} failed: {error}")
            return f"| {row.name} | {row.what} | failed | | | | |"
        bar = ""
        if row.bar is not None:
            reached = is_met(ratio.median, row.bar, at_most=row.at_most)
            bar = f"{'at most ' * row.at_most}{row.bar:g}, {'' if reached else 'not '}met"
        return (
            f"| {row.name} | {row.what} | {number(projects)} | {number(peers)} | {row.unit} | "
            f"{ratio} | {bar} |"
        )

    def measure_workers(self, programs: Mapping[tuple[str, int], Program]) -> list[str]:
        """Measures all rounds of the second table; returns its rows."""
        measured: dict[tuple[str, int], dict[str, Any]] = {
            (strategy, count): {
                "strategy": strategy,
                "workers": count,
                "command": str(program),
                "steps_per_sec": [],
                "ms": None,
                "error": None,
            }
            for (strategy, count), program in programs.items()
        }
        self.report["workers"] = list(measured.values())
        for round_number in range(_ROUNDS.value):
            for key, program in programs.items():
                if measured[key]["error"]:
                    continue
                try:
                    measured[key]["steps_per_sec"].append(self.value(program))
                    times = [1000 / rate for rate in measured[key]["steps_per_sec"]]
                    measured[key]["ms"] = vars(summarise(times))
                    say(f"{_WORKERS} {round_number + 1}/{_ROUNDS.value} {key}: {times[-1]:.1f} ms")
                except ProgramError as error:
                    measured[key]["error"] = str(error)
                    say(f"{_WORKERS} {key} failed: {error}")
                self.save()
        lines = []
        for (strategy, count), row in measured.items():
            rates = row["steps_per_sec"]
            shown = "failed | "
            if not row["error"]:
                shown = f"{number(rates)} | {summarise([1000 / rate for rate in rates])}"
            lines.append(f"| `--strategy={strategy}` | {count} | {shown} |")
        return lines

    @property
    def has_failed(self) -> bool:
        """True if a program has failed."""
        return any(row["error"] for row in (*self.report["rows"], *self.report["workers"]))


def _write_random_cifar10(directory: Path) -> None:
    """Random images in files like CIFAR-10's. ResNet-20 takes the same time for random images."""
    directory.mkdir()
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]:
        labels = random.integers(0, 10, (256, 1), np.uint8)
        pixels = random.integers(0, 256, (256, 32 * 32 * 3), np.uint8)
        (directory / f"{name}.bin").write_bytes(np.hstack([labels, pixels]).tobytes())
    (directory / "batches.meta.txt").write_text("".join(f"{index}\n" for index in range(10)))


def say(line: str) -> None:
    """Prints progress to stderr; the table is on stdout."""
    print(line, file=sys.stderr, flush=True)


def _end_with(message: str) -> NoReturn:
    print(f"benchmarks.run: {message}", file=sys.stderr)
    sys.exit(2)


def _chosen(rows: Sequence[Row]) -> tuple[list[Row], bool]:
    """The rows to measure, and True if the second table is measured."""
    known = [*(row.name for row in rows), _WORKERS]
    for name in _ROWS.value:
        if name not in known:
            _end_with(f"There is no row {name!r}. --rows takes: {', '.join(known)}.")
    wanted = _ROWS.value or known
    return [row for row in rows if row.name in wanted], _WORKERS in wanted


def _find_torch() -> str | None:
    """The path of a Python with PyTorch, or None."""
    if _TORCH.value is None:
        return sys.executable if importlib.util.find_spec("torch") else None
    try:
        watched([_TORCH.value, "-c", "import numpy, torch"])
    except (OSError, ProgramError) as error:
        _end_with(f"--torch_python={_TORCH.value} cannot import torch and numpy: {error}")
    return str(_TORCH.value)


def _versions(torch: str | None) -> str:
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras")}
    if torch:
        versions["torch"] = watched([torch, "-c", "import torch; print(torch.__version__)"]).strip()
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def main(argv: Sequence[str]) -> None:
    """Prints the tables."""
    if len(argv) > 1:
        _end_with(f"Received {argv[1]!r}, which is not a flag. --help lists the flags.")
    if not Path(_OUT.value).resolve().parent.is_dir():
        _end_with(f"{_OUT.value}: there is no such directory.")
    rows, with_workers = _chosen(all_rows())
    workers = worker_programs() if with_workers else {}
    torch = _find_torch()
    if not torch and (left_out := [row.name for row in rows if row.needs("torch_python")]):
        say(f"{', '.join(left_out)}: {_NO_TORCH}.")
        rows = [row for row in rows if row.name not in left_out]
    places = {"python": sys.executable, "torch_python": torch or ""}
    if any(row.needs("mnist") or row.needs("mnist_source") for row in rows):
        if not MNIST_SOURCE.value:
            _end_with("--mnist_source is needed: the directory with the IDX files of MNIST.")
        places["mnist_source"] = str(Path(MNIST_SOURCE.value).resolve())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as directory:
        versions = _versions(torch)
        bench = Bench(places, Path(directory))
        bench.report = {
            "machine": machine(),
            "versions": versions,
            "rounds": _ROUNDS.value,
            "scale": _SCALE.value,
            "rows": [],
            "workers": [],
        }
        programs = [side for row in rows for side in (row.project, row.peer)]
        try:
            bench.prepare([*programs, *workers.values()])
        except ProgramError as error:
            _end_with(f"--mnist_source={MNIST_SOURCE.value}: {error}")
        try:
            _print_tables(bench, rows, workers)
        except KeyboardInterrupt:
            say(f"Interrupted; {_OUT.value} has the results so far.")
            sys.exit(130)
        finally:
            bench.save()
    if bench.has_failed:
        sys.exit(1)


def _print_tables(
    bench: Bench, rows: Sequence[Row], workers: Mapping[tuple[str, int], Program]
) -> None:
    print(f"{bench.report['machine']}; {bench.report['versions']}; {_ROUNDS.value} rounds:\n")
    if rows:
        print("| row | project; peer | project | peer | unit | project / peer | bar |")
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for row in rows:
            print(bench.measure_row(row), flush=True)
        print()
        for row in rows:
            print(f"* {row.name}:\n  `{row.project}`\n  `{row.peer}`")
    if workers:
        lines = bench.measure_workers(workers)
        print("\n| command | workers | steps/s | ms a step |\n| --- | --- | --- | --- |")
        print("\n".join(lines))
        print()
        for program in workers.values():
            print(f"* `{program}`")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.run"))
