"""TensorFlow's errors that the chief of parameter servers reports as a lost peer."""

import contextlib

import pytest
import tensorflow as tf
from tensorflow import errors

from strategies.cluster.tf_config import local_cluster
from strategies.lost_peers import PeerLostError, losses_explained
from strategies.multiworker import MultiWorkerExecutor
from strategies.transfer import Transfer


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (errors.UnavailableError, "gone", "A parameter server was lost: gone"),
        (errors.AbortedError, "restarted", "A parameter server was lost: restarted"),
        (errors.DeadlineExceededError, "silent", "A parameter server was lost: silent"),
        (
            errors.InternalError,
            "Barrier failed because: task is set to ERROR: UNAVAILABLE: Task "
            "/job:worker/replica:0/task:3 heartbeat timeout.",
            "A worker was lost: Barrier failed because: task is set to ERROR",
        ),
        (
            errors.InternalError,
            "2 root error(s) found.\n  (0) Unable to parse request",
            r"A message to another task was damaged: \(0\) Unable to parse request",
        ),
        (
            errors.UnavailableError,
            "Graph execution error:\n\nDetected at node CollectiveReduceV2 defined at (most "
            "recent call last):\n<stack traces unavailable>\nDetected at node Other defined "
            'at (most recent call last):\n  File "/a.py", line 3, in run\n\n  File "/b.py", '
            "line 4, in sum\n\n2 root error(s) found.\n  (0) UNAVAILABLE: aborted by: a peer."
            "\n\t [[{{node Other}}]]",
            r"A parameter server was lost: \(0\) UNAVAILABLE: aborted by: a peer$",
        ),
        (
            errors.InvalidArgumentError,
            "2 root error(s) found.\n  (0) INVALID_ARGUMENT:  Unable to find the relevant "
            "tensor remote_handle: Op ID: 21, Output num: 0.",
            "A parameter server was lost: .*Unable to find the relevant tensor",
        ),
        (
            errors.InvalidArgumentError,
            "/job:ps/task:1 unknown device.",
            "A parameter server was lost: /job:ps/task:1 unknown device",
        ),
        (
            errors.NotFoundError,
            "'__inference_evaluate_9' is neither a type of a primitive operation nor a name of "
            "a function registered in binary running on host-7.",
            "A graph has not reached another task: '__inference_evaluate_9' is neither",
        ),
        (
            errors.CancelledError,
            "of a graph on /job:worker/task:1",
            "A parameter server was lost: of a graph",
        ),
        (
            errors.NotFoundError,
            "Resource a/b does not exist. /job:ps/task:0",
            "A parameter server was lost: Resource a/b",
        ),
    ],
)
def test_lost_peers_are_reported(kind: type[errors.OpError], text: str, message: str) -> None:
    with pytest.raises(PeerLostError, match=message), losses_explained():
        raise kind(None, None, text)


@pytest.mark.parametrize(
    "error",
    [
        errors.InternalError(None, None, "of a kernel"),
        errors.InvalidArgumentError(None, None, "Unable to parse request"),
        errors.InvalidArgumentError(None, None, "of a kernel on /job:worker/task:1"),
        errors.CancelledError(None, None, "The corresponding function is cancelled."),
        errors.NotFoundError(None, None, "The file x.tfrecord does not exist"),
        ValueError("unknown device"),
    ],
)
def test_other_errors_are_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, losses_explained():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InternalError(None, None, "Barrier failed because: task 3"), PeerLostError),
        (errors.CancelledError(None, None, "a peer gave up"), PeerLostError),
        (errors.InternalError(None, None, "of the runtime"), errors.InternalError),
    ],
)
def test_worker_that_dies_while_all_connect_is_a_loss(
    error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(**_: object) -> None:
        raise error

    monkeypatch.setattr("strategies.multiworker.wait_for_peers", lambda *_: {})
    monkeypatch.setattr("strategies.multiworker.interpreter_lock_released", contextlib.nullcontext)
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", connect)
    monkeypatch.setenv("TF_CONFIG", "")  # `connect` sets it.
    cluster = local_cluster("multiworker", 2, 0)
    with pytest.raises(kind):
        MultiWorkerExecutor.connect(cluster, Transfer("ring"))
