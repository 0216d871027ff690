"""`python -m trainer.api`: `python -m trainer`, which ends with the process that began it.

`trainer.train` starts it for a cluster on this machine. If the kernel of a notebook is killed, the
launcher gets SIGTERM, and ends the tasks after they have saved.
"""

import ctypes
import os
import signal
import sys

from trainer.__main__ import run_from_command_line

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    parent = int(os.environ.pop("TRAINER_CALLER", "0"))
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # It ended before the call.
            os._exit(1)


if __name__ == "__main__":
    _end_with_parent()
    run_from_command_line()
