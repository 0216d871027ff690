"""The page of metrics for Prometheus, and the reports to Kubeflow's controller."""

import datetime
import http.server
import json
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import make_ssl_devcert

from strategies.cluster.ports import free_ports
from strategies.metrics import Metrics
from tests.unit.test_cluster_sources import SLURM
from trainer.api.arguments import parsed
from trainer.flags.checks import metrics_listener
from trainer.hooks.progress import KubeflowStatus, MetricsPage, num_restarts, progress_writers

TRAIN = {
    "loss": 0.5,
    "steps_per_sec": 10.0,
    "examples_per_sec": 640.0,
    "examples": 6400,
    "worker_share": {"worker 0": 0.25, "worker 1": 0.75},
    "staleness": {"worker 0": {0: 3, 1: 4}},
}


def get(listener: socket.socket, path: str = "/metrics") -> str:
    port = listener.getsockname()[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return str(answer.read().decode())


@pytest.fixture
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


@pytest.fixture
def page(listener: socket.socket, tmp_path: Path) -> Iterator[MetricsPage]:
    made = MetricsPage(listener, str(tmp_path), last_step=1000)
    yield made
    made.end(1000)


def test_port_that_the_former_process_still_has_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as former:
        timer = threading.Timer(0.3, former.close)
        timer.start()
        with parsed(["--config=configs/digits.py", f"--metrics_port={former.getsockname()[1]}"]):
            listener = metrics_listener(is_chief=True)
        assert listener
        listener.close()
        timer.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "", "::1", "::", "ipv6.invalid"])
def test_page_is_served_at_addresses_of_both_versions(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    if host == "ipv6.invalid":  # A name that has only an address of IPv6.
        found = socket.getaddrinfo("::1", port, type=socket.SOCK_STREAM)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    flags = [f"--metrics_port={port}", f"--metrics_host={host}"]
    with parsed(["--config=configs/digits.py", *flags]):
        listener = metrics_listener(is_chief=True)
    monkeypatch.undo()
    assert listener
    page = MetricsPage(listener, str(tmp_path), last_step=10)
    ipv4, ipv6 = ["127.0.0.1"], ["[::1]"]
    addresses = {"::1": ipv6, "ipv6.invalid": ipv6, "::": ipv6 + ipv4}
    for reached in addresses.get(host, ipv4):
        with urllib.request.urlopen(f"http://{reached}:{port}/metrics", timeout=10) as answer:
            assert b"trainer_last_step 10" in answer.read()
    page.end(10)


def test_page_has_the_step_and_the_newest_values(
    page: MetricsPage, listener: socket.socket, tmp_path: Path
) -> None:
    page.begin(0)
    assert "trainer_step 0\n" in get(listener)
    page.write(100, "train", TRAIN)
    page.write(100, "eval", {"loss": 0.75, "best": float("nan")})
    assert "trainer_step 100\n" in get(listener)  # Before the step is evaluated and saved.
    page(110, Metrics())
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "restarts.jsonl").write_text("{}\n{}\n")
    assert get(listener).splitlines() == [
        "# TYPE trainer_best gauge",
        'trainer_best{split="eval"} nan',
        "# TYPE trainer_examples gauge",
        'trainer_examples{split="train"} 6400',
        "# TYPE trainer_examples_per_sec gauge",
        'trainer_examples_per_sec{split="train"} 640.0',
        "# TYPE trainer_last_step gauge",
        "trainer_last_step 1000",
        "# TYPE trainer_loss gauge",
        'trainer_loss{split="eval"} 0.75',
        'trainer_loss{split="train"} 0.5',
        "# TYPE trainer_restarts_total counter",
        "trainer_restarts_total 2",
        "# TYPE trainer_step gauge",
        "trainer_step 110",
        "# TYPE trainer_steps_per_sec gauge",
        'trainer_steps_per_sec{split="train"} 10.0',
        "# TYPE trainer_worker_share gauge",
        'trainer_worker_share{split="train",worker="worker 0"} 0.25',
        'trainer_worker_share{split="train",worker="worker 1"} 0.75',
    ]


def test_other_paths_are_not_found(page: MetricsPage, listener: socket.socket) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        get(listener, "/")
    with caught.value as error:
        assert b"/metrics" in error.read()


def test_restarts_of_a_launcher_and_by_slurm_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_restarts(str(tmp_path), {}) == 0
    assert num_restarts(str(tmp_path), {"SLURM_RESTART_COUNT": "3", **SLURM}) == 3
    assert num_restarts("s3://bucket/run", {}) == 0
    monkeypatch.chdir(tmp_path)
    logs = Path("runs/bucket/run/tasks")  # Of a run at a URL.
    logs.mkdir(parents=True)
    (logs / "restarts.jsonl").write_text("{}\n")
    for url in ("gs://bucket/run", "gs://bucket/run/", "s3://bucket/run", "hdfs:///bucket/run"):
        assert num_restarts(url, {}) == 1
    assert num_restarts("gs://other/run", {}) == 0, "it is another run"


class Controller:
    """Kubeflow's status server: HTTPS with a certificate of its own authority."""

    def __init__(self, directory: Path) -> None:
        self.received: list[tuple[str | None, Any]] = []
        self.arrived = threading.Semaphore(0)
        self.status = 200
        controller = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                controller.received.append((self.headers["Authorization"], body))
                self.send_response(controller.status)
                self.end_headers()
                controller.arrived.release()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        certificate, key = make_ssl_devcert(str(directory / "controller"), host="localhost")
        self._server = http.server.ThreadingHTTPServer(("localhost", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        (directory / "token").write_text("first\n")
        path = "apis/trainer.kubeflow.org/v1alpha1/namespaces/a/trainjobs/b/status"
        self.environment = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{self._server.server_port}/{path}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": certificate,
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(directory / "token"),
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path)
    yield made
    made.close()


def test_kubeflow_gets_the_progress_with_the_token_of_the_moment(
    controller: Controller, tmp_path: Path
) -> None:
    status = KubeflowStatus(controller.environment, last_step=1000)
    status.write(100, "train", TRAIN)
    assert controller.arrived.acquire(timeout=60)
    status.write(100, "eval", {"loss": 0.75})  # Too soon after the first.
    (tmp_path / "token").write_text("second\n")
    status.end(1000)
    (first, body), (second, last) = controller.received
    assert (first, second) == ("Bearer first", "Bearer second")
    sent = body["trainerStatus"]
    assert datetime.datetime.fromisoformat(sent.pop("lastUpdatedTime")).tzinfo
    assert sent == {
        "progressPercentage": 10,
        "estimatedRemainingSeconds": 90,
        "metrics": [
            {"name": "loss", "value": "0.5"},
            {"name": "steps_per_sec", "value": "10"},
            {"name": "examples_per_sec", "value": "640"},
        ],
    }
    assert last["trainerStatus"]["progressPercentage"] == 100
    assert {"name": "eval_loss", "value": "0.75"} in last["trainerStatus"]["metrics"]


@pytest.mark.parametrize("fault", ["status", "certificate", "token"])
def test_report_that_kubeflow_does_not_take_is_one_warning(
    fault: str, controller: Controller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = dict(controller.environment)
    if fault == "status":
        controller.status = 403
    elif fault == "certificate":
        del environment["KUBEFLOW_TRAINER_SERVER_CA_CERT"]
    else:
        (tmp_path / "token").unlink()
    status = KubeflowStatus(environment, last_step=1000)
    status.write(100, "train", TRAIN)
    status.end(1000)
    (record,) = caplog.records
    assert "Kubeflow does not take the status of this run" in record.getMessage()


def test_writers_are_those_that_are_asked_for(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert progress_writers(None, str(tmp_path), 10) == []
    for name, value in controller.environment.items():
        monkeypatch.setenv(name, value)
    (status,) = progress_writers(None, str(tmp_path), 10)
    status.write(10, "train", TRAIN)
    status.end(10)
    assert len(controller.received) == 2
