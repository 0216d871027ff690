"""multiworker before its first step: something else, or nothing, answers at a worker's address."""

import contextlib
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strategies.cluster.peers import greeting_at
from strategies.cluster.ports import free_ports
from strategies.cluster.rendezvous import Greeting, digest_of
from strategies.cluster.tf_config import Task
from tests.cluster.runs import Process, assert_one_error

STALLS = "--stall_timeout_secs=8"


def worker_0(addresses: list[str], model_dir: Path, digits: Path) -> Process:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    flags = ("--strategy=multiworker", f"--model_dir={model_dir}", f"--data_dir={digits}", STALLS)
    return Process(flags, model_dir, env={"TF_CONFIG": json.dumps(config)})


@contextlib.contextmanager
def listener(answer: Callable[[], bytes]) -> Iterator[str]:
    """The address of a program that answers each connection, or leaves it open without bytes."""
    open_connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    open_connections.append(connection)
                    if sent := answer():
                        connection.sendall(sent)
                        connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for connection in open_connections:
            connection.close()


def test_another_program_at_a_workers_address_is_named(digits: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with (
        listener(lambda: b"HTTP/1.0 400 Bad request\r\n\r\n") as address,
        worker_0([f"127.0.0.1:{port}", address], tmp_path, digits) as process,
    ):
        assert_one_error(
            process.wait(exit_code=2), "worker 1", address, "is not a TensorFlow server"
        )


@pytest.mark.parametrize("is_asked", [False, True], ids=["lost", "SIGTERM"])
def test_worker_that_is_frozen_while_all_connect_is_named_and_signals_work(
    is_asked: bool, digits: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    worker_1, is_frozen = Task("worker", 1), threading.Event()

    def answer() -> bytes:
        """What worker 1 sends when it has seen worker 0; nothing once it is frozen."""
        other = Greeting.decoded(greeting_at(f"127.0.0.1:{port}") or b"")
        if is_frozen.is_set() or other is None:
            return b""
        met = digest_of({worker_1: "b", other.task: other.process})
        return Greeting(worker_1, "b", met=met).encoded()

    with (
        listener(answer) as address,
        worker_0([f"127.0.0.1:{port}", address], tmp_path, digits) as process,
    ):
        connecting = "All 2 workers are there; connecting."
        process.wait_until(lambda: bool(process.warned(connecting)), connecting)
        is_frozen.set()
        if is_asked:
            # By now TensorFlow has replaced the handler of SIGTERM.
            process.wait_until(lambda: process.warned("has not answered") > 0, "the first warning")
            process.send(signal.SIGTERM)
        run = process.wait(40, exit_code=75)
        expected = "SIGTERM: this task ends at once" if is_asked else "worker 1 does not answer"
        assert expected in run.stderr
