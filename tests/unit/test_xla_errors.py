"""The reason for which XLA cannot compile a function is found in TensorFlow's own message."""

from collections.abc import Callable

import pytest
import tensorflow as tf

from trainer.step.xla_errors import described, is_of_xla


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
    error = error_of(function, argument)
    assert is_of_xla(error)
    assert described(error) == reason


def test_error_of_an_operation_is_not_of_xla() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        tf.debugging.assert_equal(tf.constant(1), tf.constant(2))
    assert not is_of_xla(raised.value)
