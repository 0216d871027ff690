"""The command of another process of this program.

subprocess.Popen([*python_command("-m", "trainer.live.draw"), "runs/a"])
"""

import os
import sys
from pathlib import Path


def python_command(*words: str) -> tuple[str, ...]:
    """Python with `words`; it finds this program also if ./trainer or ./data is a user's."""
    root = Path(__file__).resolve().parents[1]
    is_here = os.path.samefile(os.curdir, root)  # Then Python may find it only here.
    return (sys.executable, *(() if is_here else ("-P",)), *words)
