"""Imports and memory settings, in new processes."""

import json
import os
import platform
from pathlib import Path

import pytest

from tests.commands import ROOT, run_python
from trainer.tf_setup import set_environment

IMPORTED = """
import json, sys
from trainer.tf_setup import import_tensorflow, set_environment
set_environment()
import_tensorflow()
has_sklearn = bool(sys.modules.get("sklearn"))
import keras, sklearn.base, tensorflow as tf
from tensorflow.python.eager import context
rewriting = context.context().config.graph_options.rewrite_options
print(json.dumps({
    "scikit_learn": has_sklearn,
    "keras_3": tf.keras.Model is keras.Model,
    "memory_optimizer": rewriting.memory_optimization != type(rewriting).NO_MEM_OPT,
}))
"""


def test_import_leaves_scikit_learn_and_the_memory_optimizer_out_and_takes_keras_3() -> None:
    """Whatever the environment says. The program imports scikit-learn afterwards."""
    done = run_python("-c", IMPORTED, TF_USE_LEGACY_KERAS="1", KERAS_BACKEND="jax", check=True)
    assert json.loads(done.stdout) == {
        "scikit_learn": False,
        "keras_3": True,
        "memory_optimizer": False,
    }


def test_error_of_a_library_is_not_blamed_on_keras_json(tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text('{"floatx": "float32"}')
    (tmp_path / "h5py.py").write_text("raise ValueError('h5py of mine')")
    program = "from trainer.tf_setup import import_tensorflow as i; i()"
    home = str(tmp_path)
    ended = run_python("-c", program, PYTHONPATH=f"{home}:{ROOT}", KERAS_HOME=home)
    assert ended.stderr.rstrip().endswith("ValueError: h5py of mine")


@pytest.mark.slow
def test_keras_alone_imports_scikit_learn() -> None:
    """Otherwise the special import would have no effect."""
    run_python("-c", "import keras, sys; assert sys.modules['sklearn']", check=True)


@pytest.mark.slow
def test_memory_optimizer_is_off_also_if_a_config_file_has_imported_keras() -> None:
    code = """
from data.system.compat.scikit_learn import scikit_learn_left_out
with scikit_learn_left_out():  # It is slow to import.
    import keras
from trainer.tf_setup import import_tensorflow; import_tensorflow()
from tensorflow.python.eager import context
options = context.context().config.graph_options.rewrite_options
assert options.memory_optimization == type(options).NO_MEM_OPT, options
"""
    run_python("-c", code, check=True)


PROXY, GRPC = "grpc.enable_http_proxy", "TF_GRPC_DEFAULT_OPTIONS"
CACHE, XLA = "--tf_xla_persistent_cache_directory", "TF_XLA_FLAGS"
IN_MEMORY = (
    f"{CACHE}=ram://compiled --tf_xla_persistent_cache_device_types=CPU "
    "--tf_xla_disable_strict_signature_checks"
)


@pytest.mark.parametrize(
    ("variable", "given", "added"),
    [
        (GRPC, "", f"{PROXY}=0"),
        (GRPC, "grpc.keepalive_time_ms=9", f",{PROXY}=0"),
        (GRPC, f"{PROXY}=1", ""),
        (XLA, "", IN_MEMORY),
        (XLA, "--tf_xla_auto_jit=1", f" {IN_MEMORY}"),
        (XLA, f"{CACHE}=/mine", ""),
        (XLA, "/file/with/flags", ""),
    ],
)
def test_options_are_added_to_those_of_the_user_which_take_precedence(
    variable: str, given: str, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, given)
    for _ in range(2):
        set_environment()
        assert os.environ[variable] == given + added


FAULTS = """
import os, resource, threading
from data.system.compat.freed_memory import keep_freed_memory

def take():
    for _ in range({times}):
        bytearray({num_bytes})

{call}
if {in_thread}:
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
else:
    take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
# More than glibc ever keeps by itself, and less than an arena; and more than an arena.
NUM_BYTES, MANY_BYTES, TIMES = 40 << 20, 80 << 20, 20


def pages_taken_again(
    call: str, num_bytes: int = NUM_BYTES, in_thread: bool = False, **variables: str
) -> int:
    """Pages that 20 blocks take from the system, one after the other, beyond those of the first."""

    def faults(times: int) -> int:
        program = FAULTS.format(call=call, times=times, num_bytes=num_bytes, in_thread=in_thread)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
        return int(run_python("-c", program, env={**env, **variables}, check=True).stdout)

    return faults(TIMES + 1) - faults(1)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_reused_unless_the_user_has_malloc_settings() -> None:
    all_pages = TIMES * NUM_BYTES // os.sysconf("SC_PAGE_SIZE")
    call = "keep_freed_memory()"
    assert pages_taken_again("") > all_pages / 2, "it is not needed any more"
    assert pages_taken_again(call) < all_pages / 10
    assert pages_taken_again(call, MALLOC_ARENA_MAX="2") > all_pages / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_of_threads_is_reused_on_few_cores() -> None:
    all_pages = TIMES * MANY_BYTES // os.sysconf("SC_PAGE_SIZE")

    def taken_again(num_cores: int) -> int:
        call = f"os.sched_getaffinity = lambda _: range({num_cores}); keep_freed_memory()"
        return pages_taken_again(call, MANY_BYTES, in_thread=True)

    assert taken_again(4) < all_pages / 10
    assert taken_again(64) > all_pages / 2, "all threads may as well have arenas of their own"
