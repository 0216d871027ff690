"""No command prints TensorFlow's start-up lines, and nothing else is lost."""

import os

from tests.commands import run_python

NOISE = (
    "oneDNN custom operations",
    "Could not find cuda drivers",
    "failed call to cuInit",
    "absl::InitializeLog",
    "rebuild TensorFlow",
    "WARNING:absl",
)


def run(*argv: str, **env: str) -> str:
    """Standard error of `python argv`, which must end with 0."""
    clean = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    return run_python(*argv, env={**clean, **env}, check=True).stderr


def noise_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if any(noise in line for noise in NOISE)]


def test_noise_is_what_tensorflow_prints_if_the_user_asks_for_it() -> None:
    """Otherwise the other tests would prove nothing."""
    program = "from trainer.tf_setup import *; set_environment(); import_tensorflow()"
    assert noise_in(run("-c", program, TF_CPP_MIN_LOG_LEVEL="0"))
    assert not noise_in(run("-c", program, TF_CPP_MIN_LOG_LEVEL="2"))


def test_lines_that_are_not_noise_are_kept_whoever_writes_them() -> None:
    program = """
import os, sys
from data.system.compat import quiet
with quiet._start_up_lines_removed():
    os.write(2, b"from C++\\nI0000 oneDNN custom operations are on. ...\\nlast words")
    print("from Python", file=sys.stderr)
os.write(2, b", afterwards")
"""
    assert run("-c", program) == "from Python\nfrom C++\nlast words, afterwards"


def test_tensorflow_can_be_imported_by_any_module_and_again() -> None:
    program = """
from data.system.compat.quiet import quiet_tensorflow
quiet_tensorflow()
quiet_tensorflow()
import importlib, sys
from data.system.compat.scikit_learn import scikit_learn_left_out
with scikit_learn_left_out():  # It is slow to import.
    import keras, tensorflow
from tensorflow.core.protobuf import config_pb2
assert importlib.import_module("tensorflow") is tensorflow
assert not [finder for finder in sys.meta_path if "quiet" in type(finder).__module__]
"""
    assert run("-c", program) == ""
