"""Errors of TensorFlow in a step, which are explained: no memory, and what XLA cannot compile."""

from collections.abc import Callable

import pytest
import tensorflow as tf

from data.system.errors import UsageError
from strategies.step_errors import memory_explained, reason_of_xla
from tests.unit.toy import Toy

# As Keras passes it on.
MESSAGE = """Exception encountered when calling Tile.call().

\x1b[1m{{function_node __wrapped__Tile}} OOM when allocating tensor with shape[60,9] \
by allocator GPU_0_bfc [Op:Tile]\x1b[0m

Arguments received"""


def test_lack_of_memory_is_explained_in_one_line() -> None:
    with pytest.raises(UsageError) as raised, memory_explained("Lower --batch_size"):
        raise tf.errors.ResourceExhaustedError(None, None, MESSAGE)
    assert str(raised.value).startswith(
        "There is not enough memory: OOM when allocating tensor with shape[60,9] by allocator "
        "GPU_0_bfc. Lower --batch_size. "
    )


def test_full_disk_is_no_lack_of_memory() -> None:
    with pytest.raises(tf.errors.ResourceExhaustedError), memory_explained("Lower --batch_size"):
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")


def test_lack_of_memory_in_a_step_names_what_was_used_and_what_a_replica_computes(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks_memory(num_steps: int) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, MESSAGE)

    monkeypatch.setattr("strategies.step_errors.peak_bytes", lambda: {"GPU:0": 3 << 29})
    monkeypatch.setattr(toy.executor, "_run", lacks_memory)
    said = r"\(at most in use before: GPU:0 1\.5 GiB\).*micro_batches.*a replica has 8 examples"
    with pytest.raises(UsageError, match=said):
        toy.executor.run(1)


def error_of(
    function: Callable[[tf.Tensor], tf.Tensor], argument: str | float
) -> tf.errors.OpError:
    compiled = tf.function(function, jit_compile=True, autograph=False)
    with pytest.raises(tf.errors.OpError) as raised:
        compiled(tf.constant(argument))
    error: tf.errors.OpError = raised.value
    return error


@pytest.mark.parametrize(
    ("function", "argument", "reason"),
    [
        (tf.strings.length, "a", "it takes no text."),
        (tf.strings.as_string, 1.0, "it lacks the operation AsString."),
    ],
)
def test_reason_is_one_sentence(
    function: Callable[[tf.Tensor], tf.Tensor], argument: str | float, reason: str
) -> None:
    assert reason_of_xla(error_of(function, argument)) == reason


def test_error_of_an_operation_is_not_of_xla() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        tf.debugging.assert_equal(tf.constant(1), tf.constant(2))
    assert reason_of_xla(raised.value) == ""
