"""The directory of a run, before anything is written to it: is the run complete, can it be written?

check_model_dir("runs/a")           # raises ModelDirError or DiskError
result = finished_result("runs/a", config)          # None: there are steps to train
"""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterator

from data.system import files
from data.system.object_store import UnavailableError
from trainer.checkpoints.checkpointer import ModelDirError
from trainer.checkpoints.file_checks import DiskError
from trainer.config import Config
from trainer.exit_codes import EXIT_DONE
from trainer.run_files import Document, RunFiles

_PROBE_BYTES = 1 << 16  # Not 0: an empty file fits on a full disk.
# Errors of a disk, which need no other command: out of room or quota, or failing.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def finished_result(model_dir: str, config: Config) -> Document | None:
    """The result of a complete run in `model_dir`, if there is one.

    A run is complete with at least `train_steps`, or if it stopped early by the same rule.
    """
    result = RunFiles(model_dir).read_result()
    if result is None or result["exit_code"] != EXIT_DONE:
        return None
    stopped_early = result.get("stopped_early_by") == dataclasses.asdict(config.early_stopping)
    return result if stopped_early or result["step"] >= config.train_steps else None


def check_model_dir(model_dir: str) -> None:
    """Writes a file to `model_dir`, or where this directory would be made, and removes it.

    Raises:
        ModelDirError: no file can be written to it, or it has a file with the name of a directory,
            or the reverse.
        DiskError: its disk is full or fails, or has become read-only since a run wrote there.
        UnavailableError: it is at s3://, which does not answer.
    """
    run = RunFiles(model_dir)
    for path in (run.checkpoints, run.tensorboard, run.export, run.evaluator, run.tasks):
        if os.path.isfile(path):
            raise ModelDirError(
                f"{path} is a file, and a run makes a directory of this name. Move it to another "
                "place, or give another --model_dir."
            )
    for path in (run.config, run.result, run.metrics):
        if os.path.isdir(path):
            raise ModelDirError(
                f"{path} is a directory, and a run writes a file of this name. Move it to another "
                "place, or give another --model_dir."
            )
    with disk_errors_explained(model_dir):
        place = model_dir
        if files.is_url(model_dir):
            files.make_dirs(model_dir)
        while not (files.is_url(place) or os.path.lexists(place)):
            place = os.path.dirname(os.path.abspath(place))
        probe = files.join(place, f".writable-{os.getpid()}")
        files.replace_file(probe, b"." * _PROBE_BYTES)
        files.remove_file(probe)


@contextlib.contextmanager
def disk_errors_explained(model_dir: str) -> Iterator[None]:
    """Raises DiskError or ModelDirError, as `check_model_dir` does, for an OSError inside it."""
    try:
        yield
    except UnavailableError:
        raise  # `__main__` explains it.
    except OSError as error:
        reason = f"--model_dir={model_dir} cannot be written: {error.strerror or error}."
        was_writable = error.errno == errno.EROFS and files.exists(RunFiles(model_dir).config)
        if error.errno in _DISK_ERRORS or was_writable:
            raise DiskError(
                f"{reason} Make room on its disk, or repair it, and start again."
            ) from error
        raise ModelDirError(
            f"{reason} Give a directory that this user may write to, on a disk with room."
        ) from error
