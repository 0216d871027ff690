"""How far a run has come, from the files that it leaves: for the launcher, without TensorFlow.

saved, reported = progress_of("runs/a")
"""

import contextlib
import json
import re
from typing import TypeAlias

from data.files import exists, join, names_in, num_bytes_of, open_file

# In the directory of a checkpoint, written last.
CHECKPOINT_MARK = "checkpoint.json"
# Reports are short: the last of them are in the last bytes of metrics.jsonl.
_TAIL_BYTES = 65_536

# The newest step with a checkpoint, and the newest that was reported.
Progress: TypeAlias = tuple[int, int]


def progress_of(model_dir: str) -> Progress:
    """The newest step with a finished checkpoint in `model_dir`, and the newest reported one.

    What cannot be read counts as not there.
    """
    saved = reported = 0
    with contextlib.suppress(Exception):  # Each file system has errors of its own.
        saved = _newest_finished(join(model_dir, "checkpoints"))
    with contextlib.suppress(Exception):
        lines = _last_lines(join(model_dir, "metrics.jsonl"))
        reported = max(map(_step_of, lines), default=0)
    return saved, reported


def _newest_finished(directory: str) -> int:
    """The newest step with a checkpoint that was written to its end, damaged or not; 0 for none."""
    found = [re.fullmatch(r"step-(\d+)", name) for name in names_in(directory)]
    finished = (
        int(match[1])
        for match in found
        if match and exists(join(join(directory, match[0]), CHECKPOINT_MARK))
    )
    return max(finished, default=0)


def _last_lines(path: str) -> list[str]:
    with open_file(path) as file:
        file.seek(max(0, num_bytes_of(path) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


def _step_of(line: str) -> int:
    """The step of a report; 0 for a line that is not whole."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0
