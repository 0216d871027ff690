"""Which of TensorFlow's errors the chief of parameter servers takes for a loss."""

import pytest
import tensorflow as tf

from strategies.base import PeerLostError
from strategies.ps import losses_explained


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (tf.errors.UnavailableError(None, None, "gone"), "A parameter server was lost: gone"),
        (tf.errors.AbortedError(None, None, "restarted"), "server was lost: restarted"),
        (tf.errors.DeadlineExceededError(None, None, "silent"), "server was lost: silent"),
        (
            tf.errors.InternalError(
                None, None, "2 root error(s) found.\n  (0) Unable to parse request"
            ),
            r"A message to another task was torn: \(0\) Unable to parse request",
        ),
    ],
)
def test_losses_are_told_apart_from_bugs(error: Exception, told: str) -> None:
    with pytest.raises(PeerLostError, match=told), losses_explained():
        raise error


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.InternalError(None, None, "of a kernel"),
        tf.errors.InvalidArgumentError(None, None, "Unable to parse request"),
    ],
)
def test_bugs_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, losses_explained():
        raise error
    assert raised.value is error
