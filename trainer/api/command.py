"""`python -m trainer` in another process, with its lines on this process's streams.

result = run_command(["--strategy=ps", "--model_dir=runs/a"])
"""

import os
import queue
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from data.system.files import exists
from trainer import flags
from trainer.api.result import Result, result_of
from trainer.flags.checks import read_recipe
from trainer.flags.start import DEFAULT_DIR, model_dir_of, read_cluster
from trainer.program import python_command
from trainer.run_files import RunFiles

_ERROR = "error: "
_POLL_SECS = 0.5


def run_command(words: Sequence[str]) -> Result:
    """Runs the command with `words`, which are parsed; raises the errors of `trainer.train`.

    The first Ctrl-C stops the run with its state saved; a second one ends it at once.
    """
    recipe = read_recipe()
    read_cluster(is_launched=False)
    environment, model_dir = _environment(), model_dir_of(recipe)
    if flags.MODEL_DIR.value is None:
        words = [*words, f"--model_dir={model_dir}"]
        environment[DEFAULT_DIR] = model_dir
    exit_code, message = _run([*python_command("-m", "trainer"), *words], environment)
    result = Result(model_dir) if exists(RunFiles(model_dir).config) else None
    return result_of(model_dir, exit_code, result, message)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Runs `command`, shows its lines; returns its exit code, and the error that it printed."""
    lines: queue.SimpleQueue[tuple[IO[str], str] | None] = queue.SimpleQueue()
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Ctrl-C in a terminal, and the stop button of a notebook, reach this process alone.
        start_new_session=True,
    )
    assert process.stdout
    assert process.stderr

    def read(stream: IO[str]) -> None:
        for line in stream:
            lines.put((stream, line))
        lines.put(None)

    for stream in (process.stdout, process.stderr):
        threading.Thread(target=read, args=[stream], daemon=True).start()
    message: list[str] = []
    num_open = 2
    while num_open:
        try:
            # With a time limit: a signal that another thread gets does not end the wait.
            item = lines.get(timeout=_POLL_SECS)
            if item is None:
                num_open -= 1
                continue
            stream, line = item
            if stream is process.stderr and (message or line.startswith(_ERROR)):
                message.append(line)
            else:
                shown = sys.stdout if stream is process.stdout else sys.stderr
                print(line, end="", flush=True, file=shown)
        except queue.Empty:
            continue
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
    return process.wait(), "".join(message).removeprefix(_ERROR).rstrip()


def _environment() -> dict[str, str]:
    """Returns this process's environment, with a PYTHONPATH that finds this program."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TRAINER_CALLER": str(os.getpid())}
    root = Path(__file__).resolve().parents[2]
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    if root not in installed:
        paths = [str(root), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment
