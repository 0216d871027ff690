"""A proxy for downloads in the environment: the tasks of a cluster connect without it."""

import socketserver
import threading
from pathlib import Path

import pytest

from tests.cluster.runs import topologies, train

LINEAR = ("--config=tests/cluster/configs/linear.py", "--train_steps=20")


class RefusingProxy(socketserver.ThreadingTCPServer):
    """An HTTP proxy that answers every request with 403, and keeps the first lines."""

    daemon_threads = True

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        requests = self.requests

        class Refuse(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                requests.append(self.rfile.readline())
                self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        super().__init__(("127.0.0.1", 0), Refuse)


@pytest.mark.parametrize(
    "topology", topologies("multiworker-2", "ps-sync-2+1", nightly=("ps-2+1",))
)
def test_tasks_connect_to_each_other_without_the_proxy(topology: str, tmp_path: Path) -> None:
    # Without isolation: in its own network namespace a task could not reach the proxy.
    flags = (*LINEAR, "--isolate=off")
    with RefusingProxy() as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.server_address[1]}"
        env = dict.fromkeys(("grpc_proxy", "https_proxy", "http_proxy"), address)
        train(topology, tmp_path, *flags, env=env)
        proxy.shutdown()
    assert proxy.requests == []
