"""Keeps the programs that XLA compiles in the directory of the run: a second start reads them.

    with kept_programs("runs/a"):       # before TensorFlow touches a device
        ...

A large model compiles for a minute. A resume, a restart after a death, and the tasks of other hosts
with the same processors find the programs in MODEL_DIR/compiled. TensorFlow ends a step with an
error if a program of its cache is damaged. So each process has a cache of its own, a directory for
its time, and only programs whose checksum is right get there.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import tempfile
import threading
from collections.abc import Iterator

import tensorflow as tf

from data.system.files import is_url
from data.system.scratch import scratch_dir
from trainer.run_files import RunFiles

_FLAG = "--tf_xla_persistent_cache_directory"
_SUFFIX = ".pb"  # TensorFlow gives a program this name when it is complete.
_LOOK_EVERY_SECS = 5.0


@contextlib.contextmanager
def kept_programs(model_dir: str) -> Iterator[None]:
    """Within it, programs are read from `model_dir`, and new ones are kept there.

    Must begin before TensorFlow's first op: it reads the name of its cache only once. Does nothing
    for a `model_dir` at a URL, and if TF_XLA_FLAGS names a cache.
    """
    flags = os.environ.get("TF_XLA_FLAGS", "")
    if is_url(model_dir) or _FLAG in flags:
        yield
        return
    store = os.path.join(RunFiles(model_dir).compiled, _processors())
    is_over = threading.Event()
    with scratch_dir() as cache:
        read_programs(store, cache)
        os.environ["TF_XLA_FLAGS"] = f"{flags} {_FLAG}={cache}".strip()

        def keep_new() -> None:
            while not is_over.wait(_LOOK_EVERY_SECS):
                keep_programs(cache, store)

        # A thread: a ps worker has no loop of its own that could look.
        thread = threading.Thread(target=keep_new, name="compiled programs", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            keep_programs(cache, store)
            os.environ["TF_XLA_FLAGS"] = flags


def read_programs(store: str, cache: str) -> None:
    """Copies the programs in `store` to `cache`, without damaged ones."""
    with contextlib.suppress(OSError):
        for kept in sorted(os.listdir(store)):
            name, _, digest = kept.rpartition(".")
            with contextlib.suppress(OSError):
                path = shutil.copyfile(os.path.join(store, kept), os.path.join(cache, ".read"))
                if _digest(path) == digest:
                    os.rename(path, os.path.join(cache, name))


def keep_programs(cache: str, store: str) -> None:
    """Copies the programs in `cache` that `store` lacks there; a full disk only costs time."""
    with contextlib.suppress(OSError):
        new = {name for name in os.listdir(cache) if name.endswith(_SUFFIX)}
        if not new:
            return
        os.makedirs(store, exist_ok=True)
        for kept in os.listdir(store):
            name, _, digest = kept.rpartition(".")
            if name in new and _digest(os.path.join(store, kept)) == digest:
                new.remove(name)
        for name in new:
            source = os.path.join(cache, name)
            partial = tempfile.mkdtemp(dir=store)  # Other hosts may keep the same program now.
            copy = shutil.copy(source, partial)
            os.rename(copy, os.path.join(store, f"{name}.{_digest(source)}"))
            os.rmdir(partial)


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _processors() -> str:
    """A name for TensorFlow, XLA's flags and the processors for which it compiles here."""
    found = [platform.machine(), platform.processor(), str(tf.sysconfig.get_build_info())]
    found += [os.environ.get(name, "") for name in ("XLA_FLAGS", "TF_XLA_FLAGS")]
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        found += sorted({line for line in file if line.startswith(("flags", "Features"))})
    for gpu in tf.config.list_physical_devices("GPU"):
        found.append(str(tf.config.experimental.get_device_details(gpu)))
    name = hashlib.sha256(repr(found).encode()).hexdigest()[:12]
    return f"tensorflow-{tf.__version__}-{name}"
