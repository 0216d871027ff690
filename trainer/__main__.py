"""`python -m trainer` trains what a config file describes: here, or as a task of a cluster.

    python -m trainer --strategy=mirrored
    python -m trainer --strategy=multiworker --workers=2 --config=configs/mnist_replica.py
    TF_CONFIG='{...}' python -m trainer --strategy=ps --model_dir=/shared/run
    python -m trainer --strategy=ps --ps_hosts=a:2222 --worker_hosts=b:2222,c:2222 --job_name=ps

trainer/exit_codes.py explains the exit codes. A user's mistake is one line, without a traceback.
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import absl.flags
from absl import app

from data.system.errors import TrainerError
from data.system.linux import limit_reached, signal_when_parent_ends
from data.system.object_store import UnavailableError
from data.system.pipes import (
    EXIT_WITHOUT_READER,
    ends_with_reader,
    is_reader_gone,
    outlives_terminal,
)
from trainer import flags
from trainer.exit_codes import EXIT_BUG, EXIT_RESTART, end_at_once
from trainer.flags.parsing import parse
from trainer.guards.signals import stop_signals

# For --help, which shows the flags of the main module.
absl.flags.adopt_module_key_flags(flags)


def _main(argv: Sequence[str]) -> NoReturn:
    # Here, not above: `--help` and a mistyped flag do not wait for what follows.
    from trainer import cli

    try:
        outcome = cli.main(argv)
        if isinstance(outcome, int):
            exit_code = outcome
        else:
            from trainer import task
            from trainer.flags.continued import print_next

            # A launcher shows its tasks, and says what comes next.
            is_shown = outcome.is_chief and not outcome.is_checked
            with contextlib.ExitStack() as stack:
                if is_shown:
                    stack.enter_context(cli.view(outcome.model_dir, is_launcher=False))
                exit_code = task.run(outcome)
            if is_shown and not outcome.is_quiet:
                print_next(exit_code, outcome.model_dir, outcome.cluster)
    except (Exception, KeyboardInterrupt) as error:  # An own hook may raise the second one.
        exit_code = _explain(error)
    with contextlib.suppress(OSError):  # On a full disk the exit code matters more.
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: TensorFlow's destructors call peers that may have ended, and can hang.
    os._exit(exit_code)


def _explain(error: Exception | KeyboardInterrupt) -> int:
    """Prints one message for an error that a user can cause, a traceback for a bug."""
    if isinstance(error, BrokenPipeError) and is_reader_gone():
        return EXIT_WITHOUT_READER
    error = limit_reached(error) or error
    if not isinstance(error, TrainerError):
        traceback.print_exception(error)
        return EXIT_BUG
    if flags.TRACEBACK.value:
        traceback.print_exception(error)
    is_passing = isinstance(error, UnavailableError) and error.exit_code == EXIT_RESTART
    hint = ". Start again when it answers." if is_passing else ""
    print(f"error: {error}{hint}", file=sys.stderr)
    return error.exit_code


def run_from_command_line() -> NoReturn:
    """Parses the flags, calls trainer.cli.main, and exits.

    The fork server calls it in the fork of a task.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # Closed: the next opened file would get its descriptor.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    # Until the launcher or the task installs its own handlers there is no state to save.
    for stop in stop_signals():
        signal.signal(stop, end_at_once)
    with ends_with_reader(), outlives_terminal():  # The help, for example.
        app.run(_main, flags_parser=parse)
    raise AssertionError("app.run returned")


def _end_with_caller() -> None:
    """Ends this process with SIGTERM when the process of `trainer.train` that started it ends.

    If the kernel of a notebook is killed, the launcher ends the tasks after they have saved.
    """
    caller = int(os.environ.pop("TRAINER_CALLER", "0"))
    if caller and sys.platform == "linux":
        signal_when_parent_ends(signal.SIGTERM)
        if os.getppid() != caller:  # It ended before the call.
            os._exit(1)


if __name__ == "__main__":
    _end_with_caller()
    run_from_command_line()
