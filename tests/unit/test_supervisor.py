"""The supervisor with small stand-in programs: real processes, signals and pipes, no TensorFlow."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
def save_and_end(signum, frame):
    note("saved")
    sys.exit(75)
# How many times this task has started, including this one.
with open(model_dir / f"starts-{job}-{index}", "a+") as starts:
    starts.write(".")
    starts.seek(0)
    start = len(starts.read())
"""
WAIT_SECS = 20.0


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """Writes a stand-in program and returns the command that runs it."""

    def write(body: str) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(PREAMBLE + textwrap.dedent(body))
        return [sys.executable, str(path)]

    return write


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


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


def launch(
    cluster: Cluster,
    model_dir: Path,
    command: Sequence[str],
    grace_secs: float = 5.0,
    restarts: Restarts | None = None,
    namespace: Namespace | None = None,
    stall_timeout_secs: float = 0.0,
) -> LaunchReport:
    """Runs the cluster here, and asserts that no process outlives it."""
    argv = [f"--model_dir={model_dir}"]
    report = Supervisor(
        FixedPolicy(cluster.by_task()),
        TaskStarter(argv, command=command, namespace=namespace),
        model_dir,
        restarts or no_progress(0),
        grace_secs=grace_secs,
        stall_timeout_secs=stall_timeout_secs,
    ).run()
    num_starts = len(cluster.tasks()) + sum(len(restart.tasks) for restart in report.restarts)
    assert len(report.tasks) == num_starts
    assert not any(psutil.pid_exists(end.pid) for end in report.tasks)
    assert not psutil.Process().children(recursive=True)
    return report


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


def test_all_tasks_end_with_zero_and_so_does_the_cluster(
    tmp_path: Path, program: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    command = program("""
        note(os.environ["TF_CONFIG"].replace("/", "|"))
        print("hello from", job, index, sys.argv[1:-1], os.getcwd())
    """)
    cluster = local_cluster("ps", num_workers=2, num_ps=1)

    report = Supervisor(
        FixedPolicy(cluster.by_task()),
        TaskStarter(["--flag=1", f"--model_dir={tmp_path / 'run'}"], command=command),
        tmp_path / "run",
        no_progress(0),
    ).run()

    assert report.exit_code == 0
    assert report.first_failure is None
    assert by_task(report) == {"chief 0": 0, "worker 0": 0, "worker 1": 0, "ps 0": 0}
    hello = f"['--flag=1'] {os.getcwd()}\n"
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "tasks").iterdir()}
    assert logs.keys() == {f"{task.job}-{task.index}.log" for task in cluster.tasks()}
    for end in report.tasks:
        mark, line = logs[f"{end.task.job}-{end.task.index}.log"].splitlines()
        assert mark.startswith(f"=== {end.task}, start 1, process {end.pid}, ")
        assert f"{line}\n" == f"hello from {end.task} {hello}"
        config = cluster.for_task(end.task).tf_config()
        assert (tmp_path / "run" / f"{config}-{end.task.job}-{end.task.index}").exists()
    assert capfd.readouterr() == (f"hello from chief 0 {hello}", "")


def test_log_has_every_byte_of_each_run_and_the_output_no_line_about_lost_workers(
    tmp_path: Path, program: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
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
    command = program(f"""
        print(*{lines!r}, sep="\\n", flush=True)
        sys.stdout.buffer.write(b"\\xff no line end")
    """)
    cluster = local_cluster("multiworker", num_workers=1, num_ps=0)
    launch(cluster, tmp_path, command)
    assert capfd.readouterr().out.splitlines()[:-1] == lines[5:]
    launch(cluster, tmp_path, command)
    log = (tmp_path / "tasks" / "worker-0.log").read_bytes().splitlines()
    written = [*(line.encode() for line in lines), b"\xff no line end"]
    for begin in (0, len(log) // 2):
        mark, *found = log[begin : begin + len(log) // 2]
        assert mark.startswith(b"=== worker 0, start 1")
        assert found == written


def test_bad_usage_of_one_task_stops_the_others_at_once_and_is_the_exit_code(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("""
        note("running")
        if job == "worker" and index == 1:
            await_note("running-chief-0")
            sys.exit(2)
        time.sleep(60)
    """)
    began = time.monotonic()
    report = launch(local_cluster("ps", 2, 1), tmp_path, command)
    assert report.exit_code == 2
    assert report.first_failure is not None
    assert report.first_failure.task == Task("worker", 1)
    assert time.monotonic() - began < 5


def test_failure_that_ends_the_run_has_the_trainer_save_then_ends_it_and_the_servers(
    tmp_path: Path, program: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._PEER_LOST_SECS", 0.1)
    monkeypatch.setattr("trainer.local.supervisor._SERVERS_ALONE_SECS", 0.1)
    command = program("""
        note("running")
        if job == "chief":
            signal.signal(signal.SIGTERM, lambda *_: note("asked"))
            await_note("running-ps-0")
            os.kill(int((model_dir / "running-ps-0").read_text()), signal.SIGKILL)
        while True:
            time.sleep(60)
    """)
    report = launch(local_cluster("ps", 1, 1), tmp_path, command, grace_secs=0.5)
    assert set(notes(tmp_path, "asked")) == {"chief-0"}
    assert by_task(report) == {
        "chief 0": -signal.SIGKILL,
        "ps 0": -signal.SIGKILL,
        "worker 0": -signal.SIGTERM,
    }
    assert report.first_failure is not None
    assert report.first_failure.task == Task("ps", 0)
    assert report.exit_code == 75


def test_task_still_running_after_the_chief_is_done_is_an_error(
    tmp_path: Path, program: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._SHUTDOWN_GRACE_SECS", 0.2)
    command = program("""
        note("running")
        if job == "chief":
            await_note("running-ps-0")
        if job == "ps":
            time.sleep(60)
    """)
    report = launch(local_cluster("ps", 1, 1), tmp_path, command)
    assert by_task(report) == {"chief 0": 0, "worker 0": 0, "ps 0": -signal.SIGTERM}
    assert report.first_failure is not None
    assert report.first_failure.task == Task("ps", 0)
    assert "after chief 0 was done" in report.first_failure.failure
    assert report.exit_code == 1


@pytest.fixture(params=[False, True], ids=["", "isolated"])
def namespace(request: pytest.FixtureRequest) -> Iterator[Namespace | None]:
    """None, or a network namespace for the tasks if this machine allows one."""
    if not request.param:
        yield None
        return
    try:
        namespace = open_namespace()
    except IsolationError as error:
        pytest.skip(f"no network namespace here: {error}")
    with namespace:
        yield namespace


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_makes_every_worker_save_and_end(
    signum: signal.Signals,
    namespace: Namespace | None,
    tmp_path: Path,
    program: Callable[[str], list[str]],
) -> None:
    command = program("""
        signal.signal(signal.SIGTERM, save_and_end)
        note("running")
        time.sleep(60)
    """)
    # These tests may run under nohup, which ignores SIGHUP.
    former = signal.signal(signum, signal.default_int_handler)
    try:
        with when_noted(tmp_path, "running", 2, partial(os.kill, os.getpid(), signum)):
            report = launch(
                local_cluster("multiworker", 2, 0), tmp_path, command, namespace=namespace
            )
        assert signal.getsignal(signum) is signal.default_int_handler
    finally:
        signal.signal(signum, former)
    assert set(notes(tmp_path, "saved")) == {"worker-0", "worker-1"}
    assert by_task(report) == {"worker 0": 75, "worker 1": 75}
    assert report.exit_code == 75


def test_closed_terminal_does_not_end_a_run_under_nohup(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("""
        note("running")
        await_note("hung-up")
    """)

    def hang_up() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        (tmp_path / "hung-up").touch()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with when_noted(tmp_path, "running", 1, hang_up):
            report = launch(local_cluster("multiworker", 1, 0), tmp_path, command)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert report.exit_code == 0


def test_signal_under_ps_asks_only_the_chief_which_ends_the_servers(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("""
        signal.signal(signal.SIGTERM, save_and_end)
        note("running")
        if job == "chief":
            time.sleep(60)
        await_note("saved-chief-0")
    """)
    stop = partial(os.kill, os.getpid(), signal.SIGTERM)
    with when_noted(tmp_path, "running", 4, stop):
        report = launch(local_cluster("ps", 2, 1), tmp_path, command)
    assert set(notes(tmp_path, "saved")) == {"chief-0"}
    assert by_task(report) == {"chief 0": 75, "worker 0": 0, "worker 1": 0, "ps 0": 0}
    assert report.exit_code == 75


def test_task_that_ignores_the_signal_is_killed_after_grace_secs_and_named(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("""
        signal.signal(signal.SIGTERM, lambda *_: note("asked"))
        note("running")
        while True:
            time.sleep(60)
    """)
    stop = partial(os.kill, os.getpid(), signal.SIGTERM)
    with when_noted(tmp_path, "running", 1, stop):
        report = launch(local_cluster("multiworker", 1, 0), tmp_path, command, grace_secs=0.5)
    assert set(notes(tmp_path, "asked")) == {"worker-0"}
    assert by_task(report) == {"worker 0": -signal.SIGKILL}
    assert report.first_failure is not None
    assert "0.5 s" in report.first_failure.failure
    assert report.exit_code == 75


def test_second_signal_kills_at_once(tmp_path: Path, program: Callable[[str], list[str]]) -> None:
    command = program("""
        signal.signal(signal.SIGTERM, lambda *_: note("asked"))
        note("running")
        while True:
            time.sleep(60)
    """)
    stop = partial(os.kill, os.getpid(), signal.SIGINT)

    def stop_again() -> None:
        time.sleep(0.6)  # A signal within 0.5 s of the first is its repetition.
        stop()

    with (
        when_noted(tmp_path, "running", 2, stop),
        when_noted(tmp_path, "asked", 2, stop_again),
    ):
        report = launch(local_cluster("multiworker", 2, 0), tmp_path, command, grace_secs=600)
    assert by_task(report) == {"worker 0": -signal.SIGKILL, "worker 1": -signal.SIGKILL}
    assert report.exit_code == 75


def test_children_of_a_task_do_not_outlive_it(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("""
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        (model_dir / "child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    report = launch(local_cluster("multiworker", 1, 0), tmp_path, command)
    assert report.exit_code == 75
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: is_gone(child))


def test_killed_launcher_leaves_no_orphan(
    namespace: Namespace | None, tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note("running")
        while True:
            time.sleep(60)
    """)
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from strategies.cluster.tf_config import local_cluster\n"
            "from trainer.local.network_namespace import Namespace\n"
            "from trainer.local.policy import FixedPolicy\n"
            "from trainer.local.supervisor import Supervisor\n"
            "from trainer.local.task_process import TaskStarter\n"
            "directory, fds, *command = sys.argv[1:]\n"
            "namespace = Namespace(map(int, fds.split(','))) if fds else None\n"
            "cluster = local_cluster('ps', 2, 1)\n"
            "from trainer.local.restarts import Restarts\n"
            "restarts = Restarts(0, lambda: (0, 0))\n"
            "argv = [f'--model_dir={directory}']\n"
            "starter = TaskStarter(argv, command=command, namespace=namespace)\n"
            "Supervisor(FixedPolicy(cluster.by_task()), starter, directory, restarts).run()\n",
            str(tmp_path),
            ",".join(map(str, namespace.fds)) if namespace else "",
            *command,
        ],
        pass_fds=namespace.fds if namespace else (),
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
    with pytest.raises(FileNotFoundError):
        launch(local_cluster("multiworker", 2, 0), tmp_path, [str(tmp_path / "missing")])
    assert not psutil.Process().children(recursive=True)


def no_progress(max_restarts: int) -> Restarts:
    return Restarts(max_restarts, lambda: (0, 0))


def causes(report: LaunchReport) -> list[tuple[str, int, int]]:
    """For each restart: the task that died, its exit code, and the number of restarted tasks."""
    return [(str(r.cause.task), r.cause.exit_code, len(r.tasks)) for r in report.restarts]


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(75)"])
def test_ps_worker_is_restarted_alone_at_its_address(
    end: str, tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program(f"""
        note(f"running-{{start}}-{{config['cluster'][job][index]}}")
        if (job, index) == ("worker", 0):
            if start == 1:
                {end}
            note("again")
        await_note("again-worker-0")
    """)
    cluster = local_cluster("ps", 2, 1)
    report = launch(cluster, tmp_path, command, restarts=no_progress(1))

    code = 75 if "75" in end else -signal.SIGKILL
    assert causes(report) == [("worker 0", code, 1)]
    assert report.exit_code == 0
    assert sorted(path.read_text() for path in tmp_path.glob("starts-*")) == [
        *["."] * (len(cluster.tasks()) - 1),
        "..",
    ]
    address = cluster.address_of(Task("worker", 0))
    assert {f"running-{n}-{address}-worker-0" for n in (1, 2)} <= set(os.listdir(tmp_path))
    assert (tmp_path / "tasks" / "worker-0.log").read_text().count("=== worker 0, start") == 2


@pytest.mark.parametrize(("victim", "restarted"), [("chief 0", 1), ("ps 0", 2)])
def test_servers_stay_when_the_chief_or_another_server_is_killed(
    victim: str, restarted: int, tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    """They have the variables. If that brings no progress, all tasks are restarted."""
    command = program(f"""
        note(f"running-{{start}}")
        if f"{{job}} {{index}}" == "{victim}" and start < 3:
            for task in ("chief-0", "worker-0", "worker-1", "ps-0", "ps-1"):
                await_note("running-1-" + task)
            await_note(f"running-{{start}}-chief-0")
            os.kill(os.getpid(), signal.SIGKILL)
        if job == "chief" and start < 3:
            time.sleep(60)
        if job == "chief":
            note("done")
        await_note("done-chief-0")
    """)
    cluster = local_cluster("ps", 2, 2)
    report = launch(cluster, tmp_path, command, restarts=no_progress(2))

    all_tasks = len(cluster.tasks())
    killed = -signal.SIGKILL
    assert causes(report) == [(victim, killed, restarted), (victim, killed, all_tasks)]
    assert report.exit_code == 0
    lines = (tmp_path / "tasks" / "restarts.jsonl").read_text().splitlines()
    started_again = [set(json.loads(line)["started_again"]) for line in lines]
    assert started_again == [{"chief 0", victim}, set(map(str, cluster.tasks()))]
    assert len(notes(tmp_path, "running-3")) == restarted
    assert len(notes(tmp_path, "running-2")) == all_tasks


def test_workers_that_are_left_save_before_all_are_restarted(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    """Worker 0 saves in response to SIGUSR1; worker 2, which hangs, is killed after the grace."""
    command = program("""
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
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """)
    cluster = local_cluster("multiworker", 3, 0)
    report = launch(cluster, tmp_path, command, grace_secs=1.0, restarts=no_progress(1))
    assert set(notes(tmp_path, "saved")) == {"worker-0"}
    first_ends = {str(end.task): end for end in report.tasks[:3]}
    assert {name: end.exit_code for name, end in first_ends.items()} == {
        "worker 0": 75,
        "worker 1": -signal.SIGKILL,
        "worker 2": -signal.SIGKILL,
    }
    assert first_ends["worker 0"].failure == first_ends["worker 2"].failure == ""
    assert causes(report) == [("worker 1", -signal.SIGKILL, 3)]
    assert report.exit_code == 0
    assert report.first_failure is not None
    assert report.first_failure.survived
    (line,) = (tmp_path / "tasks" / "restarts.jsonl").read_text().splitlines()
    written = json.loads(line)
    assert written["task"] == "worker 1"
    assert written["exit_code"] == -signal.SIGKILL
    assert written["started_again"] == list(map(str, cluster.tasks()))
    assert written["last_lines"] == ["start 1"]


def test_tasks_that_end_themselves_after_a_peer_are_not_killed(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    """After a SIGTERM to one of them, all save, and exit with 75 one after another."""
    command = program("""
        if start > 1:
            sys.exit(0)
        note("running")
        if index == 0:
            await_note("running-worker-1")
            sys.exit(75)
        await_note("running-worker-0")
        pid = int((model_dir / "running-worker-0").read_text())
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        note("saved")
        sys.exit(75)
    """)
    cluster = local_cluster("multiworker", 2, 0)
    report = launch(cluster, tmp_path, command, restarts=no_progress(1))
    assert set(notes(tmp_path, "saved")) == {"worker-1"}
    assert [end.exit_code for end in report.tasks] == [75, 75, 0, 0]
    assert causes(report) == [("worker 0", 75, 2)]
    assert report.exit_code == 0


def test_servers_that_the_chief_ends_with_75_cause_no_separate_restart(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    """After a SIGTERM to one of them, the chief saves, has the servers end, and ends."""
    command = program("""
        if start > 1:
            sys.exit(0)
        note("running")
        if job == "chief":
            pids = []
            for name in ("worker-0", "worker-1", "ps-0"):
                await_note("running-" + name)
                pids.append((model_dir / ("running-" + name)).read_text())
            note("end")
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                time.sleep(0.01)
            time.sleep(0.2)
        await_note("end-chief-0")
        sys.exit(75)
    """)
    cluster = local_cluster("ps", 2, 1)
    report = launch(cluster, tmp_path, command, restarts=no_progress(1))
    (restart,) = report.restarts
    assert len(restart.tasks) == 4
    assert [end.exit_code for end in report.tasks] == [75] * 4 + [0] * 4
    assert report.exit_code == 0


def test_servers_that_die_or_are_restarted_when_the_chief_is_done_do_not_fail_the_run(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("""
        note(f"running-{start}")
        if job == "chief":
            await_note("running-1-ps-0")
            await_note("running-2-worker-0")
        elif job == "worker":
            if start == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        else:
            await_note("running-1-chief-0")
            pid = (model_dir / "running-1-chief-0").read_text()
            while Path(f"/proc/{pid}").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    report = launch(local_cluster("ps", 1, 1), tmp_path, command, restarts=no_progress(1))
    assert causes(report) == [("worker 0", -signal.SIGKILL, 1)]
    assert by_task(report) == {"chief 0": 0, "ps 0": -signal.SIGKILL, "worker 0": -signal.SIGKILL}
    assert report.tasks[-1].task == Task("worker", 0)
    assert report.tasks[-1].failure == ""
    assert report.exit_code == 0


def test_unresponsive_task_is_killed_and_restarted(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("""
        if job == "worker":
            if start == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            note("again")
        await_note("again-worker-0")
    """)
    cluster = local_cluster("ps", 1, 1)
    report = launch(cluster, tmp_path, command, restarts=no_progress(1), stall_timeout_secs=6.0)

    assert causes(report) == [("worker 0", -signal.SIGKILL, 1)]
    assert "unresponsive" in report.restarts[0].cause.failure
    assert report.exit_code == 0


def test_crash_loop_ends_and_names_the_task_and_its_signal(
    tmp_path: Path,
    program: Callable[[str], list[str]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._PEER_LOST_SECS", 0.1)
    command = program("""
        if index == 1:
            print("start", start, "fails")
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)
    """)
    began = time.monotonic()
    report = launch(local_cluster("multiworker", 2, 0), tmp_path, command, restarts=no_progress(2))
    assert time.monotonic() - began >= 1, "there was no delay before the second restart"
    assert causes(report) == [("worker 1", -signal.SIGSEGV, 2)] * 2
    assert report.exit_code == 75
    assert report.first_failure is not None
    assert not report.first_failure.survived
    error = capfd.readouterr().err
    assert "2 restarts within 10 minutes (--max_restarts)" in error
    assert "[worker 1] start 3 fails" in error
    assert error.count("restarted all tasks") == 2


def test_signal_while_a_restart_is_awaited_ends_the_run_at_once(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    class Later(Restarts):
        def next_delay_secs(self, end: TaskEnd, *, counts: bool = True) -> float | None:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            return 60.0

    command = program("os.kill(os.getpid(), signal.SIGKILL)")
    began = time.monotonic()
    report = launch(
        local_cluster("multiworker", 1, 0), tmp_path, command, restarts=Later(1, lambda: (0, 0))
    )
    assert 0.5 <= time.monotonic() - began < 30
    assert report.restarts == ()
    assert report.exit_code == 75


def on_host(index: int, model_dir: Path, command: Sequence[str], max_restarts: int) -> LaunchReport:
    """Runs one task of a cluster of two hosts."""
    jobs = {"worker": {0: "host-a:2222", 1: "host-b:2222"}}
    cluster = Cluster(jobs, Task("worker", index))
    host = f"host-{'ab'[index]}"
    starter = TaskStarter([f"--model_dir={model_dir}"], command=command)
    policy = FixedPolicy({cluster.task: cluster})
    restarts = no_progress(max_restarts)
    return Supervisor(policy, starter, model_dir, restarts, host=host, grace_secs=5.0).run()


def failures(model_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (model_dir / "failures.jsonl").read_text().splitlines()]


def test_launcher_of_a_host_restarts_its_task_and_tells_the_other_hosts(
    tmp_path: Path, program: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    command = program("""
        print("start", start, flush=True)
        if start == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if start == 2:
            sys.exit(75)  # Another task was lost.
    """)
    report = on_host(1, tmp_path, command, max_restarts=2)
    assert [(str(end.task), end.exit_code) for end in report.tasks] == [
        ("worker 1", -signal.SIGKILL),
        ("worker 1", 75),
        ("worker 1", 0),
    ]
    assert report.exit_code == 0
    output = capfd.readouterr().out
    assert "[host-b] start 1\n" in output
    # A lost task is not the cause.
    (failure,) = failures(tmp_path)
    assert (failure["host"], failure["task"], failure["exit_code"]) == ("host-b", "worker 1", -9)
    assert failure["last_lines"] == ["start 1"]
    assert not failure["ends_run"]


def test_restarts_are_delayed_if_the_task_dies_at_once_but_not_if_it_lost_another(
    tmp_path: Path, program: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = itertools.count()
    cluster = Cluster({"worker": {0: "host-a:2222", 1: "host-b:2222"}}, Task("worker", 1))
    command = program("""
        if start < 4:
            sys.exit(75)
        if start < 6:
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    restarts = Restarts(1, lambda: (next(steps), 0))
    starter = TaskStarter([f"--model_dir={tmp_path}"], command=command)
    policy = FixedPolicy({cluster.task: cluster})
    report = Supervisor(policy, starter, tmp_path, restarts, host="host-b").run()
    assert report.exit_code == 0
    delays = re.findall(r"Restarting worker 1 (.*)\.", capsys.readouterr().err)
    assert delays == ["now"] * 4 + ["in 1 s"]


def test_launcher_of_the_chief_shows_why_a_task_of_another_host_died(
    tmp_path: Path, program: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    died = program("""
        print("the reason", flush=True)
        if start == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    on_host(1, tmp_path, died, max_restarts=1)
    lines = (tmp_path / "failures.jsonl").read_text()
    (tmp_path / "failures.jsonl").unlink()
    capfd.readouterr()
    command = program("""
        note("running")
        await_note("is-written")
        time.sleep(3)
    """)

    def write() -> None:
        (tmp_path / "failures.jsonl").write_text(lines)
        (tmp_path / "is-written").touch()

    with when_noted(tmp_path, "running", 1, write):
        assert on_host(0, tmp_path, command, max_restarts=1).exit_code == 0
    errors = capfd.readouterr().err
    assert "[worker 1 on host-b] the reason" in errors
    assert "worker 1 on host-b (process" in errors
    assert "signal 9 (Killed)" in errors


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (1, 75)])
def test_error_that_a_restart_does_not_repair_ends_the_launchers_of_all_hosts(
    code: int,
    expected: int,
    tmp_path: Path,
    program: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.local.supervisor._PEER_LOST_SECS", 0.5)
    assert on_host(1, tmp_path, program(f"sys.exit({code})"), max_restarts=3).exit_code == code
    lines = (tmp_path / "failures.jsonl").read_text()
    assert [line["ends_run"] for line in failures(tmp_path)] == [True]

    # What is there at the start is of an earlier run.
    assert on_host(0, tmp_path, program(""), max_restarts=3).exit_code == 0

    command = program("""
        signal.signal(signal.SIGTERM, save_and_end)
        note("running")
        time.sleep(60)
    """)

    def write() -> None:
        with (tmp_path / "failures.jsonl").open("a") as file:
            file.write("damaged\n" + lines)

    with when_noted(tmp_path, "running", 1, write):
        began = time.monotonic()
        report = on_host(0, tmp_path, command, max_restarts=3)
    assert report.exit_code == expected
    assert time.monotonic() - began < WAIT_SECS + 5
    assert notes(tmp_path, "saved")
