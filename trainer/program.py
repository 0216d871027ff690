"""The command of another process of this program.

subprocess.Popen([*module_command("trainer.live.draw"), "runs/a"])
"""

import os
import sys
from pathlib import Path


def module_command(module: str) -> tuple[str, ...]:
    """The command that runs `module`, also if ./trainer or ./data is a user's."""
    root = Path(__file__).resolve().parents[1]
    is_here = os.path.samefile(os.curdir, root)  # Then Python may find it only here.
    return (sys.executable, *(() if is_here else ("-P",)), "-m", module)
