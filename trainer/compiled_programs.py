"""Keeps the programs that XLA compiles for CPUs in the directory of the run, for its next start.

    with kept_programs("runs/a", num_threads=1):       # before anything is compiled
        ...

TensorFlow looks for a compiled program in PROGRAM_CACHE, a directory in the memory of this process,
and ends the step with an error if it is damaged. So a thread moves new programs from there to
MODEL_DIR/compiled, compressed and with gzip's checksum, and only undamaged ones are put there.

A program is found by the names of its functions and by its computation.
"""

import contextlib
import glob
import gzip
import hashlib
import os
import platform
import zlib
from collections.abc import Iterator
from functools import partial

import tensorflow as tf

from data.system.background import repeating
from data.system.compat.program_cache import PROGRAM_CACHE, as_text, has_program_cache
from data.system.cores import num_cores
from data.system.files import is_url, replace_file
from trainer.guards.fingerprint import process_settings
from trainer.run_files import RunFiles

_MOST_PROGRAMS = 16
_LOOK_EVERY_SECS = 1.0


@contextlib.contextmanager
def kept_programs(model_dir: str, num_threads: int | None) -> Iterator[None]:
    """Within it, programs of an earlier start are found, and new ones are kept.

    Does nothing if `model_dir` is a URL, or if TF_XLA_FLAGS of the user names another cache.
    """
    if is_url(model_dir) or not has_program_cache():
        yield
        return
    prefix = os.path.join(RunFiles(model_dir).compiled, f"{_processors(num_threads)}.")
    found = _read(prefix)
    keep_new = partial(_keep, prefix, found)
    try:
        # On a thread, because a ps worker has no loop of its own, and a kill may come at any time.
        with repeating(keep_new, _LOOK_EVERY_SECS):
            yield
    finally:
        keep_new()


def _read(prefix: str) -> set[str]:
    """Puts undamaged programs of earlier starts into the cache; returns their names."""
    found = set()
    tf.io.gfile.makedirs(PROGRAM_CACHE)
    for path in glob.glob(f"{glob.escape(prefix)}*.gz"):
        name = path.removeprefix(prefix).removesuffix(".gz")
        with contextlib.suppress(OSError, EOFError, zlib.error):
            with gzip.open(path) as compressed:
                program = compressed.read()
            if program:  # gzip accepts an empty file.
                os.utime(path)
                with tf.io.gfile.GFile(f"{PROGRAM_CACHE}/{name}", "wb") as file:
                    file.write(program)
                found.add(name)
    return found


def _keep(prefix: str, found: set[str]) -> None:
    """Moves new programs from the cache to the run, and removes the oldest there."""
    for name in tf.io.gfile.listdir(PROGRAM_CACHE):
        if not name.endswith(".pb") or name in found:
            continue
        path = f"{PROGRAM_CACHE}/{name}"
        directory = os.path.dirname(prefix)
        with contextlib.suppress(OSError):  # On a full disk, the next start compiles again.
            os.makedirs(directory, exist_ok=True)
            program = as_text(tf.io.gfile.GFile(path, "rb").read())
            replace_file(f"{prefix}{name}.gz", gzip.compress(program, 1))
            by_age = sorted(os.scandir(directory), key=lambda file: -file.stat().st_mtime)
            for file in by_age[_MOST_PROGRAMS:]:
                os.remove(file)
        tf.io.gfile.remove(path)


def _processors(num_threads: int | None) -> str:
    """A name for all that a program depends on, except its computation."""
    found = [tf.__version__, platform.machine(), num_cores(), num_threads, process_settings()]
    found += [os.environ.get(name) for name in ("XLA_FLAGS", "TF_XLA_FLAGS")]
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        found += sorted({line for line in file if line.startswith(("model name", "flags"))})
    return hashlib.sha256(repr(found).encode()).hexdigest()[:12]
