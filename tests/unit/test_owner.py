"""Which process trains in a MODEL_DIR, and what the others do."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from strategies.base import PeerLostError
from strategies.metrics import Metrics
from trainer.guards import owner
from trainer.guards.owner import ReplacedError, is_replaced, this_process, wait_until_free
from trainer.hooks.replaced import StopIfReplaced
from trainer.run_files import Document, RunFiles


@pytest.fixture
def other() -> Iterator[Document]:
    """The record of a process that is alive."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = psutil.Process(process.pid).create_time()
        yield {**this_process(), "pid": process.pid, "started": started}
        process.kill()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    monkeypatch.setattr(owner, "_WAIT_SECS", 0.5)
    return RunFiles(str(tmp_path))


def write(files: RunFiles, process: Document) -> None:
    files.write_config(
        {"recipe": "", "data_dir": "", "config": {"data": {"eval_split": ""}}, "process": process}
    )


def waited(files: RunFiles) -> list[str]:
    said: list[str] = []
    wait_until_free(files.model_dir, said.append)
    return said


def test_directory_of_a_process_that_is_alive_is_refused(files: RunFiles, other: Document) -> None:
    write(files, other)
    with pytest.raises(ReplacedError, match=rf"stop it with: kill {other['pid']} "):
        waited(files)
    assert is_replaced(files.model_dir)


def test_directory_is_free_when_that_process_has_ended(files: RunFiles, other: Document) -> None:
    write(files, other)
    process = psutil.Process(other["pid"])
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:  # Its parent has not waited for it.
        time.sleep(0.01)
    assert waited(files) == []


@pytest.mark.parametrize(
    "changed",
    [{"machine": "another"}, {"started": 1.0}, {"started": None}, {"pid": "no number"}],
    ids=["another machine", "the number was used again", "no start", "no number"],
)
def test_unknown_process_does_not_keep_the_directory(
    files: RunFiles, other: Document, changed: Document
) -> None:
    write(files, {**other, **changed})
    assert waited(files) == []


def test_process_keeps_its_own_directory(files: RunFiles) -> None:
    write(files, this_process())
    assert waited(files) == []
    assert not is_replaced(files.model_dir)


def test_process_whose_run_has_ended_keeps_no_directory(files: RunFiles, other: Document) -> None:
    write(files, other)
    files.write_result({"step": 10, "exit_code": 75})
    assert waited(files) == []


def test_deleted_record_names_no_process(files: RunFiles) -> None:
    assert waited(files) == []
    assert not is_replaced(files.model_dir)


@pytest.mark.parametrize(("is_elastic", "error"), [(False, ReplacedError), (True, PeerLostError)])
def test_replaced_chief_stops(
    files: RunFiles, other: Document, is_elastic: bool, error: type[Exception]
) -> None:
    hook = StopIfReplaced(files.model_dir, is_elastic)
    write(files, this_process())
    hook(10, Metrics())
    write(files, other)
    hook(20, Metrics())  # Within a second of the last look.
    hook._checked = 0.0
    with pytest.raises(error, match=f"process {other['pid']} of host"):
        hook(30, Metrics())
