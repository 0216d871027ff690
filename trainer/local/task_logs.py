"""What the launcher writes: messages to its console, and the logs of the tasks.

    logs = TaskLogs(Path("runs/a/tasks"))
    logs.append(logs.path(Task("worker", 0)), b"what the task prints")

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
        self._was_made = False
        self._incomplete: set[Path] = set()
        self._files: dict[Path, BinaryIO] = {}  # To open one for each line is slow on NFS.
        self._lock = threading.Lock()  # Each task's output has its own thread.

    def path(self, task: Task) -> Path:
        """The log of `task`."""
        return self.directory / f"{task.job}-{task.index}.log"

    def append(self, path: Path, content: bytes, *, begins_line: bool = False) -> None:
        """Appends `content`; if it `begins_line`, after the end of a line that was left open."""
        try:
            with self._lock:
                file = self._files.pop(path, None)  # After an error it is opened again.
                if file is None or not os.fstat(file.fileno()).st_nlink:  # It was deleted.
                    if file:
                        file.close()
                    self._make_directory()
                    file = path.open("ab", buffering=0)
                if begins_line and file.tell():
                    content = b"\n" + content
                file.write(content)
                self._files[path] = file
        except OSError as error:  # For example, the disk is full.
            if path not in self._incomplete:
                say(f"Lines are missing in {path}: {error}")
            self._incomplete.add(path)

    def close(self) -> None:
        """Closes all logs. A later `append` opens its log again."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()

    def _make_directory(self) -> None:
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
    """Prints `text` at once, by default to standard error. An error of the stream is ignored.

    Characters that the stream does not have are escaped.
    """
    stream = stream or sys.stderr
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    # A closed terminal, or `| head`, must not end a run.
    with contextlib.suppress(OSError):
        print(text, end=end, file=stream, flush=True)
