"""`python -m benchmarks.network`: how much of the communication overlaps with computation.

    python -m benchmarks.network --rates=500mbit,2gbit --host_examples=1024,512
    python -m benchmarks.network --torch_python=ENVIRONMENT/bin/python --rounds=5
    python -m benchmarks.network --num_hosts=4 --slow_rate=125mbit --rates=1gbit --host_examples=64

Makes hosts on this machine: network namespaces of one core each, joined by links of the given rate.
If there are more hosts than cores, they share the cores: choose few examples then. Needs root and
the commands `ip`, `tc` and `taskset`. In turns trains the perceptron of benchmarks/deep.py, in each
of these ways:

* compute: one process on each host, which do not communicate;
* transfer: this program's ring with one example on each host;
* one_sum: this program's ring with one all-reduce after the backward pass (--bucket_mb=1000);
* program, bfloat16: this program's ring, and with --wire_dtype=bfloat16;
* local, local_overlap, local_bfloat16: this program's ring with an average every --local_steps
  steps (`config.local_steps`), with its `overlap`, and with overlap and --wire_dtype=bfloat16;
* ddp: PyTorch DDP over gloo with its default buckets, if there is a Python with PyTorch;
* ps, ps_bfloat16, ps_sync, ps_backup: this program's parameter servers, asynchronous, with
  --wire_dtype=bfloat16 and --read_dtype=bfloat16, synchronous, and with one backup worker (from 3
  hosts on);
* tf1: TensorFlow 1's asynchronous parameter servers.

Parameter servers have one host more, for the server, which may use all cores. Prints for each rate
the seconds of a step, median (least to most), as Markdown. An asynchronous step is one gradient of
one worker. The limit is the larger of two times: that of computing alone, and the time that the
bytes of a step need on the link that carries most of them, calculated. `hidden` is (compute +
transfer - step) / the smaller of compute and transfer: 1 if the whole transfer overlaps. `CPU` are
the CPU seconds of a step on the worker that takes more, kernel included. A host has one core, so no
step of the ring is shorter: if CPU is near the step, the core has no time left, and more overlap is
not possible. The load of the machine is printed, because other programs disturb a measurement.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.deep import GRADIENT_BYTES
from benchmarks.hosts import Host, hosts, reason_why_not
from benchmarks.network_run import Process, Program, RunError, Taken, measured, steps_per_sec_of
from benchmarks.pairs import summarise
from benchmarks.table import machine, prepare, write_random_mnist
from data.system.flags import parse_flags
from strategies.cluster.tf_config import Cluster, Task

_RATES = flags.DEFINE_list("rates", ["500mbit", "2gbit"], "Rates of the links, as `tc` takes them.")
_EXAMPLES = flags.DEFINE_list(
    "host_examples", ["1024", "512"], "Examples of a step on each host, for each of --rates."
)
_HOSTS = flags.DEFINE_integer("num_hosts", 2, "Hosts that train.", lower_bound=2, upper_bound=16)
_SLOW_RATE = flags.DEFINE_string(
    "slow_rate", None, "The rate of the last training host's link; by default as the others."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds to measure.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "run_steps", 16, "Steps of a run; the first 4 are warm-up.", lower_bound=8
)
_LOCAL_STEPS = flags.DEFINE_integer("local_steps", 100, "Steps from one average to the next.")
_DEVICE_SECS = flags.DEFINE_float(
    "device_secs", 0.0, "This program's steps also wait for so long, as for a device."
)
_BUCKET_MB = flags.DEFINE_float(
    "bucket_mb", None, "multiworker: its --bucket_mb; by default measured."
)
_ONLY = flags.DEFINE_list("only", [], "Measure only these ways, for example compute,program.")
_TORCH = flags.DEFINE_string(
    "torch_python", None, "A Python with PyTorch; by default this one, if it has PyTorch."
)
_TIMEOUT_SECS = flags.DEFINE_float("timeout_secs", 600.0, "A program that takes longer has failed.")

_WARMUP_STEPS = 4
NUM_TRAIN, NUM_TEST = 8192, 256
_PORT = 2222
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LOCAL = ("local", "local_overlap", "local_bfloat16")
_ROUNDS_OF_A_REPORT = 5  # Local steps are averaged in full at each report.
_PS = ("ps", "ps_bfloat16", "ps_sync", "ps_backup")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all ways of a row have in common."""

    rate: str
    examples: int
    num_hosts: int
    slow_rate: str | None = None

    def __str__(self) -> str:
        slow = f", one {self.slow_rate}" if self.slow_rate else ""
        return f"{self.rate}{slow}, {self.num_hosts} x {self.examples:,}"

    def transfer_secs(self, way: str) -> float:
        """The time that the bytes of a step need on the busiest link, in one direction.

        A ring of n sends 2 (n - 1) / n of the gradients from each host, and is as fast as its
        slowest link. A server sends all variables for each gradient: for one of an asynchronous
        step, for n of a synchronous one.
        """
        if way in _PS or way == "tf1":
            copies = {"ps_sync": self.num_hosts, "ps_backup": self.num_hosts}.get(way, 1)
            return 8 * copies * GRADIENT_BYTES / _bits_per_sec(self.rate)
        num_bytes = 2 * (self.num_hosts - 1) / self.num_hosts * GRADIENT_BYTES
        if way in _LOCAL:
            num_bytes /= _LOCAL_STEPS.value
        return 8 * num_bytes / min(map(_bits_per_sec, (self.rate, self.slow_rate or self.rate)))


def ways(num_hosts: int, torch: str | None) -> list[str]:
    """The names of all ways; `ddp` only with `torch`, a Python with PyTorch."""
    ring = ["compute", "transfer", "one_sum", "program", "bfloat16", *_LOCAL]
    return [*ring, *(["ddp"] if torch else []), *(_PS if num_hosts > 2 else _PS[:-1]), "tf1"]


def num_places(way: str, num_hosts: int) -> int:
    """The hosts that a way needs."""
    return num_hosts + (way in _PS or way == "tf1")


def program(
    way: str, setting: Setting, places: Sequence[Host], data: Path, where: Path, torch: str | None
) -> Program:
    """The processes of a way on the hosts `places`, with the files of the run in `where`."""
    num_hosts, addresses = setting.num_hosts, [f"{host.address}:{_PORT}" for host in places]
    trainer = [
        *(sys.executable, "-m", "trainer", "--config=benchmarks/deep.py", "--num_threads=1"),
        *(f"--data_dir={data}", f"--train_steps={_STEPS.value}"),
        f"--config.device_secs={_DEVICE_SECS.value}",
    ]
    measured_steps = _STEPS.value - _WARMUP_STEPS
    steps = (f"--steps={measured_steps}", f"--warmup_steps={_WARMUP_STEPS}")
    if way == "compute":
        alone_words = ["--strategy=mirrored", f"--batch_size={setting.examples}"]
        alone = [
            Process(
                (*trainer, *alone_words, f"--model_dir={where / str(rank)}"),
                core=rank,
                model_dir=where / str(rank),
            )
            for rank in range(num_hosts)
        ]
        return Program("compute alone", alone)
    if way == "ddp":
        peer = ("-m", "benchmarks.peers.ddp", "--model=deep", f"--workers={num_hosts}", *steps)
        ddp = [
            Process(
                (
                    *(str(torch), *peer, f"--batch_size={setting.examples * num_hosts}"),
                    *(f"--rank={rank}", f"--address={addresses[0]}"),
                ),
                core=rank,
            )
            for rank in range(num_hosts)
        ]
        return Program("PyTorch DDP", ddp, steps_per_sec_of)
    if way == "tf1":
        cluster = json.dumps({"ps": addresses[num_hosts:], "worker": addresses[:num_hosts]})
        peer = (sys.executable, "-m", "benchmarks.peers.tf1_ps", "--model=deep", *steps)
        tasks = [*(f"worker:{rank}" for rank in range(num_hosts)), "ps:0"]
        tf1 = [
            Process(
                (*peer, f"--batch_size={setting.examples}", f"--hosts={cluster}", f"--task={task}"),
                core=rank if rank < num_hosts else None,
            )
            for rank, task in enumerate(tasks)
        ]
        return Program("TensorFlow 1", tf1, steps_per_sec_of, ends_alone=False)
    jobs = {"worker": dict(enumerate(addresses[:num_hosts]))}
    tasks_of_trainer = [Task("worker", rank) for rank in range(num_hosts)]
    if way in _PS:
        jobs["ps"] = {0: addresses[num_hosts]}
        tasks_of_trainer.append(Task("ps", 0))
    words = _words(way, setting)
    tasks_of_cluster = [
        Process(
            (*trainer, *words, f"--model_dir={where / 'run'}"),
            env={"TF_CONFIG": Cluster(jobs, task).tf_config()},
            core=task.index if task.job == "worker" else None,
            model_dir=where / "run" if task.job == "worker" else None,
        )
        for task in tasks_of_trainer
    ]
    return Program(way, tasks_of_cluster)


def _words(way: str, setting: Setting) -> list[str]:
    """The flags with which this trainer trains in a cluster."""
    batch = setting.examples * setting.num_hosts
    if way in _PS:
        if _is_async(way):
            of_kind = [f"--batch_size={setting.examples}"]
        else:
            num_gradients = setting.num_hosts - (way == "ps_backup")
            of_kind = ["--sync_replicas", f"--batch_size={setting.examples * num_gradients}"]
        special = {
            "ps_bfloat16": ["--wire_dtype=bfloat16", "--read_dtype=bfloat16"],
            "ps_backup": [f"--replicas_to_aggregate={setting.num_hosts - 1}"],
        }
        # Workers do not wait for each other between two reports, so reports are rare.
        calls = 32 * setting.num_hosts
        long = [f"--config.{field}={calls}" for field in ("steps_per_call", "log_every_steps")]
        # A rate needs two reports.
        long.append(f"--train_steps={max(_STEPS.value, 2 * calls)}")
        return ["--strategy=ps", *long, *of_kind, *special.get(way, [])]
    words = [f"--batch_size={setting.num_hosts if way == 'transfer' else batch}"]
    if way == "one_sum":
        words.append("--bucket_mb=1000")
    elif _BUCKET_MB.value is not None:
        words.append(f"--bucket_mb={_BUCKET_MB.value:g}")
    if "bfloat16" in way:
        words.append("--wire_dtype=bfloat16")
    if way in _LOCAL:
        every = _ROUNDS_OF_A_REPORT * _LOCAL_STEPS.value
        words += [f"--config.local_steps.every={_LOCAL_STEPS.value}"]
        words += [f"--config.log_every_steps={every}", f"--train_steps={2 * every}"]
        words += ["--config.local_steps.overlap"] if way != "local" else []
    return ["--strategy=multiworker", *words]


def _is_async(way: str) -> bool:
    return way in ("ps", "ps_bfloat16", "tf1")


def rows(setting: Setting, taken: Mapping[str, Sequence[Taken]]) -> Iterator[str]:
    """The rows of the table for one setting; `taken` are the measured steps by way."""
    secs = {way: [step.secs for step in steps] for way, steps in taken.items()}
    median = {way: summarise(values).median for way, values in secs.items() if values}
    for way, values in secs.items():
        shown = str(summarise(values)) if values else "failed"
        limit = of_limit = hidden = ""
        if {way, "compute"} <= median.keys() and way not in ("compute", "transfer"):
            # An asynchronous step is one gradient, and all workers compute at the same time.
            compute = median["compute"] / (setting.num_hosts if _is_async(way) else 1)
            on_link = setting.transfer_secs(way)
            is_ring = not (way in _PS or way == "tf1")
            transfer = median.get("transfer", on_link) if is_ring else on_link
            limit = f"{max(compute, on_link):.2f}"
            of_limit = f"{median[way] / max(compute, on_link):.2f}"
            if "bfloat16" not in way:
                share = (compute + transfer - median[way]) / min(compute, transfer)
                hidden = f"{share:.2f}"
        cpu = [step.cpu_secs for step in taken[way] if not math.isnan(step.cpu_secs)]
        shown_cpu = f"{statistics.median(cpu):.2f}" if cpu else ""
        cells = (str(setting), way, shown, shown_cpu, limit, of_limit, hidden)
        yield f"| {' | '.join(cells)} |"


def _bits_per_sec(rate: str) -> float:
    number = rate.rstrip("abcdefghijklmnopqrstuvwxyz")
    return float(number) * _BITS[rate.removeprefix(number)]


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
            f"--rates has {len(_RATES.value)} values and --host_examples {len(_EXAMPLES.value)}. "
            "Give as many, for example --rates=500mbit,2gbit --host_examples=1024,512."
        )
    for flag, rate in [("rates", rate) for rate in _RATES.value] + [
        ("slow_rate", rate) for rate in [_SLOW_RATE.value] if rate
    ]:
        try:
            _bits_per_sec(rate)
        except (KeyError, ValueError):
            _end_with(f"--{flag}={rate}: type a number and kbit, mbit or gbit, such as 500mbit.")
    for number in _EXAMPLES.value:
        if not number.isdecimal() or int(number) < 1:
            _end_with(
                f"--host_examples={number}: type whole numbers above 0, for example 1024,512."
            )
    names = ways(_HOSTS.value, "torch")
    for name in _ONLY.value:
        if name not in names:
            _end_with(
                f"--only={name}: with --num_hosts={_HOSTS.value} it takes {', '.join(names)}."
            )
    if why := reason_why_not():
        _end_with(f"{why}. It is needed to make hosts on this machine.")


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    _check()
    # An exception, so that processes are ended and hosts removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch, has_failed = _find_torch(), False
    chosen = [way for way in ways(_HOSTS.value, torch) if not _ONLY.value or way in _ONLY.value]
    if not torch:
        print("DDP is left out: it needs PyTorch. Give --torch_python.", file=sys.stderr)
    print(f"{machine()}, {GRADIENT_BYTES / 1e6:.0f} MB of gradients:\n")
    print("| link, examples | way | s a step | CPU | limit | of the limit | hidden |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_random_mnist(directory / "random", NUM_TRAIN, NUM_TEST)
        prepare("mnist", directory / "mnist", f"--source={directory / 'random'}")
        for rate, examples in zip(_RATES.value, map(int, _EXAMPLES.value), strict=True):
            setting = Setting(rate, examples, _HOSTS.value, _SLOW_RATE.value)
            taken: dict[str, list[Taken]] = {way: [] for way in chosen}
            for number in range(_ROUNDS.value):
                for way in chosen:
                    where = directory / f"{rate}-{number}-{way}"
                    where.mkdir()
                    turn = f"{rate} {number + 1}/{_ROUNDS.value} {way}"
                    try:
                        step = _measured(way, setting, directory / "mnist", where, torch)
                    except (RunError, ValueError) as error:
                        print(f"{turn} failed: {error}", file=sys.stderr, flush=True)
                        has_failed = True
                        continue
                    taken[way].append(step)
                    load = f"load {os.getloadavg()[0]:.1f}"
                    said = f"{turn}: {step.secs:.3f} s, CPU {step.cpu_secs:.3f} s, {load}"
                    print(said, file=sys.stderr, flush=True)
            for row in rows(setting, taken):
                print(row, flush=True)
    if has_failed:
        sys.exit(1)


def _measured(way: str, setting: Setting, data: Path, where: Path, torch: str | None) -> Taken:
    # New hosts for each run: a port of a former run may still be in use.
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(hosts(num_places(way, setting.num_hosts)))
        for rank, host in enumerate(places):
            is_last = rank == setting.num_hosts - 1
            host.limit_rate((setting.slow_rate if is_last else None) or setting.rate)
        made = program(way, setting, places, data, where, torch)
        return measured(made, places, where, timeout_secs=_TIMEOUT_SECS.value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.network"))
