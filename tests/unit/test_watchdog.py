"""A task without progress gets a warning, then ends with the stacks of its threads in a file."""

import logging
import os
import queue
import threading
import time
from pathlib import Path

import pytest

from tests.commands import run_python
from trainer.guards.watchdog import Watchdog


def test_task_without_progress_gets_a_warning_and_its_stacks_are_in_a_file(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    earlier = [tmp_path / f"trainer-stacks-{index}.txt" for index in range(12)]
    for age, path in enumerate(earlier):
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    stalls: queue.SimpleQueue[str] = queue.SimpleQueue()
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), Watchdog(0.5, stalls.put) as watchdog:
        watchdog.moved()
        message = stalls.get(timeout=20)
    assert time.monotonic() - began >= 0.5
    assert "no progress" in message
    assert "--stall_timeout_secs" in message
    assert [r.levelname for r in caplog.records] == ["WARNING", "ERROR"]
    # The newest ten stay.
    (stacks,) = set(tmp_path.iterdir()) - set(earlier[:9])
    assert str(stacks) in caplog.text
    assert "test_task_without_progress" in stacks.read_text()


def test_stacks_begin_with_the_main_thread_also_if_there_are_more_than_100_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ending = threading.Event()
    threads = [threading.Thread(target=ending.wait, name=f"waiting-{n}") for n in range(120)]
    stalls: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        for thread in threads:
            thread.start()
        with Watchdog(0.1, stalls.put) as watchdog:
            watchdog.moved()
            stalls.get(timeout=20)
    finally:
        ending.set()
    (stacks,) = tmp_path.iterdir()
    first, *others = stacks.read_text().split("\nThread ")
    assert first.startswith("Thread MainThread")
    assert "test_stacks_begin_with_the_main_thread" in first
    assert sum(other.startswith("waiting-") for other in others) == 120


def test_task_with_some_progress_continues() -> None:
    stalls: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Watchdog(1.0, stalls.put) as watchdog:
        for _ in range(15):
            watchdog.moved()
            time.sleep(0.1)
    assert stalls.empty()


def test_first_steps_may_take_four_times_as_long() -> None:
    stalls: queue.SimpleQueue[str] = queue.SimpleQueue()
    began = time.monotonic()
    with Watchdog(0.25, stalls.put):
        message = stalls.get(timeout=20)
    assert time.monotonic() - began >= 1.0
    assert "no step was completed" in message


HOLDS_THE_LOCK = """
import ctypes, time
from trainer.guards.watchdog import Watchdog
with Watchdog(0.2, print):
    time.sleep(0.1)
    ctypes.PyDLL(None).sleep(50)  # Unlike CDLL it keeps Python's lock.
"""


def test_process_ends_even_if_its_threads_cannot_run() -> None:
    ended = run_python("-c", HOLDS_THE_LOCK)
    assert ended.returncode == 1
    assert "most recent call first" in ended.stderr


def test_disabled_or_closed_watchdog_ends_no_task() -> None:
    stalls: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Watchdog(0, stalls.put):
        time.sleep(0.3)
    with Watchdog(0.2, stalls.put) as watchdog:
        watchdog.moved()
    time.sleep(0.5)
    assert stalls.empty()
