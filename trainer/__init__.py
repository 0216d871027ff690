"""What happens: `python -m trainer`, from the command line to the last checkpoint.

`__main__.py` parses the command line, `task.py` runs one task from top to bottom, and `loop.py` is
the training loop. `learner.py` has the maths of a step, which all strategies share. Read `task.py`
first, then `loop.py`. Only cli/ and two functions of `task.py` ask which strategy is in use.
"""

import importlib.util
import pathlib
import sys


def _check_neighbours() -> None:
    """Refuses a module of the user, such as ./data.py, that hides a package of this program."""
    root = pathlib.Path(__file__).resolve().parents[1]
    for name in ("data", "strategies"):
        spec = importlib.util.find_spec(name)
        found = pathlib.Path(spec.origin).resolve() if spec and spec.origin else None
        if found is None or found == root / name / "__init__.py":
            continue
        message = (
            f"{found} hides the package {name!r} of this program. Rename it, or start in another "
            "directory."
        )
        if sys.argv[0] == "-m":  # `python -m trainer` looks for the module.
            print(f"error: {message}", file=sys.stderr)
            sys.exit(2)
        raise ImportError(message, name=name)


_check_neighbours()
