"""One run of a program on hosts with slow links, for benchmarks/network.py.

    with hosts(3) as places:
        step = measured(program, places, where, timeout_secs=600)   # seconds, CPU seconds

Each process of the program has a host. The processes of workers have one core each, or share the
cores if there are more of them. A process that does not train, a parameter server, may use all.
"""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.hosts import Host
from benchmarks.pairs import rate_of
from benchmarks.table import train_reports

_ROOT = Path(__file__).resolve().parents[1]
_LOOK_SECS = 0.05
_CLOSING_SECS = 60.0


@dataclasses.dataclass(frozen=True)
class Taken:
    """The mean step of a run; both in seconds. CPU is NaN where it is not known."""

    secs: float
    cpu_secs: float


class RunError(RuntimeError):
    """A measured program failed."""


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of a program.

    Attributes:
        core: The index of its core; None for all cores.
        model_dir: Where a process of this trainer writes its reports; None if it writes none.
    """

    command: Sequence[str]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    core: int | None = None
    model_dir: Path | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """The processes of a run, one for each host, in the order of the hosts.

    Attributes:
        rate_in_output: Returns steps/s from the output of process 0; None if reports have them.
        ends_alone: False if process 0 ends and the others are to be ended.
    """

    name: str
    processes: Sequence[Process]
    rate_in_output: Callable[[str], float] | None = None
    ends_alone: bool = True


def steps_per_sec_of(output: str) -> float:
    """The rate in the JSON line at the end of a peer's output."""
    return float(json.loads(output.splitlines()[-1])["steps_per_sec"])


def measured(
    program: Program, places: Sequence[Host], where: Path, *, timeout_secs: float
) -> Taken:
    """Runs the program on the hosts `places`, with logs in `where`; returns its mean step.

    Raises:
        RunError: a process failed, or the program took longer than `timeout_secs`.
    """
    running: list[subprocess.Popen[bytes]] = []
    logs = [where / f"{rank}.log" for rank in range(len(program.processes))]
    cores = sorted(os.sched_getaffinity(0))
    try:
        for process, host, path in zip(program.processes, places, logs, strict=True):
            own = cores if process.core is None else [cores[process.core % len(cores)]]
            pinned = ("taskset", "--cpu-list", ",".join(map(str, own)))
            env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "GLOO_SOCKET_IFNAME": "eth0"}
            with path.open("w") as log:
                command = [*host.command, *pinned, *process.command]
                started = subprocess.Popen(
                    command, cwd=_ROOT, env={**env, **process.env}, stdout=log, stderr=log
                )
            running.append(started)
        meters = [
            CpuMeter(started, process.model_dir)
            for started, process in zip(running, program.processes, strict=True)
            if process.model_dir
        ]
        _wait(program, running, meters, timeout_secs)
        for rank, started in enumerate(running):
            if started.returncode:
                raise RunError(f"{program.name}, host {rank}: {logs[rank].read_text()[-2000:]}")
    finally:
        for started in running:
            started.kill()
            started.wait()
    if program.rate_in_output:
        return Taken(1 / program.rate_in_output(logs[0].read_text()), math.nan)
    # Processes that do not communicate have a directory each, and a cluster would wait for the
    # slowest process.
    model_dirs = {process.model_dir for process in program.processes if process.model_dir}
    secs = max(1 / rate_of(train_reports(model_dir)) for model_dir in model_dirs)
    return Taken(secs, max(meter.secs_per_step() for meter in meters))


def _wait(
    program: Program,
    running: Sequence[subprocess.Popen[bytes]],
    meters: Sequence["CpuMeter"],
    timeout_secs: float,
) -> None:
    deadline = time.monotonic() + timeout_secs
    while running[0].poll() is None:
        if time.monotonic() > deadline:
            raise RunError(f"{program.name} took more than {timeout_secs:.0f} s")
        if any(started.returncode for started in running if started.poll() is not None):
            return
        for meter in meters:
            meter.look()
        time.sleep(_LOOK_SECS)
    for started in running if program.ends_alone else ():
        try:
            started.wait(_CLOSING_SECS)
        except subprocess.TimeoutExpired:
            raise RunError(f"{program.name}: a process did not end") from None


class CpuMeter:
    """The CPU time of a process, with its children, between the first and the last report seen."""

    def __init__(self, process: subprocess.Popen[bytes], model_dir: Path) -> None:
        """`process` trains; the reports in `model_dir` say how far it is."""
        self._process, self._model_dir = process, model_dir
        self._seen: list[tuple[int, float]] = []  # A step that was reported, CPU seconds.

    def look(self) -> None:
        """Must be called often: the time between a report and this call counts as a step's."""
        reports = train_reports(self._model_dir)
        if not reports or (self._seen and reports[-1]["step"] == self._seen[-1][0]):
            return
        with contextlib.suppress(psutil.Error):  # It has ended meanwhile.
            first = psutil.Process(self._process.pid)
            times = [each.cpu_times() for each in (first, *first.children(recursive=True))]
            cpu_secs = sum(each.user + each.system for each in times)
            self._seen.append((reports[-1]["step"], cpu_secs))

    def secs_per_step(self) -> float:
        """NaN if fewer than two reports were seen."""
        if len(self._seen) < 2:
            return math.nan
        (first, before), *_, (last, after) = self._seen
        return (after - before) / (last - first)
