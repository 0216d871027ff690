"""What is imported with TensorFlow, in processes that have imported nothing."""

import os
import platform
import subprocess
import sys

import pytest


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


FAULTS = """
import resource
from trainer.start import keep_freed_memory

keep_freed_memory()
for _ in range({times}):
    bytearray({num_bytes})
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def page_faults(times: int, **variables: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-c", FAULTS.format(times=times, num_bytes=8 << 20)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return int(ended.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_freed_memory_is_used_again_unless_the_user_has_settings_of_their_own() -> None:
    pages_of_all = 50 * (8 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert page_faults(51) - page_faults(1) < pages_of_all / 10
    own = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    assert page_faults(51, **own) - page_faults(1, **own) > pages_of_all / 2
