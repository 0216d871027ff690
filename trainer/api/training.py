"""`trainer.train`: the command `python -m trainer` as a function.

    result = train("configs/digits.py", strategy="mirrored", train_steps=200)
    result = train("configs/digits.py", strategy="ps", workers=3)
    result = train(Config(dataset="digits"), build_model=build_model)
    result = train(model_dir="runs/latest", train_steps=400)        # continues a run

`mirrored` trains in this process (here.py). multiworker and ps start a cluster on this machine: the
command runs in another process, with its lines on this process's streams.
"""

import contextlib
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

from data.system.errors import UsageError
from data.system.files import exists, expanded, is_url
from trainer import flags
from trainer.api.arguments import parsed, recipe_named, split_arguments, words_and_values
from trainer.api.result import Result, result_of
from trainer.config import Config, flatten, load_recipe
from trainer.config_checks import check
from trainer.config_file import forget_modules
from trainer.flags.checks import read_recipe
from trainer.flags.start import DEFAULT_DIR, model_dir_of, read_cluster
from trainer.program import python_command
from trainer.run_files import RunFiles

_ERROR = "error: "
_POLL_SECS = 0.5


def train(config: str | Path | Config | None = None, **arguments: object) -> Result:
    """Trains, and returns what the run has left behind.

    `config` is a config file or module, as for --config, or a Config object. With `model_dir`
    alone, the run in it is continued with its own config, strategy and flags.

    `arguments` are flags of `python -m trainer`, and fields of the config: train_steps=200,
    export=False, data={"lanes": 8}. They are checked as on the command line. With a Config object,
    the functions that a config file may define are arguments too: build_model, parse, loss, ...
    (trainer/config.py). A Config object is for `mirrored`: other processes could not import it.

    A run in this process stops at a step when it is interrupted (Ctrl-C, or the stop button of a
    notebook), saves its state, and raises RunFailed with exit_code 75.

    Raises:
        UsageError: a mistake in the arguments, the config, the data or the model.
        RunFailed: training diverged (exit_code 1), or stopped and can be continued (75).
    """
    forget_modules()
    functions, others = split_arguments(arguments)
    with contextlib.ExitStack() as stack:
        if isinstance(config, Config):
            check(config)
            base = config
            target: str | None = stack.enter_context(recipe_named(config, functions))
        elif functions:
            raise UsageError(
                f"train() got the function(s) {', '.join(functions)}, which belong to a Config "
                f"object, but config is {config!r}. Define them in the config file, or give a "
                "Config object: trainer.train(trainer.Config(...), build_model=build_model)."
            )
        else:
            target = None if config is None else os.fspath(config)
            base = _config_of(target, others)
        words, values = words_and_values(others, base)
        if target is not None:
            words.insert(0, f"--config={target}")
        stack.enter_context(parsed(words, values))
        # With --max_restarts a launcher supervises the process.
        if flags.STRATEGY.value == "mirrored" and not flags.MAX_RESTARTS.present:
            from trainer.api.here import run_here

            return run_here(functions, config if isinstance(config, Config) else None)
        if isinstance(config, Config):
            raise UsageError(
                f"config is a {type(config).__name__} object, but strategy="
                f"{flags.STRATEGY.value!r} needs a config file: each process of the cluster "
                "imports it. Write get_config() and the functions to a file, and type, for "
                f"example: trainer.train('my_model.py', strategy={flags.STRATEGY.value!r})."
            )
        # A continued run may have other values than the config file.
        fields = flatten(base)
        changed = {n: v for n, v in values.items() if target is None or v != fields[n]}
        if changed:
            name, value = next(iter(changed.items()))
            raise UsageError(
                f"{name}={value!r} cannot be given to the processes of a cluster, which get text. "
                f"Set it in the config file: config.{name} = {value!r}, in get_config()."
            )
        return run_command(words)


def _config_of(target: str | None, arguments: Mapping[str, object]) -> Config:
    """The config with the fields that arguments may name."""
    model_dir = expanded(str(arguments.get("model_dir") or ""))
    if target is None and model_dir and not is_url(model_dir):
        files = RunFiles(model_dir)
        if exists(files.config):
            document = files.read_config()
            known = Path(document["recipe"]).is_file()
            return load_recipe(document["recipe"]).config if known else Config()
    return Config() if target is None else load_recipe(target).config


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
