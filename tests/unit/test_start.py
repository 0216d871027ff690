"""What is imported with TensorFlow, in processes that have imported nothing."""

import subprocess
import sys


def imported_by(program: str) -> set[str]:
    program += "\nimport sys; print(*sorted(n for n in sys.modules if sys.modules[n]))"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    return set(ended.stdout.splitlines()[-1].split())


def test_scikit_learn_is_left_out_and_can_be_had_later() -> None:
    names = imported_by("from trainer.start import import_tensorflow; import_tensorflow()")
    assert {"tensorflow", "keras"} <= names
    assert "sklearn" not in names
    later = "from trainer.start import import_tensorflow; import_tensorflow(); import sklearn.base"
    assert "sklearn.base" in imported_by(later)


def test_keras_still_imports_it_by_itself() -> None:
    """Or there would be nothing to leave out any more."""
    assert "sklearn" in imported_by("import keras")
