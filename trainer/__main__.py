"""`python -m trainer`: flags -> cluster -> config -> executor -> train; exit codes.

    python -m trainer --strategy=mirrored
    python -m trainer --strategy=multiworker --workers=2 --config=configs/mnist_replica.py
    TF_CONFIG='{...}' python -m trainer --strategy=ps --model_dir=/shared/run
    python -m trainer --strategy=ps --ps_hosts=a:2222 --worker_hosts=b:2222,c:2222 --job_name=ps

| exit code | meaning |
| --- | --- |
| 0 | done |
| 2 | bad usage, config or data; one message says what to type |
| 75 | a peer was lost, this task was asked to stop, or a disk was full: start it again |
| 1 | a bug, or training diverged |
"""

import contextlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

# TensorFlow and all that acts is imported where it is needed: `--help` and a mistyped flag should
# not wait for it.
import absl.flags
from absl import app

from trainer import flags
from trainer.exits import EXIT_BUG, EXIT_USAGE, end_at_once

# For --help, which shows the flags of the main module.
absl.flags.adopt_module_key_flags(flags)


def _say_usage_error(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USAGE


def _main(argv: Sequence[str]) -> NoReturn:
    exit_code = _exit_code_of(argv)
    with contextlib.suppress(OSError):  # A file on a full disk: the exit code says more.
        sys.stdout.flush()
        sys.stderr.flush()
    _remove_generated_files()
    # Not sys.exit: TensorFlow's destructors would call peers that have ended, and may hang.
    os._exit(exit_code)


def _remove_generated_files() -> None:
    """Removes the modules that AutoGraph has written, as Python would do at its own end."""
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file") and module.__file__:
            compiled = importlib.util.cache_from_source(module.__file__)
            for path in (module.__file__, compiled):
                with contextlib.suppress(OSError):
                    os.remove(path)
            with contextlib.suppress(OSError):  # Others may have theirs there.
                os.rmdir(os.path.dirname(compiled))


def _exit_code_of(argv: Sequence[str]) -> int:
    from strategies.cluster import ClusterError
    from trainer import command
    from trainer.config import ConfigError

    try:
        return command.main(argv)
    except (ConfigError, ClusterError) as error:
        return _say_usage_error(str(error))
    except Exception as error:
        from trainer import run
        from trainer.hooks import NonFiniteLossError

        if isinstance(error, run.USER_ERRORS):
            return _say_usage_error(str(error))
        if isinstance(error, NonFiniteLossError):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return EXIT_BUG


def run_from_command_line() -> NoReturn:
    """What `python -m trainer` does."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # Closed: its number would be given to a file or a pipe.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    # Until the launcher or the run takes them over there is no state to save.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, end_at_once)
    app.run(_main, flags_parser=flags.parse)
    raise AssertionError("app.run returned")


if __name__ == "__main__":
    run_from_command_line()
