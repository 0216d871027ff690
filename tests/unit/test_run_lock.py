"""Only one process at a time has the lock of a MODEL_DIR."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.guards.run_lock import LockedError, locked, wait_until_free

HOLD = """
import sys
from trainer.guards.run_lock import locked
with locked(sys.argv[1], 0.0, print):
    print("has it", flush=True)
    input()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock of `tmp_path`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has it\n"
        yield process
        process.kill()


def refused(*_: object) -> None:
    raise AssertionError("it waits")


def test_lock_of_another_process_is_refused_and_named(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    said: list[str] = []
    for wait in (wait_until_free, lambda *arguments: locked(*arguments).__enter__()):
        with pytest.raises(LockedError, match=f"in use: process {other.pid} of host ") as error:
            wait(str(tmp_path), 0.3, said.append)
        assert error.value.exit_code == 75
    assert len(said) == 2


def test_frozen_process_keeps_it(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(LockedError):
        wait_until_free(str(tmp_path), 0.0, lambda _: None)


@pytest.mark.parametrize(
    "end", [lambda p: p.kill(), lambda p: p.communicate("\n")], ids=["killed", "ends"]
)
def test_next_process_gets_it_when_its_holder_has_ended(
    tmp_path: Path, other: subprocess.Popen[str], end: Callable[[subprocess.Popen[str]], object]
) -> None:
    threading.Timer(0.3, end, [other]).start()
    said: list[str] = []
    assert wait_until_free(str(tmp_path), 20.0, said.append)
    assert said == [
        f"{(tmp_path / '.lock').read_text()} trains in {tmp_path}: waiting up to 20 s until it "
        "ends."
    ]
    with locked(str(tmp_path), 0.0, refused):
        pass
    assert not wait_until_free(str(tmp_path), 0.0, refused)


def test_same_process_gets_it_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked(str(tmp_path), 0.0, refused):
        raise KeyboardInterrupt
    with locked(str(tmp_path), 0.0, refused):
        pass


@pytest.mark.parametrize("model_dir", ["s3://bucket/run", "/no/such/directory"])
def test_where_there_is_no_lock_nothing_is_locked(model_dir: str) -> None:
    assert not wait_until_free(model_dir, 0.0, refused)
    with locked(model_dir, 0.0, refused):
        pass
