"""Shared parts of the commands that read runs: `trainer.evaluate`, `runs`, `compare`, `predict`.

    run_tool(main, define_flags)    # calls main(argv), and exits with its exit code

`define_flags` declares the flags of the command: at import, flags of one name in two commands would
be declared twice in a program that uses both modules. `main` gets the arguments without the flags.
A user's mistake is one line on standard error and exit code 2; after Ctrl-C it is 130.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app

from data.system.errors import TrainerError
from data.system.files import exists, is_dir, is_url
from data.system.flags import parse_flags
from data.system.pipes import ends_with_reader
from trainer.run_files import RunFiles
from trainer.step.options import ConfigError
from trainer.tf_setup import configure_logging, import_tensorflow, set_environment


def run_tool(main: Callable[[Sequence[str]], int], define_flags: Callable[[], None]) -> NoReturn:
    """Runs `main` as a command. It may import TensorFlow by `prepare_tensorflow`."""

    def run(argv: Sequence[str]) -> int:
        configure_logging()
        try:
            return main(argv)
        except TrainerError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code

    define_flags()
    with ends_with_reader():
        app.run(run, flags_parser=parse_flags("error"))
    raise AssertionError("app.run returned")


def prepare_tensorflow() -> None:
    """Imports TensorFlow, without its lines at start-up."""
    set_environment()
    import_tensorflow()


def runs_of(argv: Sequence[str], *, command: str, number: int) -> list[str]:
    """The arguments of a command: the directories of `number` runs."""
    if len(argv) != 1 + number:
        example = " ".join(["runs/A", "runs/B"][:number])
        raise ConfigError(
            f"{command} needs the directories of {number} run(s). Received: "
            f"{' '.join(argv[1:]) or 'none'}. Type, for example, python -m {command} {example}"
        )
    for model_dir in argv[1:]:
        require_run(model_dir)
    return list(argv[1:])


def require_run(model_dir: str) -> RunFiles:
    """The files of the run in `model_dir`. Raises ConfigError if there is none."""
    files = RunFiles(model_dir)
    if not exists(files.config):
        what = "has no config.json" if is_dir(model_dir) else "does not exist"
        raise ConfigError(
            f"{model_dir} {what}, so it is not the directory of a run. `python -m trainer.runs` "
            "lists the runs under runs/."
        )
    return files


def run_of(path: str) -> str:
    """The run at `path`, or the one whose checkpoint or export `path` is; "" if there is none."""
    path = path.rstrip("/")
    above = os.path.dirname(os.path.dirname(path if is_url(path) else os.path.realpath(path)))
    return next((run for run in (path, above) if exists(RunFiles(run).config)), "")
