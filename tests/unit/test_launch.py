"""LocalCluster with small stand-in programs: real processes, signals and pipes, no TensorFlow."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from strategies.cluster import Cluster, Task, local_cluster
from trainer.launch import LaunchReport, LocalCluster

# What every stand-in starts with: who it is, a note that it runs, and the life line of real tasks.
PREAMBLE = """
import json, os, signal, sys, time
from pathlib import Path
from trainer.lifeline import watch_lifeline
watch_lifeline()
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
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def notes(model_dir: Path, word: str) -> dict[str, int]:
    """The tasks that noted `word`, with their process ids."""
    paths = [path for path in model_dir.glob(f"{word}-*") if path.suffix != ".part"]
    return {path.name.removeprefix(f"{word}-"): int(path.read_text()) for path in paths}


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a container's first process may never reap its orphans."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def by_task(report: LaunchReport) -> dict[str, int]:
    return {str(end.task): end.exit_code for end in report.tasks}


def launch(
    cluster: Cluster, model_dir: Path, command: Sequence[str], grace_secs: float = 5.0
) -> LaunchReport:
    """Runs the cluster here, and proves of every run that no process outlives it."""
    report = LocalCluster(cluster, [], model_dir, grace_secs=grace_secs, command=command).run()
    assert len(report.tasks) == len(cluster.tasks())
    assert not any(psutil.pid_exists(end.pid) for end in report.tasks)
    assert not psutil.Process().children(recursive=True)
    return report


@contextlib.contextmanager
def when_noted(model_dir: Path, word: str, count: int, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` in a thread as soon as `count` tasks have noted `word`; proves that it did."""
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
    command = program("print('hello from', job, index, sys.argv[1:-1], os.getcwd())")
    cluster = local_cluster("ps", num_workers=2, num_ps=1)

    report = LocalCluster(cluster, ["--flag=1"], tmp_path / "run", command=command).run()

    assert report.exit_code == 0
    assert report.first_failure is None
    assert by_task(report) == {"chief 0": 0, "worker 0": 0, "worker 1": 0, "ps 0": 0}
    hello = f"['--flag=1'] {os.getcwd()}\n"
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "tasks").iterdir()}
    assert logs == {
        f"{task.job}-{task.index}.log": f"hello from {task} {hello}" for task in cluster.tasks()
    }
    assert capfd.readouterr() == (f"hello from chief 0 {hello}", "")


def test_task_sees_its_own_place_in_one_cluster(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("note(os.environ['TF_CONFIG'].replace('/', '|'))")
    cluster = local_cluster("multiworker", num_workers=2, num_ps=0)
    launch(cluster, tmp_path, command)
    for task in cluster.tasks():
        config = cluster.for_task(task).tf_config()
        assert (tmp_path / f"{config}-{task.job}-{task.index}").exists()


def test_logs_are_appended_to_and_bad_bytes_kept(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program(r"sys.stdout.buffer.write(b'\xff no line end')")
    cluster = local_cluster("multiworker", num_workers=1, num_ps=0)
    launch(cluster, tmp_path, command)
    launch(cluster, tmp_path, command)
    assert (tmp_path / "tasks" / "worker-0.log").read_bytes() == b"\xff no line end" * 2


def test_first_failure_is_the_cause_and_not_the_peer_that_gave_up_first(
    tmp_path: Path, program: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    command = program("""
        if index == 0:
            note("gave-up")
            sys.exit(75)
        print("\\n".join(f"line {i}" for i in range(100)))
        await_note("gave-up-worker-0")
        while True:  # Until that peer's process has ended, so that the order of ends is certain.
            pid = int((model_dir / "gave-up-worker-0").read_text())
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                sys.exit(1)
            time.sleep(0.01)
    """)
    report = launch(local_cluster("multiworker", 2, 0), tmp_path, command)

    assert [(str(end.task), end.exit_code) for end in report.tasks] == [
        ("worker 0", 75),
        ("worker 1", 1),
    ]
    assert report.first_failure == report.tasks[1]
    assert report.exit_code == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[:-1] == [f"[worker 1] line {i}" for i in range(60, 100)]
    assert "worker 1" in lines[-1]
    assert "worker-1.log" in lines[-1]


def test_killed_worker_ends_the_others_and_asks_for_a_restart(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("""
        note("running")
        if index == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        await_note("running-worker-0")
        sys.exit(75)
    """)
    report = launch(local_cluster("multiworker", 2, 0), tmp_path, command)
    assert by_task(report) == {"worker 0": -signal.SIGKILL, "worker 1": 75}
    assert report.exit_code == 75
    assert report.first_failure is not None
    assert report.first_failure.task == Task("worker", 0)
    assert "Killed" in report.first_failure.failure


def test_peer_that_hangs_after_a_failure_is_ended(
    tmp_path: Path, program: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.launch._PEER_LOST_SECS", 0.2)
    command = program("""
        signal.signal(signal.SIGTERM, lambda *_: note("asked"))
        note("running")
        await_note("running-worker-1")
        if index == 0:
            sys.exit(1)
        while True:
            time.sleep(60)
    """)
    report = launch(local_cluster("multiworker", 2, 0), tmp_path, command, grace_secs=0.5)
    assert by_task(report) == {"worker 0": 1, "worker 1": -signal.SIGKILL}
    assert set(notes(tmp_path, "asked")) == {"worker-1"}
    assert report.exit_code == 1
    assert report.first_failure is not None
    assert report.first_failure.task == Task("worker", 0)


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


def test_killed_ps_worker_leaves_the_others_training(
    tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("""
        note("running")
        if job == "chief":
            await_note("running-worker-1")
            victim = int((model_dir / "running-worker-1").read_text())
            os.kill(victim, signal.SIGKILL)
            while Path(f"/proc/{victim}").exists():  # Gone and reaped: the launcher knows of it.
                time.sleep(0.01)
            note("done")
        elif (job, index) == ("worker", 1):
            time.sleep(60)
        else:
            await_note("done-chief-0")
    """)
    report = launch(local_cluster("ps", 2, 1), tmp_path, command)
    assert by_task(report) == {
        "chief 0": 0,
        "worker 0": 0,
        "worker 1": -signal.SIGKILL,
        "ps 0": 0,
    }
    assert report.first_failure is not None
    assert report.first_failure.task == Task("worker", 1)
    assert report.exit_code == 0  # The chief did without it.


@pytest.mark.parametrize("victim", ["worker", "ps"])
def test_last_worker_or_a_ps_killed_ends_the_run(
    victim: str,
    tmp_path: Path,
    program: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.launch._PEER_LOST_SECS", 0.1)
    command = program(f"""
        note("running")
        if job == "chief":
            signal.signal(signal.SIGTERM, save_and_end)
            await_note("running-{victim}-0")
            os.kill(int((model_dir / "running-{victim}-0").read_text()), signal.SIGKILL)
        time.sleep(60)
    """)
    monkeypatch.setattr("trainer.launch._SERVERS_ALONE_SECS", 0.1)
    report = launch(local_cluster("ps", 1, 1), tmp_path, command)
    assert set(notes(tmp_path, "saved")) == {"chief-0"}
    assert by_task(report) == {
        "chief 0": 75,
        f"{victim} 0": -signal.SIGKILL,
        f"{'ps' if victim == 'worker' else 'worker'} 0": -signal.SIGTERM,
    }
    assert report.first_failure is not None
    assert report.first_failure.task == Task(victim, 0)
    assert report.exit_code == 75


def test_task_still_running_after_the_chief_is_done_is_an_error(
    tmp_path: Path, program: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.launch._FAREWELL_SECS", 0.2)
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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_makes_every_worker_save_and_end(
    signum: signal.Signals, tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    command = program("""
        signal.signal(signal.SIGTERM, save_and_end)
        note("running")
        time.sleep(60)
    """)
    # Not as these tests were started: under nohup, SIGHUP is ignored.
    former = signal.signal(signum, signal.default_int_handler)
    try:
        with when_noted(tmp_path, "running", 2, partial(os.kill, os.getpid(), signum)):
            report = launch(local_cluster("multiworker", 2, 0), tmp_path, command)
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


def test_task_that_ignores_the_signal_is_killed_after_the_grace_and_named(
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
    with (
        when_noted(tmp_path, "running", 2, stop),
        when_noted(tmp_path, "asked", 2, stop),
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
    tmp_path: Path, program: Callable[[str], list[str]]
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
            "from pathlib import Path\n"
            "from strategies.cluster import local_cluster\n"
            "from trainer.launch import LocalCluster\n"
            "cluster = local_cluster('ps', 2, 1)\n"
            "LocalCluster(cluster, [], Path(sys.argv[1]), command=sys.argv[2:]).run()\n",
            str(tmp_path),
            *command,
        ],
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
