"""Starts the process that draws, and sends it what this process and its tasks print.

    with live_view("runs/a", is_launcher=True):
        cluster.run()               # All that is printed meanwhile goes to the view.
    print("what follows is printed as before")

The view is a process and not a thread: a thread would share Python's interpreter lock with the
training loop, and could not restore the terminal after os._exit or SIGKILL. It ends when the pipe
to it is closed, or when this process ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from data.system.files import is_s3, is_url
from trainer.guards.signals import stop_signals
from trainer.hooks.terminal import terminal_env
from trainer.program import python_command

END = "\x1b_end"  # The last line for the view. The tasks may hold the pipe open for longer.
_DUMB = ("", "dumb", "unknown")


def can_show(model_dir: str) -> bool:
    """Returns True if standard output is a terminal that a person looks at.

    The view reads the reports of the run, so they must be in files of this machine.
    """
    has_reports = not is_url(model_dir) or is_s3(model_dir)
    is_wanted = not os.environ.get("NO_COLOR") and not os.environ.get("CI")
    has_codes = os.environ.get("TERM", "") not in _DUMB
    return has_reports and is_wanted and has_codes and sys.stdout.isatty()


@contextlib.contextmanager
def live_view(model_dir: str, *, is_launcher: bool) -> Iterator[None]:
    """Shows the run in `model_dir` while the context is open, on standard output.

    `is_launcher`: the run is a cluster on this machine, whose tasks this process starts.
    """
    outputs = [fd for fd in (1, 2) if os.isatty(fd)]
    with contextlib.ExitStack() as stack:
        pipe = _start(model_dir, is_launcher, stack)
        if pipe is not None:
            env = terminal_env(has_view=True)
            _redirect(outputs, pipe, stack)
            os.environ.update(env)
            stack.callback(lambda: [os.environ.pop(name, None) for name in env])
        yield


def _start(model_dir: str, is_launcher: bool, stack: contextlib.ExitStack) -> int | None:
    """Starts the process; returns the end of the pipe to it, or None if it could not be started."""
    command = [*python_command("-m", "trainer.live.draw"), model_dir, str(os.getpid())]
    if is_launcher:
        command.append("tasks")
    read, write = os.pipe()
    stack.callback(os.close, write)
    # A terminal sends these signals to all its processes, but the view must end after the process
    # that it shows. It inherits the blocked signals.
    not_for_view = (*stop_signals(), signal.SIGQUIT)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, not_for_view)
    try:
        process = subprocess.Popen(command, stdin=read)
    except OSError:  # No process or no memory is left. The run prints lines.
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(read)

    def end() -> None:
        with contextlib.suppress(OSError):  # It has ended already.
            os.write(write, f"{END}\n".encode())
        process.wait()

    stack.callback(end)
    return write


def _redirect(outputs: list[int], pipe: int, stack: contextlib.ExitStack) -> None:
    """Points `outputs` at `pipe` until the stack is closed."""
    stdout = sys.stdout  # --log_device_placement replaces it.
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {fd: os.dup(fd) for fd in outputs}

    def restore() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        sys.stdout = stdout
        for fd, copy in saved.items():
            os.dup2(copy, fd)
            os.close(copy)

    for fd in outputs:
        os.dup2(pipe, fd)
    stack.callback(restore)
