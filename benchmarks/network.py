"""`python -m benchmarks.network`: how much of the all-reduce overlaps with the backward pass.

    python -m benchmarks.network --rates=500mbit,2gbit --examples=2048,512
    python -m benchmarks.network --torch_python=ENVIRONMENT/bin/python --rounds=5

Makes two hosts of one core each on this machine: network namespaces, joined by a link of the given
rate. Needs root and the commands `ip`, `tc` and `taskset`. In turns trains the perceptron of
benchmarks/deep.py, in each of these ways:

* compute alone: one process on each host, which do not communicate;
* transfer alone: this program with one example on each host;
* one sum: this program with one all-reduce after the backward pass (--bucket_mb=1000);
* this program, and with --wire_dtype=bfloat16;
* PyTorch DDP over gloo with its default buckets, if there is a Python with PyTorch.

Prints for each rate the seconds of a step, median (least to most), as Markdown. The limit is the
larger of compute alone and of the time that the gradients need on the link, calculated. `hidden` is
(compute + transfer - step) / the smaller of compute and transfer: 1 if the whole transfer overlaps.
`CPU` are the CPU seconds of a step on the host that takes more, kernel included. A host has one
core, so no step is shorter: if CPU is near the step, the core has no time left, and more overlap
is not possible. The load of the machine is printed, because other programs disturb a measurement.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
from absl import app, flags

from benchmarks.deep import GRADIENT_BYTES
from benchmarks.hosts import Host, hosts, reason_why_not
from benchmarks.pairs import rate_of, summarise
from benchmarks.table import machine, prepare, train_reports
from data.system.flags import parse_flags
from strategies.cluster.tf_config import Cluster, Task

_RATES = flags.DEFINE_list("rates", ["500mbit", "2gbit"], "Rates of the link, as `tc` takes them.")
_EXAMPLES = flags.DEFINE_list(
    "examples", ["2048", "512"], "Examples of a step on each host, for each of --rates."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds to measure.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "run_steps", 16, "Steps of a run; the first 4 are warm-up.", lower_bound=8
)
_BUCKET_MB = flags.DEFINE_float(
    "bucket_mb", None, "multiworker: its --bucket_mb; by default measured."
)
_ONLY = flags.DEFINE_list("only", [], "Measure only these ways, for example compute,program.")
_TORCH = flags.DEFINE_string(
    "torch_python", None, "A Python with PyTorch; by default this one, if it has PyTorch."
)
_TIMEOUT_SECS = flags.DEFINE_float("timeout_secs", 600.0, "A program that takes longer has failed.")

_ROOT = Path(__file__).resolve().parents[1]
_WARMUP_STEPS = 4
_NUM_HOSTS = 2
_LOOK_SECS = 0.05
_NUM_EXAMPLES = 8192
_PORT = 2222
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclasses.dataclass(frozen=True)
class Taken:
    """The mean step of a run; both in seconds. CPU is NaN where it is not known."""

    secs: float
    cpu_secs: float


class RunError(RuntimeError):
    """A measured program failed."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train. The command has the words {examples}, {batch}, {rank} and so on."""

    name: str
    what: str
    command: tuple[str, ...]
    is_cluster: bool = True


def ways(torch: str | None) -> list[Way]:
    """All ways; DDP only with `torch`, a Python with PyTorch."""
    trainer = (
        sys.executable,
        *("-m", "trainer", "--config=benchmarks/deep.py", "--num_threads=1", "--data_dir={data}"),
        *("--model_dir={model_dir}", f"--train_steps={_STEPS.value}"),
    )
    workers = (*trainer, "--strategy=multiworker", "--batch_size={batch}")
    alone = (*trainer, "--strategy=mirrored", "--batch_size={examples}")
    buckets = () if _BUCKET_MB.value is None else (f"--bucket_mb={_BUCKET_MB.value:g}",)
    found = [
        Way("compute", "compute alone", alone, is_cluster=False),
        Way("transfer", "transfer alone", (*workers, *buckets, f"--batch_size={_NUM_HOSTS}")),
        Way("one_sum", "this program, one sum", (*workers, "--bucket_mb=1000")),
        Way("program", "this program", (*workers, *buckets)),
        Way("bfloat16", "this program, bfloat16", (*workers, *buckets, "--wire_dtype=bfloat16")),
    ]
    if torch:
        ddp = ("-m", "benchmarks.peers.ddp", "--model=deep", "--batch_size={batch}")
        steps = (f"--steps={_STEPS.value - _WARMUP_STEPS}", f"--warmup_steps={_WARMUP_STEPS}")
        found.append(
            Way("ddp", "PyTorch DDP", (torch, *ddp, *steps, "--rank={rank}", "--address={address}"))
        )
    return found


def transfer_secs(rate: str) -> float:
    """The time of all gradients on a link: a ring of two sends each byte once in each direction."""
    number = rate.rstrip("abcdefghijklmnopqrstuvwxyz")
    num_bytes = 2 * (_NUM_HOSTS - 1) / _NUM_HOSTS * GRADIENT_BYTES
    return 8 * num_bytes / (float(number) * _BITS[rate.removeprefix(number)])


def measure_step(way: Way, places: Sequence[Host], examples: int, data: Path, where: Path) -> Taken:
    """Trains in this way, with the files of the run in `where`.

    Raises:
        RunError: a process failed, or took too long.
    """
    cores = sorted(os.sched_getaffinity(0))
    jobs = {"worker": {i: f"{host.address}:{_PORT}" for i, host in enumerate(places)}}
    processes = []
    try:
        for rank, host in enumerate(places):
            # The workers of a cluster share a model_dir.
            model_dir = where if way.is_cluster else where / str(rank)
            words = {
                "examples": examples,
                "batch": examples * _NUM_HOSTS,
                "data": data,
                "model_dir": model_dir,
                "rank": rank,
                "address": f"{places[0].address}:{_PORT}",
            }
            env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "GLOO_SOCKET_IFNAME": "eth0"}
            if way.is_cluster:
                env["TF_CONFIG"] = Cluster(jobs, Task("worker", rank)).tf_config()
            command = [word.format_map(words) for word in way.command]
            prefix = (*host.command, "taskset", "--cpu-list", str(cores[rank]))
            with (where.parent / f"{where.name}-{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [*prefix, *command], cwd=_ROOT, env=env, stdout=log, stderr=log
                    )
                )
        # Of a cluster, worker 0 writes the reports.
        model_dirs = [where if way.is_cluster else where / str(rank) for rank in range(_NUM_HOSTS)]
        meters = list(map(_CpuMeter, processes, model_dirs))
        deadline = time.monotonic() + _TIMEOUT_SECS.value
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                raise RunError(f"{way.what} took more than {_TIMEOUT_SECS.value:.0f} s")
            for meter in meters:
                meter.look()
            time.sleep(_LOOK_SECS)
        for rank, process in enumerate(processes):
            if process.returncode:
                log_text = (where.parent / f"{where.name}-{rank}.log").read_text()
                raise RunError(f"{way.what}, host {rank}: {log_text[-2000:]}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if way.name == "ddp":
        output = (where.parent / f"{where.name}-0.log").read_text()
        return Taken(1 / json.loads(output.splitlines()[-1])["steps_per_sec"], math.nan)
    # Alone, the slower host: the others would wait for it.
    secs = max(1 / rate_of(train_reports(model_dir)) for model_dir in model_dirs)
    return Taken(secs, max(meter.secs_per_step() for meter in meters))


class _CpuMeter:
    """The CPU time of a process between the first and the last report that are seen."""

    def __init__(self, process: subprocess.Popen[bytes], model_dir: Path) -> None:
        self._process, self._model_dir = process, model_dir
        self._seen: list[tuple[int, float]] = []  # A step that was reported, CPU seconds.

    def look(self) -> None:
        """Must be called often: the time between a report and this call counts as a step's."""
        reports = train_reports(self._model_dir)
        if not reports or (self._seen and reports[-1]["step"] == self._seen[-1][0]):
            return
        with contextlib.suppress(psutil.Error):  # It has ended meanwhile.
            times = psutil.Process(self._process.pid).cpu_times()
            self._seen.append((reports[-1]["step"], times.user + times.system))

    def secs_per_step(self) -> float:
        """NaN if fewer than two reports were seen."""
        if len(self._seen) < 2:
            return math.nan
        (first, before), *_, (last, after) = self._seen
        return (after - before) / (last - first)


def write_random_mnist(directory: Path) -> None:
    """Random images in files like MNIST's: a dense model takes the same time for them."""
    directory.mkdir()
    random = np.random.default_rng(0)
    for name, number in (("train", _NUM_EXAMPLES), ("t10k", 256)):
        images = random.integers(0, 256, (number, 28, 28), np.uint8).tobytes()
        labels = random.integers(0, 10, number, np.uint8).tobytes()
        header = struct.pack(">4i", 2051, number, 28, 28)
        (directory / f"{name}-images-idx3-ubyte").write_bytes(header + images)
        (directory / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 2049, number) + labels
        )


def rows(rate: str, examples: int, taken: Mapping[str, Sequence[Taken]]) -> Iterator[str]:
    """The rows of the table for one rate; `taken` are the measured steps by way."""
    secs = {name: [step.secs for step in steps] for name, steps in taken.items()}
    median = {name: summarise(values).median for name, values in secs.items() if values}
    on_link = transfer_secs(rate)
    limit = max(median.get("compute", math.nan), on_link)
    for name, values in secs.items():
        shown = str(summarise(values)) if values else "failed"
        of_limit = hidden = ""
        if name in ("one_sum", "program", "ddp") and {name, "compute"} <= median.keys():
            compute, transfer = median["compute"], median.get("transfer", on_link)
            share = (compute + transfer - median[name]) / min(compute, transfer)
            of_limit, hidden = f"{median[name] / limit:.2f}", f"{share:.2f}"
        cpu = [step.cpu_secs for step in taken[name] if not math.isnan(step.cpu_secs)]
        shown_cpu = f"{statistics.median(cpu):.2f}" if cpu else ""
        where = f"{rate}, {_NUM_HOSTS} x {examples:,}"
        cells = (where, name, shown, shown_cpu, f"{limit:.2f}", of_limit, hidden)
        yield f"| {' | '.join(cells)} |"


def _find_torch() -> str | None:
    if _TORCH.value is None:
        return sys.executable if importlib.util.find_spec("torch") else None
    check = [_TORCH.value, "-c", "import numpy, torch"]
    try:
        subprocess.run(check, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        _end_with(f"--torch_python={_TORCH.value} cannot import torch and numpy.")
    return str(_TORCH.value)


def _end_with(message: str) -> None:
    print(f"benchmarks.network: {message}", file=sys.stderr)
    sys.exit(2)


def _check() -> None:
    if len(_RATES.value) != len(_EXAMPLES.value):
        _end_with(
            f"--rates has {len(_RATES.value)} values and --examples {len(_EXAMPLES.value)}. Give "
            "as many examples as rates, for example --rates=500mbit,2gbit --examples=2048,512."
        )
    for rate in _RATES.value:
        try:
            transfer_secs(rate)
        except (KeyError, ValueError):
            _end_with(f"--rates={rate}: type a number and kbit, mbit or gbit, for example 500mbit.")
    for number in _EXAMPLES.value:
        if not number.isdecimal() or int(number) < 1:
            _end_with(f"--examples={number}: type whole numbers above 0, for example 2048,512.")
    names = [way.name for way in ways("torch")]
    for name in _ONLY.value:
        if name not in names:
            _end_with(f"--only={name}: it takes {', '.join(names)}.")
    if why := reason_why_not():
        _end_with(f"{why}. It is needed to make hosts on this machine.")
    if len(os.sched_getaffinity(0)) < _NUM_HOSTS:
        _end_with(f"{_NUM_HOSTS} hosts of one core each need {_NUM_HOSTS} cores.")


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    _check()
    # An exception, so that processes are ended and hosts removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch, has_failed = _find_torch(), False
    chosen = [way for way in ways(torch) if not _ONLY.value or way.name in _ONLY.value]
    if not torch:
        print("DDP is left out: it needs PyTorch. Give --torch_python.", file=sys.stderr)
    print(f"{machine()}, {GRADIENT_BYTES / 1e6:.0f} MB of gradients:\n")
    print("| link, examples | way | s a step | CPU | limit | of the limit | hidden |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_random_mnist(directory / "random")
        prepare("mnist", directory / "mnist", f"--source={directory / 'random'}")
        for rate, examples in zip(_RATES.value, map(int, _EXAMPLES.value), strict=True):
            taken: dict[str, list[Taken]] = {way.name: [] for way in chosen}
            for number in range(_ROUNDS.value):
                for way in chosen:
                    where = directory / f"{rate}-{number}-{way.name}"
                    where.mkdir()
                    # New hosts for each run: a port of a former run may still be in use.
                    with hosts(_NUM_HOSTS) as places:
                        for host in places:
                            host.limit_rate(rate)
                        try:
                            step = measure_step(way, places, examples, directory / "mnist", where)
                        except (RunError, ValueError) as error:
                            print(f"{way.name} failed: {error}", file=sys.stderr, flush=True)
                            has_failed = True
                            continue
                    taken[way.name].append(step)
                    turn = f"{rate} {number + 1}/{_ROUNDS.value} {way.name}"
                    load = f"load {os.getloadavg()[0]:.1f}"
                    said = f"{turn}: {step.secs:.3f} s, CPU {step.cpu_secs:.3f} s, {load}"
                    print(said, file=sys.stderr, flush=True)
            for row in rows(rate, examples, taken):
                print(row, flush=True)
    if has_failed:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.network"))
