"""Runs a supervisor whose tasks are small programs: real processes, signals and pipes."""

import contextlib
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from strategies.cluster.tf_config import Cluster, Task, local_cluster
from trainer.local.deaths import Restarts
from trainer.local.launch_report import LaunchReport
from trainer.local.network_namespace import IsolationError, Namespace, open_namespace
from trainer.local.policy import FixedPolicy
from trainer.local.supervisor import Supervisor
from trainer.local.task_process import TaskStarter

ROOT = Path(__file__).parents[2]
# The head of every stand-in program: its task, functions to note events, and the parent watch of
# real tasks.
PREAMBLE = f"""
import json, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from trainer.guards.parent_watch import watch_parent
watch_parent()
config = json.loads(os.environ["TF_CONFIG"])
job, index = config["task"]["type"], config["task"]["index"]
model_dir = Path(sys.argv[-1].removeprefix("--model_dir="))
def note(word):
    part = model_dir / f"{{word}}-{{job}}-{{index}}.part"
    part.write_text(str(os.getpid()))
    part.rename(part.with_suffix(""))
def await_note(name):
    while not (model_dir / name).exists():
        time.sleep(0.01)
def await_end(name):
    await_note(name)
    while Path("/proc/" + (model_dir / name).read_text()).exists():
        time.sleep(0.01)
def save_and_end(signum, frame):
    note("saved")
    sys.exit(75)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def ignore(signum):
    signal.signal(signum, lambda *_: note("asked"))
    note("running")
    while True:
        time.sleep(60)
# How many times this task has started, including this one.
with open(model_dir / f"starts-{{job}}-{{index}}", "a+") as starts:
    starts.write(".")
    starts.seek(0)
    start = len(starts.read())
"""
KILLED = -signal.SIGKILL
WAIT_SECS = 20.0
WORKERS, WORKER = local_cluster("multiworker", 2, 0), local_cluster("multiworker", 1, 0)
PS, SMALL_PS = local_cluster("ps", 2, 1), local_cluster("ps", 1, 1)


def starter(model_dir: Path, body: str, namespace: Namespace | None = None) -> TaskStarter:
    path = model_dir / "program.py"
    path.write_text(PREAMBLE + textwrap.dedent(body))
    argv, command = ["--flag=1", f"--model_dir={model_dir}"], [sys.executable, str(path)]
    return TaskStarter(argv, command=command, namespace=namespace)


def namespace_or_skip() -> Namespace:
    try:
        return open_namespace()
    except IsolationError as error:
        pytest.skip(f"no network namespace here: {error}")


def no_progress(max_restarts: int) -> Restarts:
    return Restarts(max_restarts, lambda: (0, 0))


def run(
    model_dir: Path,
    cluster: Cluster,
    body: str,
    max_restarts: int = 0,
    restarts: Restarts | None = None,
    namespace: Namespace | None = None,
    grace_secs: float = 5.0,
    stall_timeout_secs: float = 0.0,
) -> LaunchReport:
    """Runs `cluster`, each task with `body`, and asserts that no process outlives it."""
    before = children()
    report = Supervisor(
        FixedPolicy(cluster, cluster.tasks()),
        starter(model_dir, body, namespace),
        model_dir,
        restarts or no_progress(max_restarts),
        grace_secs=grace_secs,
        stall_timeout_secs=stall_timeout_secs,
    ).run()
    num_starts = len(cluster.tasks()) + sum(len(restart.tasks) for restart in report.restarts)
    assert len(report.tasks) == num_starts
    assert not any(psutil.pid_exists(end.pid) for end in report.tasks)
    assert not children() - before
    return report


def children() -> set[psutil.Process]:
    """The processes below this one. Another test may have left the tracker of `multiprocessing`."""
    return set(psutil.Process().children(recursive=True))


def run_host(
    model_dir: Path, index: int, body: str, max_restarts: int, *, chief_on: str = ""
) -> LaunchReport:
    """Runs worker `index` of the hosts host-a and host-b, under ps if a host has the chief."""
    task = Task("worker", index)
    jobs = {"worker": {0: "host-a:2222", 1: "host-b:2222"}}
    if chief_on:
        jobs |= {"chief": {0: f"{chief_on}:2222"}, "ps": {0: f"{chief_on}:2223"}}
    policy = FixedPolicy(Cluster(jobs, task), [task])
    host, restarts = f"host-{'ab'[index]}", no_progress(max_restarts)
    program = starter(model_dir, body)
    return Supervisor(policy, program, model_dir, restarts, host=host, grace_secs=5.0).run()


def wait_for(condition: Callable[[], bool], secs: float = WAIT_SECS) -> None:
    deadline = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def notes(model_dir: Path, word: str) -> dict[str, int]:
    """The tasks that noted `word`, with their process ids."""
    paths = [path for path in model_dir.glob(f"{word}-*") if path.suffix != ".part"]
    return {path.name.removeprefix(f"{word}-"): int(path.read_text()) for path in paths}


def is_gone(pid: int) -> bool:
    """True if the process has ended. It may stay a zombie if no process reaps orphans."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def by_task(report: LaunchReport) -> dict[str, int]:
    return {str(end.task): end.exit_code for end in report.tasks}


def causes(report: LaunchReport) -> list[tuple[str, int, int]]:
    """For each restart: the task that died, its exit code, and the number of restarted tasks."""
    return [(str(r.cause.task), r.cause.exit_code, len(r.tasks)) for r in report.restarts]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextlib.contextmanager
def when_noted(model_dir: Path, word: str, count: int, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` in a thread when `count` tasks have noted `word`; asserts that it was called."""

    def watch() -> None:
        wait_for(lambda: len(notes(model_dir, word)) >= count)
        act()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        yield
        watching.result()


def stop(signum: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), signum)
