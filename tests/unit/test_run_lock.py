"""Only one run at a time has the lock of a MODEL_DIR."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from trainer.doctor.plan import place_fault
from trainer.guards.run_lock import LockedError, locked

HOLD = """
import os, sys, time
from trainer.guards.run_lock import locked
with locked(sys.argv[1], 0.0, print):
    print("has it", flush=True)
    if input() == "fork":
        if child := os.fork():
            print(child, flush=True)
        time.sleep(60)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock of `tmp_path`."""
    command, pipe = [sys.executable, "-c", HOLD, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "has it\n"
        yield process
        process.kill()


def refuse(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_lock_of_another_process_is_refused_and_named(
    is_frozen: bool, tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    if is_frozen:
        other.send_signal(signal.SIGSTOP)
    said: list[str] = []
    message = rf"in use: process {other.pid} of host .* delete {tmp_path}/\.lock\."
    with (
        pytest.raises(LockedError, match=message) as error,
        locked(str(tmp_path), 0.5, said.append),
    ):
        raise AssertionError("both have it")
    assert error.value.exit_code == 75
    assert len(said) == 1


@pytest.mark.parametrize(
    "end", [lambda p: p.kill(), lambda p: p.communicate("\n")], ids=["killed", "ends"]
)
def test_next_process_gets_it_when_its_holder_has_ended(
    tmp_path: Path, other: subprocess.Popen[str], end: Callable[[subprocess.Popen[str]], object]
) -> None:
    def said(text: str) -> None:
        assert text.startswith(f"process {other.pid} of host ")
        assert text.endswith(f" trains in {tmp_path}: waiting up to 20 s for its end")
        end(other)

    with locked(str(tmp_path), 20.0, said) as has_waited:
        assert has_waited
        assert f"process {os.getpid()} of host " in (tmp_path / ".lock").read_text()


def test_child_of_a_dead_process_does_not_keep_it(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    assert other.stdin
    assert other.stdout
    print("fork", file=other.stdin, flush=True)
    child = psutil.Process(int(other.stdout.readline()))
    try:
        other.kill()
        other.wait()
        assert child.is_running()
        with locked(str(tmp_path), 20.0, lambda _: None):
            pass
    finally:
        child.kill()


def test_new_directory_that_is_deleted_meanwhile_hides_no_error(tmp_path: Path) -> None:
    def open_files() -> set[str]:
        """Returns this process's open files below `tmp_path`, also deleted ones."""
        files = {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
        return {file for file in files if file.startswith(str(tmp_path))}

    def interrupted() -> None:
        assert open_files() == {f"{tmp_path}/new/.lock"}
        shutil.rmtree(tmp_path / "new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), locked(str(tmp_path / "new"), 0.0, refuse):
        interrupted()
    assert not open_files()


def test_empty_directory_of_the_user_stays_and_is_empty_again(tmp_path: Path) -> None:
    with locked(str(tmp_path), 0.0, refuse):
        assert os.listdir(tmp_path) == [".lock"]
    assert os.listdir(tmp_path) == []
    with locked(str(tmp_path / "runs" / "a"), 0.0, refuse):
        assert os.listdir(tmp_path / "runs") == ["a"]
    assert os.listdir(tmp_path) == [], "a run that did not begin left its directories"


def test_same_process_gets_it_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked(str(tmp_path), 0.0, refuse):
        raise KeyboardInterrupt
    with locked(str(tmp_path), 0.0, refuse) as has_waited:
        assert not has_waited


def test_lock_of_a_deleted_file_is_not_enough(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is deleted between opening and locking it, as another process could do."""
    lockf, calls = fcntl.lockf, 0

    def late(descriptor: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (tmp_path / ".lock").unlink()
        lockf(descriptor, operation)

    other.communicate("\n")
    monkeypatch.setattr("trainer.guards.run_lock.fcntl.lockf", late)
    with locked(str(tmp_path), 5.0, refuse):
        assert (tmp_path / ".lock").exists()
    assert calls == 2


def test_where_nothing_can_be_locked_it_is_said(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    said: list[str] = []
    for directory in ("s3://bucket/run", str(tmp_path)):
        with locked(directory, 0.0, said.append) as has_waited:
            assert not has_waited
    assert said == [f"{tmp_path} is not locked against a second run: Is a directory"]


def test_doctor_names_the_run_that_trains_in_the_directory(
    other: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.doctor.plan._LOCK_SECS", 0.1)
    fault = place_fault(str(tmp_path))
    assert f"in use: process {other.pid} of host" in fault
    other.kill()
    other.wait()
    assert place_fault(str(tmp_path)) == ""
