"""Runs `python -m trainer` in separate processes, as users do; under topologies by name.

    run = train("ps-2+1", model_dir, "--train_steps=100")
    assert run.exit_code == 0
    run.result["step"], run.metrics("eval"), run.variables()

After every run the tests check that no process outlives it and that its ports are free again.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import trainer
from data.prepare.preparing import prepare
from strategies.cluster.ports import bind
from strategies.cluster.tf_config import Cluster, Task
from trainer.embeddings.saved import table_values

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = Path(__file__).resolve().parent / "configs"
# Shorter than pytest's limit, which ends the complete session.
TIMEOUT_SECS = 100.0
# The kernel kills what a process leaves behind when it ends, and needs a moment for it.
KILL_SECS = 5.0

NUM_NUMBERED = 800

_MARK = "TRAINER_TEST_PROCESS"


class Topology(str):
    """The name of one way to run the program: its flags, and the tasks of its local cluster.

    mirrored-2, multiworker-2, ps-2+1 (two workers and one ps), ps-sync-3+1.
    """

    def __new__(cls, name: str) -> Self:
        if not re.fullmatch(r"(mirrored|multiworker)-\d+|ps(-sync)?-\d+\+\d+", name):
            known = "mirrored-2, multiworker-2, ps-2+1 or ps-sync-3+1"
            raise ValueError(f"Need a topology such as {known}. Received: {name!r}.")
        return super().__new__(cls, name)

    @property
    def strategy(self) -> str:
        return self.partition("-")[0]

    @property
    def argv(self) -> tuple[str, ...]:
        """Each process has one thread, so that speeds depend less on the number of cores."""
        kind = "replicas" if self.strategy == "mirrored" else "workers"
        number, *num_ps = re.findall(r"\d+", self)
        sync = ["--sync_replicas"] if "-sync-" in self else []
        sizes = (f"--{kind}={number}", *(f"--ps={n}" for n in num_ps))
        return (f"--strategy={self.strategy}", *sizes, *sync, "--num_threads=1")

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks' logs."""
        number, *num_ps = map(int, re.findall(r"\d+", self))
        workers = tuple(f"worker-{index}" for index in range(number))
        if self.strategy == "ps":
            return ("chief-0", *workers, *(f"ps-{index}" for index in range(*num_ps)))
        return workers if self.strategy == "multiworker" else ()


ONE_OF_EACH_STRATEGY = [Topology(name) for name in ("mirrored-2", "multiworker-2", "ps-2+1")]


def topologies(*names: str, nightly: Sequence[str] = ()) -> list[Any]:
    """Parameters of a test: topologies by name, of which the nightly tests try all."""
    others = [pytest.param(Topology(name), marks=pytest.mark.nightly) for name in nightly]
    return [*map(Topology, names), *others]


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: its exit code, its output, and the files in its directory."""

    exit_code: int
    stdout: str
    stderr: str
    model_dir: Path

    @property
    def config(self) -> dict[str, Any]:
        return _read_json(self.model_dir / "config.json")

    @property
    def result(self) -> dict[str, Any]:
        return _read_json(self.model_dir / "result.json")

    def metrics(self, split: str) -> list[dict[str, Any]]:
        return [line for line in read_metrics(self.model_dir) if line["split"] == split]

    def steps(self, split: str) -> list[int]:
        """The steps of the reports."""
        return [line["step"] for line in self.metrics(split)]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.model_dir / "checkpoints").iterdir())

    def variables(self, checkpoint: str = "") -> dict[str, npt.NDArray[Any]]:
        """All values of a checkpoint, by TensorFlow's names; the newest step by default."""
        directory = str(self._checkpoint(checkpoint))
        reader = tf.train.load_checkpoint(f"{directory}/variables")
        tables = table_values(directory)
        return {
            key: reader.get_tensor(key)
            for key in reader.get_variable_to_shape_map()
            if key != "_CHECKPOINTABLE_OBJECT_GRAPH"
        } | {f"model/tables/{key}": value for key, value in tables.items()}

    def mark(self, checkpoint: str = "") -> dict[str, Any]:
        """The checkpoint.json of a checkpoint; of the newest step by default."""
        return _read_json(self._checkpoint(checkpoint) / "checkpoint.json")

    def weights(self, checkpoint: str = "") -> dict[str, npt.NDArray[Any]]:
        """The model's variables; the optimizer's list has the trainable ones."""
        ours = ("model/", "optimizer/_trainable_variables/")
        variables = self.variables(checkpoint)
        return {key: value for key, value in variables.items() if key.startswith(ours)}

    def _checkpoint(self, name: str) -> Path:
        name = name or max(n for n in self.checkpoints() if n.startswith("step-"))
        return self.model_dir / "checkpoints" / name


TrainOnce = Callable[..., Run]  # The fixture `train_once`.


class Process:
    """A running `python -m trainer`; leaving the context kills its remaining processes."""

    def __init__(
        self,
        argv: tuple[str, ...],
        model_dir: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        under: Sequence[str] = (),
        module: str = "trainer",
    ) -> None:
        """`under` is a command that executes the module in its place, such as setpriv."""
        self.model_dir = model_dir
        self._mark = uuid.uuid4().hex
        here = {_MARK: self._mark} | ({} if cwd == ROOT else {"PYTHONPATH": str(ROOT)})
        with contextlib.ExitStack() as files:
            # Appended to, because reading would move the place where the process writes.
            self._stdout = files.enter_context(tempfile.TemporaryFile("a+b"))
            self._stderr = files.enter_context(tempfile.TemporaryFile("a+b"))
            self.popen = subprocess.Popen(
                [*under, sys.executable, "-m", module, *argv],
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                stderr=self._stderr,
                env={**os.environ, **here, **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )
            self._files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._files.close()

    def family(self) -> list[psutil.Process]:
        """This process and all its descendants, even if their parents have ended."""
        return processes_where(lambda process: process.environ().get(_MARK) == self._mark)

    def log(self, task: str) -> str:
        """The log of a task, such as `worker 1`, of the local cluster of this process."""
        path = self.model_dir / "tasks" / f"{task.replace(' ', '-')}.log"
        return path.read_text() if path.exists() else ""

    def starts(self, task: str) -> list[int]:
        """The process ids of a task, in the order of its starts."""
        found = re.findall(r"^=== .*, process (\d+), ", self.log(task), re.MULTILINE)
        return [int(pid) for pid in found]

    def task(self, name: str) -> psutil.Process:
        """The newest process of a task."""
        return psutil.Process(self.starts(name)[-1])

    def resumes(self, task: str) -> list[int]:
        """The steps from which a task has resumed."""
        return steps_in(self.log(task), "resuming from step STEP")

    def wait_for_resume(self, task: str, number: int = 1) -> int:
        """Returns the step from which a task has resumed for the `number`-th time."""
        self.wait_until(lambda: len(self.resumes(task)) >= number, f"resume {number} of {task}")
        return self.resumes(task)[number - 1]

    def wait_for_family_to_end(self, timeout_secs: float = TIMEOUT_SECS) -> None:
        """Returns when all descendants of this process have ended; fails at the time limit."""
        deadline = time.monotonic() + timeout_secs
        while family := self.family():
            assert time.monotonic() < deadline, f"processes outlived the run: {family}"
            time.sleep(0.01)

    def send(self, signum: signal.Signals) -> None:
        self.popen.send_signal(signum)

    def output(self) -> str:
        """The last lines of both streams, for messages."""
        out, err = (_read(file).splitlines()[-40:] for file in (self._stdout, self._stderr))
        return "\n".join(["--- stdout", *out, "--- stderr", *err])

    def warned(self, text: str) -> int:
        """How often `text` occurs in standard error so far."""
        return _read(self._stderr).count(text)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Returns when `condition` holds; fails if the process ends first, or at the time limit."""
        deadline = time.monotonic() + TIMEOUT_SECS
        while not condition():
            assert self.popen.poll() is None, f"ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.output()}"
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        """Returns once metrics.jsonl has a report of `step` or later."""
        self.wait_until(lambda: last_step(self.model_dir) >= step, f"step {step} in metrics.jsonl")

    def wait_for_more_steps(self, number: int) -> None:
        self.wait_for_step(last_step(self.model_dir) + number)

    def kill_task(self, name: str, after_step: int) -> dict[str, Any]:
        """Kills a task after a report of `after_step`; returns the last report after the kill."""
        self.wait_for_step(after_step)
        self.task(name).kill()
        return read_metrics(self.model_dir)[-1]

    def wait(self, timeout_secs: float = TIMEOUT_SECS, *, exit_code: int = 0) -> Run:
        """Waits for the end with `exit_code`; checks that no process and no open port is left."""
        run = self.wait_alone(timeout_secs)
        assert run.exit_code == exit_code, self.output()
        self.wait_for_family_to_end(KILL_SECS)
        assert_nothing_left(self.model_dir)
        return run

    def wait_alone(self, timeout_secs: float = TIMEOUT_SECS) -> Run:
        """Waits for the end of this process; other tasks of its cluster may still run."""
        try:
            exit_code = self.popen.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runs after {timeout_secs} s:\n{self.output()}") from None
        return Run(exit_code, _read(self._stdout), _read(self._stderr), self.model_dir)


@functools.cache
def digits() -> Path:
    """scikit-learn's digits as TFRecords, which tests must not change."""
    directory = Path(tempfile.mkdtemp(prefix="digits-"))
    atexit.register(shutil.rmtree, directory)
    prepare("digits", str(directory / "digits"))
    return directory / "digits"


def with_data(flags: Sequence[str]) -> tuple[str, ...]:
    """`flags`; the data are the digits unless a flag names others."""
    names_data = any(flag.startswith("--data_dir=") for flag in flags)
    return tuple(flags) if names_data else (f"--data_dir={digits()}", *flags)


def start(
    topology: str, model_dir: Path, *flags: str, data: bool = True, **options: Any
) -> Process:
    """Starts `topology` with `flags`. Later flags take precedence; `options` are of Process.

    Without `data` no --data_dir is added.
    """
    given = with_data(flags) if data else flags
    argv = (*Topology(topology).argv, f"--model_dir={model_dir}", *given)
    return Process(argv, model_dir, **options)


def train(
    topology: str,
    model_dir: Path,
    *flags: str,
    exit_code: int = 0,
    timeout_secs: float = TIMEOUT_SECS,
    **options: Any,
) -> Run:
    """Runs `topology` with `flags` to its end, which must be with `exit_code`."""
    with start(topology, model_dir, *flags, **options) as process:
        return process.wait(timeout_secs, exit_code=exit_code)


def run(argv: Sequence[str], model_dir: Path, *, exit_code: int = 0, **options: Any) -> Run:
    """Runs `python -m trainer ARGV` to its end, which must be with `exit_code`."""
    with Process(tuple(argv), model_dir, **options) as process:
        return process.wait(exit_code=exit_code)


def run_together(
    processes: Iterable[Process], *, exit_code: int = 0, timeout_secs: float = TIMEOUT_SECS
) -> list[Run]:
    """Runs the processes of a cluster, which must end with `exit_code`.

    A generator is best: if it fails, the processes that it has started are ended.
    """
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(process) for process in processes]
        runs = [process.wait_alone(timeout_secs) for process in started]
        for process, run in zip(started, runs, strict=True):
            assert run.exit_code == exit_code, process.output()
        return runs


def train_here(config: str, model_dir: Path, **arguments: object) -> Run:
    """Trains one replica in this process: seconds less than a process that imports TensorFlow."""
    given: dict[str, Any] = {"data_dir": digits(), **arguments}
    result = trainer.train(config, model_dir=model_dir, **given)
    return Run(result.exit_code or 0, "", "", model_dir)


@contextlib.contextmanager
def by_hand(
    cluster: Cluster,
    model_dir: Path,
    *flags: str,
    under: Mapping[Task, tuple[str, ...]] | None = None,
    data: bool = True,
) -> Iterator["Tasks"]:
    """A cluster whose tasks the test starts one by one; leaving the context ends them.

    `under` has, for some tasks, a command that executes the trainer in its place. Without `data`
    no --data_dir is added.
    """
    given = with_data(flags) if data else flags
    with contextlib.ExitStack() as stack:
        tasks = Tasks(cluster, model_dir, given, under or {}, stack)
        yield tasks
        assert not any(process.family() for process in tasks.processes), "a process is left"
    assert_nothing_left(model_dir)
    for task in cluster.trainers:
        assert_port_is_free(int(cluster.address_of(task).rpartition(":")[2]))


class Tasks:
    """Tasks of a cluster that a test starts one by one; `tasks["worker 1"]` is a process."""

    def __init__(
        self,
        cluster: Cluster,
        model_dir: Path,
        flags: tuple[str, ...],
        under: Mapping[Task, tuple[str, ...]],
        stack: contextlib.ExitStack,
    ) -> None:
        strategy = "ps" if cluster.num("ps") else "multiworker"
        self._flags = (f"--strategy={strategy}", f"--model_dir={model_dir}", *flags)
        self._cluster = cluster
        self._model_dir = model_dir
        self._under = under
        self._stack = stack
        self._latest: dict[str, Process] = {}
        self.processes: list[Process] = []

    def __getitem__(self, task: str) -> Process:
        return self._latest[task]

    def start(self, *tasks: Task, flags: tuple[str, ...] = ()) -> None:
        """Starts `tasks`, also tasks that have ended before."""
        for task in tasks:
            env = {"TF_CONFIG": self._cluster.for_task(task).tf_config()}
            under = self._under.get(task, ())
            process = Process((*self._flags, *flags), self._model_dir, env=env, under=under)
            self._latest[str(task)] = self._stack.enter_context(process)
            self.processes.append(process)

    def start_all(self) -> None:
        self.start(*self._cluster.tasks())

    def wait(self, *exit_codes: int) -> dict[str, Run]:
        """Waits for the last start of each task, which must end with one of `exit_codes` (0)."""
        runs = {name: process.wait_alone() for name, process in self._latest.items()}
        for name, run in runs.items():
            output = self._latest[name].output()
            assert run.exit_code in (exit_codes or (0,)), f"{name}: {run.exit_code}\n{output}"
        return runs


def assert_one_error(run: Run, *parts: str) -> None:
    """The run ended with exit code 2 and one message, which has all `parts`; no traceback."""
    assert run.exit_code == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert len(re.findall("^error: ", run.stderr, re.MULTILINE)) == 1, run.stderr
    message = run.stderr.partition("error: ")[2]
    assert [part for part in parts if part not in message] == [], message


def assert_refused(argv: Sequence[str], model_dir: Path, *parts: str, **options: Any) -> Run:
    """`python -m trainer ARGV` ends with exit code 2 and one message, which has all `parts`."""
    refused = run(argv, model_dir, exit_code=2, **options)
    assert_one_error(refused, *parts)
    return refused


def assert_nothing_left(model_dir: Path) -> None:
    """No process names `model_dir`, and the ports of its cluster can be listened on."""
    others = processes_where(lambda process: str(model_dir) in " ".join(process.cmdline()))
    assert [p for p in others if p.pid != os.getpid()] == []
    config = model_dir / "config.json"
    cluster = _read_json(config)["cluster"] if config.exists() else None
    for address in _addresses(cluster["cluster"]) if cluster else []:
        assert_port_is_free(int(address.rpartition(":")[2]))


def assert_port_is_free(port: int) -> None:
    """Nothing listens at `port`, except perhaps a test in another pytest worker."""
    deadline = time.monotonic() + 2.0  # The listener may change between two checks.
    while True:
        try:
            bind(port).close()
        except OSError:
            if _others_listen(port):
                return
            assert time.monotonic() < deadline, f"port {port} is still listened on"
            time.sleep(0.05)
        else:
            return


def _others_listen(port: int) -> bool:
    """Returns True if another pytest worker, or one of its descendants, listens at `port`.

    Another test may get the ports of a cluster as soon as that cluster has ended.
    """
    pids = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    ours = _pytest_worker(os.environ)
    if ours is None:
        return False
    others = processes_where(
        lambda process: (
            _pytest_worker(process.environ()) not in (None, ours)
            # A pytest worker sets its name itself, so `environ` of psutil does not have it.
            or (process.ppid() == os.getppid() and process.pid != os.getpid())
        )
    )
    return bool(pids) and pids <= {process.pid for process in others}


def _pytest_worker(env: Mapping[str, str]) -> str | None:
    """The worker and the run of pytest-xdist; None without it."""
    worker = env.get("PYTEST_XDIST_WORKER")
    return worker and f"{worker} {env.get('PYTEST_XDIST_TESTRUNUID')}"


def read_metrics(model_dir: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl so far."""
    return lines_so_far(model_dir / "metrics.jsonl")


def last_step(model_dir: Path) -> int:
    """The highest step in metrics.jsonl; 0 before the first report."""
    return max((int(line["step"]) for line in read_metrics(model_dir)), default=0)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file, which must exist."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def lines_so_far(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that a process may not have made yet."""
    return json_lines(path) if path.exists() else []


def steps_in(text: str, message: str) -> list[int]:
    """The numbers in place of STEP in each such message, which is a regular expression."""
    found = re.findall(message.replace("STEP", r"([\d,]+)"), text)
    return [int(step.replace(",", "")) for step in found]


def events(directory: Path, plugin: str) -> Iterator[tuple[int, Any]]:
    """The steps and values of a plugin in TensorBoard's files of `directory`."""
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == plugin:
                    yield event.step, value


def histograms(model_dir: Path) -> dict[str, list[int]]:
    """Steps of each histogram in TensorBoard's files of training."""
    found: dict[str, list[int]] = {}
    for step, value in events(model_dir / "tensorboard" / "train", "histograms"):
        found.setdefault(value.tag, []).append(step)
    return found


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Time of change and contents of each file under `directory`, without locks."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def largest_difference(
    left: Mapping[str, npt.NDArray[Any]], right: Mapping[str, npt.NDArray[Any]]
) -> float:
    assert left.keys() == right.keys()
    # NumPy's max is NaN if one value is; Python's passes over it.
    return float(np.max([np.max(np.abs(left[key] - right[key])) for key in left]))


def assert_same_bits(left: Run, right: Run) -> None:
    """The newest checkpoints of both have the same values, with the optimizer's, bit for bit."""
    ours, theirs = left.variables(), right.variables()
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if ours[key].tobytes() != theirs[key].tobytes()] == []


def _addresses(cluster: Mapping[str, list[str] | dict[str, str]]) -> list[str]:
    listed = [job if isinstance(job, list) else list(job.values()) for job in cluster.values()]
    return [address for job in listed for address in job]


def processes_where(condition: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        # Processes of other users, ended processes and zombies do not count.
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and condition(process):
                found.append(process)
    return found


def _read(file: Any) -> str:
    file.seek(0)
    text: bytes = file.read()
    return text.decode(errors="replace")


def _read_json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document
