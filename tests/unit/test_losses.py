"""TensorFlow's errors that the chief of parameter servers reports as a lost peer."""

import pytest
import tensorflow as tf

from strategies.base import PeerLostError
from strategies.ps.executor import losses_explained


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (tf.errors.UnavailableError(None, None, "gone"), "A parameter server was lost: gone"),
        (tf.errors.AbortedError(None, None, "restarted"), "server was lost: restarted"),
        (tf.errors.DeadlineExceededError(None, None, "silent"), "server was lost: silent"),
        (
            tf.errors.InternalError(
                None, None, "2 root error(s) found.\n  (0) Unable to parse request"
            ),
            r"A message to another task was damaged: \(0\) Unable to parse request",
        ),
    ],
)
def test_losses_are_reported_as_lost_peers(error: Exception, message: str) -> None:
    with pytest.raises(PeerLostError, match=message), losses_explained():
        raise error


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.InternalError(None, None, "of a kernel"),
        tf.errors.InvalidArgumentError(None, None, "Unable to parse request"),
    ],
)
def test_other_errors_are_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, losses_explained():
        raise error
    assert raised.value is error
