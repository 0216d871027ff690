"""Messages between real TensorFlow servers of this process."""

import queue
import threading
import time

import pytest
import tensorflow as tf
from tensorflow.python.client import session  # noqa: TID251

from data.system.cores import num_cores
from strategies.cluster.ports import free_ports
from strategies.cluster.tf_config import Cluster, ClusterError, Task, local_cluster
from strategies.ps import servers
from strategies.ps.servers import (
    Mailbox,
    ask_chief_to_stop,
    check_versions,
    end_servers,
    listen_for_stop,
    start_server,
)

WORKER, PS, GONE = Task("worker", 0), Task("ps", 0), Task("worker", 1)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """The cluster of a chief, with a worker and a ps that serve, and a worker that does not."""
    ports = iter(free_ports(4))
    sizes = {"chief": 1, "worker": 2, "ps": 1}
    jobs = {job: {i: f"localhost:{next(ports)}" for i in range(n)} for job, n in sizes.items()}
    cluster = Cluster(jobs, Task("chief", 0))
    for task in (WORKER, PS):
        start_server(cluster.for_task(task))
    return cluster


def test_messages_are_taken_in_the_order_in_which_they_were_put(cluster: Cluster) -> None:
    mailbox = Mailbox(cluster, WORKER, "order")
    assert all(mailbox.put(text, 10) for text in ("first", "second"))
    assert mailbox.size(10) == 2
    assert [mailbox.take(), mailbox.take()] == ["first", "second"]
    mailbox.put("third", 10)
    assert Mailbox(cluster, WORKER, "other").size(10) == 0
    assert Mailbox(cluster, PS, "order").size(10) == 0
    mailbox.clear(10)
    assert mailbox.size(10) == 0


def test_error_of_a_server_is_raised_without_a_traceback_of_the_thread_that_closes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise tf.errors.AbortedError(None, None, "Session 1 is not found.")

    printed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    monkeypatch.setattr(session.tf_session, "TF_CloseSession", fail)
    started = time.monotonic()
    with pytest.raises(tf.errors.DeadlineExceededError):
        Mailbox(cluster, WORKER, "empty").take(timeout_secs=0.2)
    assert time.monotonic() - started < 5
    assert printed == []


def test_unreached_servers_are_returned(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_MESSAGE_SECS", 2.0)
    assert end_servers(cluster, 75) == [GONE]
    assert [Mailbox(cluster, task, "end").take() for task in (WORKER, PS)] == ["75", "75"]


def test_chief_gets_stop_requests_but_not_those_to_an_earlier_chief(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(servers, "_TAKEN_SECS", 0.5)
        assert not ask_chief_to_stop(cluster.for_task(PS)), "there is no chief"
    Mailbox(cluster, PS, "stop").put("worker 7", 10)
    names: queue.Queue[str] = queue.Queue()
    listen_for_stop(cluster, names.put)
    assert ask_chief_to_stop(cluster.for_task(WORKER))
    assert names.get(timeout=10) == "worker 0"
    assert names.empty()


def test_each_chief_refuses_servers_of_other_versions(cluster: Cluster) -> None:
    mailbox = Mailbox(cluster, WORKER, "versions")
    mailbox.put('{"tensorflow": "2.20.0", "code": "a"}', 10)
    check_versions(cluster, [WORKER], {"tensorflow": "2.20.0", "code": "a"})
    with pytest.raises(ClusterError, match=r"worker 0.*tensorflow \(2.20.0 there, 2.21.0 here\)"):
        check_versions(cluster, [WORKER], {"tensorflow": "2.21.0", "code": "a"})


@pytest.mark.parametrize(("num_threads", "between_ops"), [(0, max(4, num_cores())), (1, 4), (9, 9)])
def test_server_has_the_threads_that_were_asked_for_and_enough_between_ops(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, between_ops: int
) -> None:
    made = []
    monkeypatch.setattr(tf.distribute, "Server", lambda *_, config, **__: made.append(config))
    start_server(local_cluster("ps", 1, 1).for_task(WORKER), num_threads)
    start_server(local_cluster("ps", 1, 1).for_task(WORKER), num_threads, op_threads=2)
    assert [config.intra_op_parallelism_threads for config in made] == [num_threads, 2]
    assert [config.inter_op_parallelism_threads for config in made] == [between_ops] * 2
