"""Writes the time of this task, by its causes, to a file while the task runs.

    with Recorder("runs/a", "worker-0") as recorder:
        executor.stopwatch = recorder.stopwatch
        recorder.open()                 # once this task may write

MODEL_DIR/tasks/worker-0.time.jsonl has lines of equal length. A thread writes the last line anew
every second, in the same place, so a process that is killed loses a second. After 2 s, in a long
run after 0.5% of its time, the line stays, and the next one begins: a day needs 0.8 MB.
"""

import contextlib
import json
import os
import threading
import time
from typing import Self

from typing_extensions import override

from data.system.stopwatch import SERVING, Reading, Stopwatch, age_of_process
from strategies.metrics import Metrics
from trainer.hooks.base import Hook
from trainer.run_files import directory_of_logs

LINE_BYTES = 512
SUFFIX = ".time.jsonl"
_TICK_SECS = 1.0
_LEAST_KEPT_SECS = 2.0
_KEPT_FRACTION = 0.005
# A tick that comes later means that the process did not run: it was stopped, for example.
_LATE_SECS = 5.0


class Recorder(Hook):
    """Records the time of this process while its context is open. It never ends a run.

    As the first hook of a loop it also records the steps.
    """

    def __init__(self, model_dir: str, name: str) -> None:
        """Nothing is written before `open`: a task that is refused must leave a run as it is."""
        age = age_of_process()
        self.stopwatch = Stopwatch(age)
        self._path = directory_of_logs(model_dir) / f"{name}{SUFFIX}"
        self._began = time.time() - age
        self._lock = threading.Lock()
        self._is_open = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="recorder", daemon=True)
        self._offset: int | None = None
        self._kept_at = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @override
    def begin(self, step: int) -> None:
        self.stopwatch.begin(step)

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        self.stopwatch.reach(step)

    @override
    def end(self, step: int) -> None:
        """What follows are the last checkpoint, the export and result.json."""
        self.stopwatch.switch("checkpoint")

    def open(self, *, makes_directory: bool = False) -> None:
        """Writes from now on, if the directory exists or as soon as another task has made it."""
        if makes_directory:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
        self._is_open = True
        self._write()

    def close(self) -> None:
        """Writes the last line; it says that this process ended by itself."""
        if not self._closed.is_set():
            self._closed.set()
            self._write()

    def close_stalled(self) -> None:
        """As `close`; the time since the last progress was a stall."""
        self.stopwatch.relabel("stalled")
        self.close()

    def _tick(self) -> None:
        due = time.monotonic() + _TICK_SECS
        while not self._closed.wait(max(0.0, due - time.monotonic())):
            late = time.monotonic() - due
            # Trainers: the lock of the interpreter may be taken while a graph is made. Their stalls
            # are found by the watchdog, by peers and by the launcher.
            if late > _LATE_SECS and self.stopwatch.read().cause == SERVING:
                self.stopwatch.carve("stalled", late)
            self._write()
            due = time.monotonic() + _TICK_SECS

    def _write(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # A full disk: the next tick tries again.
            if not self._is_open or not self._path.parent.is_dir():
                return
            reading = self.stopwatch.read()
            age = sum(reading.seconds.values())
            self._offset = self._find_offset()
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(file, self._line(reading, age), self._offset)
            finally:
                os.close(file)
            if age - self._kept_at >= max(_LEAST_KEPT_SECS, _KEPT_FRACTION * age):
                self._offset += LINE_BYTES
                self._kept_at = age

    def _find_offset(self) -> int:
        """Returns the offset of the next line: after all lines of this and former processes."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if self._offset is None or self._offset > size:  # The file may have been deleted.
            return -(-size // LINE_BYTES) * LINE_BYTES
        return self._offset

    def _line(self, reading: Reading, age: float) -> bytes:
        document = {
            "process": os.getpid(),
            "began": round(self._began, 3),
            "time": round(self._began + age, 3),
            "begins": reading.begins,
            "first_step": reading.first_step,
            "step": reading.step,
            "cause": reading.cause,
            "ended": self._closed.is_set(),
            "seconds": {name: round(value, 3) for name, value in reading.seconds.items()},
        }
        return json.dumps(document).ljust(LINE_BYTES - 1).encode() + b"\n"
