"""What the launcher writes: messages to its console, and the logs of the tasks.

    logs = TaskLogs(Path("runs/a/tasks"))
    logs.write(logs.path(Task("worker", 0)), b"what the task prints")
    logs.close()

An error of a log never ends a run. Logs that are deleted during the run are made anew, with one
message. Lines that cannot be written are missing, with one message for each file.
"""

import contextlib
import datetime
import os
import sys
import threading
from pathlib import Path
from typing import BinaryIO, TextIO

from strategies.cluster.tf_config import Task


class TaskLogs:
    """The logs in `directory`, which is made when the first log is written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, BinaryIO] = {}
        self._incomplete: set[Path] = set()
        self._was_made = False
        self._lock = threading.Lock()  # Each task's output has its own thread.

    def path(self, task: Task) -> Path:
        """The log of `task`."""
        return self.directory / f"{task.job}-{task.index}.log"

    def write(self, path: Path, content: bytes, *, begins_line: bool = False) -> None:
        """Appends `content` to a log; if it `begins_line`, after the end of a line left open.

        Raises no error. Only one thread at a time may write to a log.
        """
        try:
            file = self._opened(path)
            if begins_line and file.tell():
                content = b"\n" + content
            file.write(content)
        except (OSError, ValueError) as error:  # The disk is full; or `close` came in between.
            if path not in self._incomplete:
                say(f"Lines are missing in {path}: {error}")
            self._incomplete.add(path)

    def close(self) -> None:
        """Closes all logs. A later write opens its log again."""
        while self._files:
            self._files.popitem()[1].close()

    def _opened(self, path: Path) -> BinaryIO:
        if file := self._files.pop(path, None):
            if os.fstat(file.fileno()).st_nlink:
                return self._files.setdefault(path, file)
            file.close()  # It was deleted.
        self._make_directory()
        return self._files.setdefault(path, path.open("ab", buffering=0))

    def _make_directory(self) -> None:
        with self._lock:
            if self.directory.is_dir():
                return
            run = self.directory.parent
            deleted, lost = self.directory, "earlier logs"
            if not run.is_dir():
                deleted, lost = run, "all files of the run so far"
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._was_made:
                say(f"{deleted} was deleted, with {lost}. It is made anew.")
            self._was_made = True


def now() -> str:
    """The local time, such as 2026-11-21T14:42:07+00:00."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Prints `text` at once, by default to standard error. An error of the stream is ignored."""
    # A closed terminal, or `| head`, must not end a run.
    with contextlib.suppress(OSError):
        print(text, end=end, file=stream or sys.stderr, flush=True)
