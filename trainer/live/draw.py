"""The process that draws: `python -m trainer.live.draw MODEL_DIR PID [tasks]`; see view.py.

Its standard input has the lines that the process PID prints. Before training it prints them as they
come. Then it switches the terminal to its second screen, as an editor does, and draws there. In the
end the first screen is back, and gets the lines that were printed meanwhile: of the reports only
the last of each split, since all are in metrics.jsonl.

It stops drawing while it is suspended (Ctrl-Z) or in the background.
"""

import os
import select
import signal
import sys
import time

import psutil
from rich.console import Console
from rich.live import Live
from rich.text import Text

from data.system.pipes import outlives_terminal
from trainer.hooks.terminal import COMPILING, progress_in
from trainer.live.screen import lines_of
from trainer.live.status import Status, split_of_report
from trainer.live.view import END
from trainer.run_files import directory_of_logs

_SECS_PER_FRAME = 1.0
_MAX_KEPT_LINES = 1000
_READ_BYTES = 65_536


class Drawing:
    """The terminal: its first screen, where lines are printed, and the second one."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._console = Console(highlight=False)
        self._live: Live | None = None
        self._next_frame = 0.0
        self._kept: list[str] = []  # Lines to print; of the reports the last of each split.
        self._num_lost = 0

    @property
    def is_open(self) -> bool:
        """True while the second screen is shown."""
        return self._live is not None

    @property
    def secs_to_frame(self) -> float:
        """The time until the next frame, or until the next look if the screen is not open."""
        due = self._next_frame - time.monotonic() if self.is_open else _SECS_PER_FRAME
        return min(max(0.0, due), _SECS_PER_FRAME)

    def open(self) -> None:
        """Shows the second screen."""
        if not self.is_open:
            self._live = Live(console=self._console, screen=True, auto_refresh=False)
            self._live.start()
            self._next_frame = 0.0

    def close(self) -> None:
        """Shows the first screen again, and prints the lines that were added meanwhile."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
        if self._num_lost:
            print(f"... {self._num_lost:,} lines are left out")
        for line in self._kept:
            print(line)
        sys.stdout.flush()
        self._kept, self._num_lost = [], 0

    def add(self, line: str) -> None:
        """Prints a line of the run, or keeps it until the first screen is shown again."""
        self._status.read_line(line)
        if progress_in(line) is not None:
            return
        if not self.is_open:
            print(line, flush=True)
            return
        if split := split_of_report(line):
            self._kept = [kept for kept in self._kept if split_of_report(kept) != split]
        self._kept.append(line)
        if len(self._kept) > _MAX_KEPT_LINES:
            del self._kept[0]
            self._num_lost += 1

    def draw(self) -> None:
        """Draws a frame, if it is time."""
        if self._live is None or time.monotonic() < self._next_frame:
            return
        self._status.poll()
        width, height = self._console.size
        is_ascii = not self._console.encoding.startswith("utf")
        lines = lines_of(self._status, width, height, is_ascii=is_ascii)
        self._live.update(Text("\n").join(lines), refresh=True)
        self._next_frame = time.monotonic() + _SECS_PER_FRAME


def _has_terminal(process: psutil.Process) -> bool:
    """Returns True unless the run `process` is suspended or in the background."""
    try:
        return (
            os.tcgetpgrp(1) == os.getpgrp()
            # It was the terminal's group until the shell has noticed that the run has stopped.
            and process.status() != psutil.STATUS_STOPPED
        )
    except OSError:  # The terminal is that of another session, or gone.
        return True
    except psutil.NoSuchProcess:
        return False


def main(model_dir: str, pid: int, *, has_tasks: bool) -> None:
    """Draws until standard input or the process `pid` ends."""
    logs = directory_of_logs(model_dir) if has_tasks else None
    drawing = Drawing(Status(model_dir, pid, logs))
    is_training, rest, can_draw, closed_until = has_tasks, b"", True, 0.0
    run = psutil.Process(pid)

    # The handler does nothing: it may run while the screen is drawn. This process goes on: if it
    # stopped itself, it could do so after the signal to continue.
    suspensions, new_suspension = os.pipe()
    os.set_blocking(new_suspension, False)
    signal.set_wakeup_fd(new_suspension)
    signal.signal(signal.SIGTSTP, lambda *_: None)

    def choose_screen() -> None:
        is_closed = time.monotonic() < closed_until
        if is_training and can_draw and not is_closed and _has_terminal(run):
            drawing.open()
        elif drawing.is_open:
            drawing.close()

    try:
        while os.getppid() == pid:
            choose_screen()
            readable, _, _ = select.select([0, suspensions], [], [], drawing.secs_to_frame)
            if suspensions in readable:
                os.read(suspensions, _READ_BYTES)
                closed_until = time.monotonic() + _SECS_PER_FRAME
                choose_screen()
            if 0 in readable:
                content = os.read(0, _READ_BYTES)
                *lines, rest = (rest + content).split(b"\n")
                for line in lines:
                    text = line.decode(errors="replace")
                    if text == END:
                        return
                    drawing.add(text)
                    if text == COMPILING:
                        is_training = True
                        choose_screen()
                if not content:
                    return
            try:
                drawing.draw()
            except Exception as error:  # An error of the view must not disturb the run.
                can_draw = False
                drawing.close()
                print(f"The live view ended: {type(error).__name__}: {error}", flush=True)
    finally:
        if rest:
            drawing.add(rest.decode(errors="replace"))
        drawing.close()


if __name__ == "__main__":
    with outlives_terminal():
        main(sys.argv[1], int(sys.argv[2]), has_tasks=len(sys.argv) > 3)
