"""Which of TensorFlow's errors mean that the chief has lost another task.

    with losses_explained():
        coordinator.join()          # raises PeerLostError, which says what was lost

Such an error is not always UnavailableError. If TensorFlow cannot reach a parameter server while it
connects again to a worker, it considers that server restarted, and drops its variables. A graph
that is sent while a task is silent is lost without an error; the first call of it fails later.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from data.system.errors import reason_lines

_SERVER = "A parameter server was lost"

# DeadlineExceededError is that of a message.
LOSSES = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)

# Other errors: type, a part of the message, and what was lost. None: the resource that the caller
# waited for.
_FOUND_BY_MESSAGE = (
    # The task has been restarted, or TensorFlow considers it restarted: its tensors are gone.
    (tf.errors.InvalidArgumentError, "Unable to find the relevant tensor remote_handle", None),
    (tf.errors.InvalidArgumentError, "unknown device", None),
    (tf.errors.InvalidArgumentError, "Primary device is not remote", None),
    (
        tf.errors.NotFoundError,
        "is neither a type of a primitive operation nor a name of a function registered",
        "A graph has not reached another task",
    ),
    # The answer to a request with a damaged device name. Seen once or twice in hundreds of runs,
    # when several threads copied results of the first closures of a run or of an evaluation: most
    # likely a race inside TensorFlow, between a function that runs and one that is traced.
    (tf.errors.InternalError, "Unable to parse request", "A message to another task was damaged"),
    # A worker died while TensorFlow connected all workers of multiworker.
    (tf.errors.InternalError, "Barrier failed", "A worker was lost"),
)
# Errors that mean something else without the name of a remote device.
_FOUND_BY_DEVICE = (
    (tf.errors.CancelledError, ""),  # Of a graph on several tasks, because one of them was lost.
    (tf.errors.NotFoundError, "does not exist"),  # A resource of a task that was restarted.
    (tf.errors.FailedPreconditionError, "the variable was uninitialized"),
)
_DEVICE = "/job:"


class PeerLostError(RuntimeError):
    """Another task is lost. The last checkpoint is complete; restart to resume. Exit code 75."""

    def __init__(self, what: str, cause: Exception) -> None:
        """`what` says what happened; the first informative line of `cause` is appended to it."""
        reason = next(iter(reason_lines(cause)), type(cause).__name__)
        super().__init__(f"{what}: {reason[:200].rstrip('.:')}")


def loss_of(error: BaseException, what: str = _SERVER) -> str | None:
    """What was lost, if `error` means that another task was; None if it means something else.

    `what` was lost if the error does not say it.
    """
    if isinstance(error, (PeerLostError, *LOSSES)):
        return what
    message = str(error)
    for kind, part, found in _FOUND_BY_MESSAGE:
        if isinstance(error, kind) and part.lower() in message.lower():
            return found or what
    for kind, part in _FOUND_BY_DEVICE:
        if isinstance(error, kind) and part in message and _DEVICE in message:
            return what
    return None


@contextlib.contextmanager
def losses_explained(what: str = _SERVER) -> Iterator[None]:
    """Raises PeerLostError, which says `what`, if a server, a graph or a message was lost.

    In training a lost worker causes no error here: the coordinator handles it.
    """
    try:
        yield
    except tf.errors.OpError as error:
        lost = loss_of(error, what)
        if lost is None:
            raise
        raise PeerLostError(lost, error) from error
