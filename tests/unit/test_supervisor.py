"""The supervisor with small stand-in programs: real processes, signals and pipes, no TensorFlow.

What follows from an end, a restart or a change of the group has its rows in the tests of deaths,
restarts and the elastic policy.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from strategies.cluster.tf_config import Cluster, Task, local_cluster
from trainer.local.deaths import TaskEnd
from trainer.local.launch_report import LaunchReport
from trainer.local.network_namespace import IsolationError, Namespace, open_namespace
from trainer.local.policy import FixedPolicy
from trainer.local.restarts import Restarts
from trainer.local.supervisor import Supervisor
from trainer.local.task_process import TaskStarter

# The head of every stand-in program: its task, functions to note events, and the parent watch of
# real tasks.
PREAMBLE = """
import json, os, signal, sys, time
from pathlib import Path
from trainer.guards.parent_watch import watch_parent
watch_parent()
config = json.loads(os.environ["TF_CONFIG"])
job, index = config["task"]["type"], config["task"]["index"]
model_dir = Path(sys.argv[-1].removeprefix("--model_dir="))
def note(word):
    part = model_dir / f"{word}-{job}-{index}.part"
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
with open(model_dir / f"starts-{job}-{index}", "a+") as starts:
    starts.write(".")
    starts.seek(0)
    start = len(starts.read())
"""
KILLED = -signal.SIGKILL
WAIT_SECS = 20.0
WORKERS, WORKER = local_cluster("multiworker", 2, 0), local_cluster("multiworker", 1, 0)
PS = local_cluster("ps", 2, 1)
SMALL_PS = local_cluster("ps", 1, 1)
# run(cluster, body, **options) runs tasks with the body after the preamble.
Run: TypeAlias = Callable[..., LaunchReport]


def no_progress(max_restarts: int) -> Restarts:
    return Restarts(max_restarts, lambda: (0, 0))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Writes a stand-in program and returns the command that runs it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def write(body: str) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(PREAMBLE + textwrap.dedent(body))
        return [sys.executable, str(path)]

    return write


@pytest.fixture
def run(tmp_path: Path, write: Callable[[str], list[str]]) -> Run:
    """Runs a cluster here, and asserts that no process outlives it."""

    def run(
        cluster: Cluster,
        body: str,
        max_restarts: int = 0,
        restarts: Restarts | None = None,
        namespace: Namespace | None = None,
        grace_secs: float = 5.0,
        stall_timeout_secs: float = 0.0,
    ) -> LaunchReport:
        argv = ["--flag=1", f"--model_dir={tmp_path}"]
        report = Supervisor(
            FixedPolicy(cluster.by_task()),
            TaskStarter(argv, command=write(body), namespace=namespace),
            tmp_path,
            restarts or no_progress(max_restarts),
            grace_secs=grace_secs,
            stall_timeout_secs=stall_timeout_secs,
        ).run()
        num_starts = len(cluster.tasks()) + sum(len(restart.tasks) for restart in report.restarts)
        assert len(report.tasks) == num_starts
        assert not any(psutil.pid_exists(end.pid) for end in report.tasks)
        assert not psutil.Process().children(recursive=True)
        return report

    return run


@pytest.fixture
def run_host(tmp_path: Path, write: Callable[[str], list[str]]) -> Run:
    """Runs one task of a cluster of two hosts."""

    def run(index: int, body: str, max_restarts: int) -> LaunchReport:
        jobs = {"worker": {0: "host-a:2222", 1: "host-b:2222"}}
        cluster = Cluster(jobs, Task("worker", index))
        starter = TaskStarter([f"--model_dir={tmp_path}"], command=write(body))
        restarts, host = no_progress(max_restarts), f"host-{'ab'[index]}"
        policy = FixedPolicy({cluster.task: cluster})
        return Supervisor(policy, starter, tmp_path, restarts, host=host, grace_secs=5.0).run()

    return run


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECS
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
    acted = threading.Event()

    def watch() -> None:
        wait_for(lambda: len(notes(model_dir, word)) >= count)
        act()
        acted.set()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert acted.is_set()


def stop(signum: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), signum)


def test_all_tasks_end_with_zero_and_so_does_the_cluster(
    tmp_path: Path, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    report = run(
        PS,
        """
        note(os.environ["TF_CONFIG"].replace("/", "|"))
        print("hello from", job, index, sys.argv[1:-1], os.getcwd())
        """,
    )
    assert report.exit_code == 0
    assert report.first_failure is None
    assert by_task(report) == {"chief 0": 0, "worker 0": 0, "worker 1": 0, "ps 0": 0}
    hello = f"['--flag=1'] {os.getcwd()}\n"
    logs = {path.name: path.read_text() for path in (tmp_path / "tasks").iterdir()}
    assert logs.keys() == {f"{task.job}-{task.index}.log" for task in PS.tasks()}
    for end in report.tasks:
        mark, line = logs[f"{end.task.job}-{end.task.index}.log"].splitlines()
        assert mark.startswith(f"=== {end.task}, start 1, process {end.pid}, ")
        assert f"{line}\n" == f"hello from {end.task} {hello}"
        config = PS.for_task(end.task).tf_config()
        assert (tmp_path / f"{config}-{end.task.job}-{end.task.index}").exists()
    assert capfd.readouterr() == (f"hello from chief 0 {hello}", "")


def test_log_has_every_byte_of_each_run_and_the_output_no_line_about_lost_workers(
    tmp_path: Path, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "E0000 00:00:1 13525 context.cc:873] Failed to register function remotely due to failed",
        "Additional GRPC error information from remote target /job:worker/replica:0/task:1 while",
        ':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}',
        "This could happen if the remote target has been disconnected from the client.",
        "E0000 00:00:1 13525 base_collective_executor.cc:1] BaseCollectiveExecutor::StartAbort "
        "UNAVAILABLE: Socket closed",
        "E0000 00:00:1 13525 other.cc:1] Out of memory",
        "ERROR Worker /job:worker/replica:0/task:1 failed with UnavailableError():Socket closed",
    ]
    body = f"""
        print(*{lines!r}, sep="\\n", flush=True)
        sys.stdout.buffer.write(b"\\xff no line end")
    """
    run(WORKER, body)
    assert capfd.readouterr().out.splitlines()[:-1] == lines[5:]
    run(WORKER, body)
    log = (tmp_path / "tasks" / "worker-0.log").read_bytes().splitlines()
    written = [*(line.encode() for line in lines), b"\xff no line end"]
    for begin in (0, len(log) // 2):
        mark, *found = log[begin : begin + len(log) // 2]
        assert mark.startswith(b"=== worker 0, start 1")
        assert found == written


def test_bad_usage_of_one_task_stops_the_others_at_once_and_is_the_exit_code(run: Run) -> None:
    began = time.monotonic()
    report = run(
        PS,
        """
        note("running")
        if job == "worker" and index == 1:
            await_note("running-chief-0")
            sys.exit(2)
        time.sleep(60)
        """,
    )
    assert report.exit_code == 2
    assert report.first_failure is not None
    assert report.first_failure.task == Task("worker", 1)
    assert time.monotonic() - began < 5


def test_failure_that_ends_the_run_has_the_trainer_save_then_ends_it_and_the_servers(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._PEER_LOST_SECS", 0.1)
    monkeypatch.setattr("trainer.local.supervisor._SERVERS_ALONE_SECS", 0.1)
    report = run(
        SMALL_PS,
        """
        note("running")
        if job == "chief":
            signal.signal(signal.SIGTERM, lambda *_: note("asked"))
            await_note("running-ps-0")
            os.kill(int((model_dir / "running-ps-0").read_text()), signal.SIGKILL)
        while True:
            time.sleep(60)
        """,
        grace_secs=0.5,
    )
    assert set(notes(tmp_path, "asked")) == {"chief-0"}
    assert by_task(report) == {"chief 0": KILLED, "ps 0": KILLED, "worker 0": -signal.SIGTERM}
    assert report.first_failure is not None
    assert report.first_failure.task == Task("ps", 0)
    assert report.exit_code == 75


def test_task_still_running_after_the_chief_is_done_is_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._SHUTDOWN_GRACE_SECS", 0.2)
    report = run(
        SMALL_PS,
        """
        note("running")
        if job == "chief":
            await_note("running-ps-0")
        if job == "ps":
            time.sleep(60)
        """,
    )
    assert by_task(report) == {"chief 0": 0, "worker 0": 0, "ps 0": -signal.SIGTERM}
    assert report.first_failure is not None
    assert report.first_failure.task == Task("ps", 0)
    assert "after chief 0 was done" in report.first_failure.failure
    assert report.exit_code == 1


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[Namespace | None]:
    """None, or with "isolated" a network namespace if this machine allows one."""
    if not request.param:
        yield None
        return
    try:
        namespace = open_namespace()
    except IsolationError as error:
        pytest.skip(f"no network namespace here: {error}")
    with namespace:
        yield namespace


@pytest.mark.parametrize(
    ("signum", "namespace"),
    [(signal.SIGINT, ""), (signal.SIGTERM, "isolated"), (signal.SIGTERM, ""), (signal.SIGHUP, "")],
    indirect=["namespace"],
)
def test_signal_makes_every_worker_save_and_end(
    signum: signal.Signals, namespace: Namespace | None, tmp_path: Path, run: Run
) -> None:
    # These tests may run under nohup, which ignores SIGHUP.
    former = signal.signal(signum, signal.default_int_handler)
    body = """
        signal.signal(signal.SIGTERM, save_and_end)
        note("running")
        time.sleep(60)
    """
    try:
        with when_noted(tmp_path, "running", 2, partial(stop, signum)):
            report = run(WORKERS, body, namespace=namespace)
        assert signal.getsignal(signum) is signal.default_int_handler
    finally:
        signal.signal(signum, former)
    assert set(notes(tmp_path, "saved")) == {"worker-0", "worker-1"}
    assert by_task(report) == {"worker 0": 75, "worker 1": 75}
    assert report.exit_code == 75


def test_signal_under_ps_asks_only_the_chief_which_ends_the_servers(
    tmp_path: Path, run: Run
) -> None:
    body = """
        signal.signal(signal.SIGTERM, save_and_end)
        note("running")
        if job == "chief":
            time.sleep(60)
        await_note("saved-chief-0")
    """
    with when_noted(tmp_path, "running", 4, stop):
        report = run(PS, body)
    assert set(notes(tmp_path, "saved")) == {"chief-0"}
    assert by_task(report) == {"chief 0": 75, "worker 0": 0, "worker 1": 0, "ps 0": 0}
    assert report.exit_code == 75


def test_task_that_ignores_the_signal_is_killed_after_grace_secs_and_named(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._LATE_SECS", 0.1)
    with when_noted(tmp_path, "running", 1, stop):
        report = run(WORKER, "ignore(signal.SIGTERM)", grace_secs=0.5)
    assert set(notes(tmp_path, "asked")) == {"worker-0"}
    assert by_task(report) == {"worker 0": KILLED}
    assert report.first_failure is not None
    assert "0.5 s" in report.first_failure.failure
    assert report.exit_code == 75


def test_second_signal_kills_at_once(tmp_path: Path, run: Run) -> None:
    def stop_again() -> None:
        time.sleep(0.6)  # A signal within 0.5 s of the first is its repetition.
        stop(signal.SIGINT)

    with (
        when_noted(tmp_path, "running", 2, partial(stop, signal.SIGINT)),
        when_noted(tmp_path, "asked", 2, stop_again),
    ):
        report = run(WORKERS, "ignore(signal.SIGTERM)", grace_secs=600)
    assert by_task(report) == {"worker 0": KILLED, "worker 1": KILLED}
    assert report.exit_code == 75


def test_children_of_a_task_do_not_outlive_it(tmp_path: Path, run: Run) -> None:
    report = run(
        WORKER,
        """
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        (model_dir / "child").write_text(str(child.pid))
        die()
        """,
    )
    assert report.exit_code == 75
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: is_gone(child))


LAUNCHER = """
import sys
from strategies.cluster.tf_config import local_cluster
from trainer.local.network_namespace import Namespace
from trainer.local.policy import FixedPolicy
from trainer.local.restarts import Restarts
from trainer.local.supervisor import Supervisor
from trainer.local.task_process import TaskStarter
directory, fds, *command = sys.argv[1:]
namespace = Namespace(map(int, fds.split(','))) if fds else None
policy = FixedPolicy(local_cluster('ps', 2, 1).by_task())
starter = TaskStarter([f'--model_dir={directory}'], command=command, namespace=namespace)
Supervisor(policy, starter, directory, Restarts(0, lambda: (0, 0))).run()
"""


@pytest.mark.parametrize("namespace", ["", "isolated"], indirect=True)
def test_killed_launcher_leaves_no_orphan(
    namespace: Namespace | None, tmp_path: Path, write: Callable[[str], list[str]]
) -> None:
    fds = namespace.fds if namespace else ()
    command = [*write("ignore(signal.SIGTERM)")]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), ",".join(map(str, fds)), *command],
        pass_fds=fds,
    )
    try:
        wait_for(lambda: len(notes(tmp_path, "running")) == 4)
        assert not any(map(is_gone, notes(tmp_path, "running").values()))
        launcher.kill()
        launcher.wait()
        wait_for(lambda: all(map(is_gone, notes(tmp_path, "running").values())))
    finally:
        launcher.kill()
        launcher.wait()
        for pid in notes(tmp_path, "running").values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_program_that_cannot_be_started_leaves_nothing(tmp_path: Path) -> None:
    starter = TaskStarter([], command=[str(tmp_path / "missing")])
    with pytest.raises(FileNotFoundError):
        Supervisor(FixedPolicy(WORKERS.by_task()), starter, tmp_path, no_progress(0)).run()
    assert not psutil.Process().children(recursive=True)


def test_ps_worker_is_restarted_alone_at_its_address(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.restarts._FIRST_DELAY_SECS", 0.1)
    report = run(
        PS,
        """
        note(f"running-{start}-{config['cluster'][job][index]}")
        if (job, index) == ("worker", 0):
            if start == 1:
                die()
            if start == 2:
                sys.exit(75)
            note("again")
        await_note("again-worker-0")
        """,
        max_restarts=2,
    )
    assert causes(report) == [("worker 0", KILLED, 1), ("worker 0", 75, 1)]
    assert report.exit_code == 0
    others = len(PS.tasks()) - 1
    assert sorted(p.read_text() for p in tmp_path.glob("starts-*")) == [*["."] * others, "..."]
    address = PS.address_of(Task("worker", 0))
    assert {f"running-{n}-{address}-worker-0" for n in (1, 2, 3)} <= set(os.listdir(tmp_path))
    assert (tmp_path / "tasks" / "worker-0.log").read_text().count("=== worker 0, start") == 3


def test_servers_stay_when_another_server_is_killed_until_that_brings_no_progress(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the variables. If that brings no progress, all tasks are restarted."""
    monkeypatch.setattr("trainer.local.restarts._FIRST_DELAY_SECS", 0.1)
    cluster = local_cluster("ps", 2, 2)
    report = run(
        cluster,
        """
        note(f"running-{start}")
        if (job, index) == ("ps", 0) and start < 3:
            for task in ("chief-0", "worker-0", "worker-1", "ps-0", "ps-1"):
                await_note("running-1-" + task)
            await_note(f"running-{start}-chief-0")
            die()
        if job == "chief" and start < 3:
            time.sleep(60)
        if job == "chief":
            note("done")
        await_note("done-chief-0")
        """,
        max_restarts=2,
    )
    all_tasks = len(cluster.tasks())
    assert causes(report) == [("ps 0", KILLED, 2), ("ps 0", KILLED, all_tasks)]
    assert report.exit_code == 0
    lines = lines_of(tmp_path / "tasks" / "restarts.jsonl")
    started_again = [set(line["started_again"]) for line in lines]
    assert started_again == [{"chief 0", "ps 0"}, set(map(str, cluster.tasks()))]
    assert len(notes(tmp_path, "running-3")) == 2
    assert len(notes(tmp_path, "running-2")) == all_tasks


def test_workers_that_are_left_save_before_all_are_restarted(tmp_path: Path, run: Run) -> None:
    """Worker 0 saves in response to SIGUSR1; worker 2, which hangs, is killed after the grace."""
    cluster = local_cluster("multiworker", 3, 0)
    report = run(
        cluster,
        """
        print("start", start)
        if start > 1:
            sys.exit(0)
        if index == 0:
            signal.signal(signal.SIGUSR1, save_and_end)
        if index == 2:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        note("running")
        for other in (0, 2):
            await_note(f"running-worker-{other}")
        if index == 1:
            die()
        time.sleep(60)
        """,
        max_restarts=1,
        grace_secs=1.0,
    )
    assert set(notes(tmp_path, "saved")) == {"worker-0"}
    first_ends = {str(end.task): end for end in report.tasks[:3]}
    codes = {name: end.exit_code for name, end in first_ends.items()}
    assert codes == {"worker 0": 75, "worker 1": KILLED, "worker 2": KILLED}
    assert first_ends["worker 0"].failure == first_ends["worker 2"].failure == ""
    assert causes(report) == [("worker 1", KILLED, 3)]
    assert report.exit_code == 0
    assert report.first_failure is not None
    assert report.first_failure.survived
    (written,) = lines_of(tmp_path / "tasks" / "restarts.jsonl")
    assert (written["task"], written["exit_code"]) == ("worker 1", KILLED)
    assert written["started_again"] == list(map(str, cluster.tasks()))
    assert written["last_lines"] == ["start 1"]


def test_tasks_that_end_themselves_after_a_peer_are_not_killed(tmp_path: Path, run: Run) -> None:
    """After a SIGTERM to one of them, all save, and exit with 75 one after another."""
    report = run(
        WORKERS,
        """
        if start > 1:
            sys.exit(0)
        note("running")
        if index == 0:
            await_note("running-worker-1")
            sys.exit(75)
        await_end("running-worker-0")
        time.sleep(0.5)
        note("saved")
        sys.exit(75)
        """,
        max_restarts=1,
    )
    assert set(notes(tmp_path, "saved")) == {"worker-1"}
    assert [end.exit_code for end in report.tasks] == [75, 75, 0, 0]
    assert causes(report) == [("worker 0", 75, 2)]
    assert report.exit_code == 0


def test_servers_that_the_chief_ends_with_75_cause_no_separate_restart(run: Run) -> None:
    """After a SIGTERM to one of them, the chief saves, has the servers end, and ends."""
    report = run(
        PS,
        """
        if start > 1:
            sys.exit(0)
        note("running")
        if job == "chief":
            servers = ["running-worker-0", "running-worker-1", "running-ps-0"]
            for name in servers:
                await_note(name)
            note("end")
            for name in servers:
                await_end(name)
            time.sleep(0.2)
        await_note("end-chief-0")
        sys.exit(75)
        """,
        max_restarts=1,
    )
    (restart,) = report.restarts
    assert len(restart.tasks) == 4
    assert [end.exit_code for end in report.tasks] == [75] * 4 + [0] * 4
    assert report.exit_code == 0


def test_servers_that_die_or_are_restarted_when_the_chief_is_done_do_not_fail_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._SERVERS_ALONE_SECS", 0.5)
    report = run(
        SMALL_PS,
        """
        note(f"running-{start}")
        if job == "chief":
            await_note("running-1-ps-0")
            await_note("running-2-worker-0")
        elif job == "worker":
            if start == 1:
                die()
            time.sleep(60)
        else:
            await_end("running-1-chief-0")
            die()
        """,
        max_restarts=1,
    )
    assert causes(report) == [("worker 0", KILLED, 1)]
    assert by_task(report) == {"chief 0": 0, "ps 0": KILLED, "worker 0": KILLED}
    assert report.tasks[-1].task == Task("worker", 0)
    assert report.tasks[-1].failure == ""
    assert report.exit_code == 0


def test_unresponsive_task_is_killed_and_restarted(run: Run) -> None:
    report = run(
        SMALL_PS,
        """
        if job == "worker":
            if start == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            note("again")
        await_note("again-worker-0")
        """,
        max_restarts=1,
        stall_timeout_secs=6.0,
    )
    assert causes(report) == [("worker 0", KILLED, 1)]
    assert "unresponsive" in report.restarts[0].cause.failure
    assert report.exit_code == 0


def test_crash_loop_ends_and_names_the_task_and_its_signal(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._PEER_LOST_SECS", 0.1)
    began = time.monotonic()
    report = run(
        WORKERS,
        """
        if index == 1:
            print("start", start, "fails")
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)
        """,
        max_restarts=2,
    )
    assert time.monotonic() - began >= 1, "there was no delay before the second restart"
    assert causes(report) == [("worker 1", -signal.SIGSEGV, 2)] * 2
    assert report.exit_code == 75
    assert report.first_failure is not None
    assert not report.first_failure.survived
    error = capfd.readouterr().err
    assert "2 restarts within 10 minutes (--max_restarts)" in error
    assert "[worker 1] start 3 fails" in error
    assert error.count("restarted all tasks") == 2


def test_signal_while_a_restart_is_awaited_ends_the_run_at_once(run: Run) -> None:
    class Later(Restarts):
        def next_delay_secs(self, end: TaskEnd, *, counts: bool = True) -> float | None:
            threading.Timer(0.5, stop).start()
            return 60.0

    began = time.monotonic()
    report = run(WORKER, "die()", restarts=Later(1, lambda: (0, 0)))
    assert 0.5 <= time.monotonic() - began < 30
    assert report.restarts == ()
    assert report.exit_code == 75


def test_launcher_of_a_host_restarts_its_task_and_tells_the_other_hosts(
    tmp_path: Path, run_host: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
        print("start", start, flush=True)
        if start == 1:
            die()
        if start == 2:
            sys.exit(75)  # Another task was lost.
    """
    report = run_host(1, body, max_restarts=2)
    assert [end.exit_code for end in report.tasks] == [KILLED, 75, 0]
    assert {str(end.task) for end in report.tasks} == {"worker 1"}
    assert report.exit_code == 0
    output, errors = capfd.readouterr()
    assert "[host-b] start 1\n" in output
    assert "Restarting worker 1 now." in errors
    assert "Restarting worker 1 in 1 s." in errors
    # A lost task is not the cause.
    (failure,) = lines_of(tmp_path / "failures.jsonl")
    assert (failure["host"], failure["task"], failure["exit_code"]) == ("host-b", "worker 1", -9)
    assert failure["last_lines"] == ["start 1"]
    assert not failure["ends_run"]


def test_error_that_a_restart_does_not_repair_ends_the_launchers_of_all_hosts(
    tmp_path: Path,
    run_host: Run,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._PEER_LOST_SECS", 0.5)
    monkeypatch.setattr("trainer.local.supervisor._FOLLOW_SECS", 0.2)
    path = tmp_path / "failures.jsonl"
    assert run_host(1, "print('the reason'); sys.exit(1)", max_restarts=3).exit_code == 1
    lines = path.read_text()
    assert [line["ends_run"] for line in lines_of(path)] == [True]

    # What is there at the start is of an earlier run.
    assert run_host(0, "", max_restarts=3).exit_code == 0
    capfd.readouterr()

    body = """
        signal.signal(signal.SIGTERM, save_and_end)
        note("running")
        time.sleep(60)
    """

    def write_again() -> None:
        earlier = {**json.loads(lines), "ends_run": False, "last_lines": ["no reason"]}
        path.write_text(lines + json.dumps(earlier) + "\n" + lines)

    with when_noted(tmp_path, "running", 1, write_again):
        began = time.monotonic()
        report = run_host(0, body, max_restarts=3)
    assert report.exit_code == 75
    assert time.monotonic() - began < WAIT_SECS + 5
    assert notes(tmp_path, "saved")
    errors = capfd.readouterr().err
    assert "[worker 1 on host-b] no reason" in errors, "the chief's host shows all failures"
    assert "[worker 1 on host-b] the reason" in errors
