"""Reports for schedulers: a page of metrics for Prometheus, and the progress of Kubeflow's job.

    writers = progress_writers(socket.create_server(("", 9100)), model_dir, last_step=1000)

Both are few lines over the standard library: the page is plain text, so prometheus_client is not
needed. Neither ever ends a run.
"""

import http.server
import json
import logging
import os
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from typing_extensions import override

from strategies.metrics import Metrics
from trainer.exit_codes import first_line
from trainer.hooks.tracking import Background
from trainer.hooks.writers import Values, Writer
from trainer.run_files import NUM_STEPS, RESTARTS, directory_of_logs

log = logging.getLogger(__name__)

_URL, _CA_CERT, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
# Kubeflow asks for one message in 5 s at most, of 256 metrics with short names and values.
_KUBEFLOW_SECS, _MAX_METRICS, _MAX_LETTERS = 5.0, 256, 64
_POST_SECS = 10.0
_NOT_SENT = ("seconds", "examples", NUM_STEPS)  # The status has the progress in percent.


def progress_writers(
    listener: socket.socket | None, model_dir: str, last_step: int
) -> list[Writer]:
    """The page at `listener`, if it is given; reports to Kubeflow, if its variables are set."""
    writers: list[Writer] = []
    if listener:
        writers.append(MetricsPage(listener, model_dir, last_step))
    if os.environ.get(_URL):
        status = KubeflowStatus(os.environ, last_step)
        # Trackers, which come after it, need time, too.
        writers.append(Background(status, "Kubeflow", end_secs=_POST_SECS))
    return writers


def num_restarts(model_dir: str, environment: Mapping[str, str]) -> int:
    """The restarts of this run that its launcher has written down, and those by Slurm."""
    path = directory_of_logs(model_dir) / RESTARTS
    lines = path.read_text().count("\n") if path.is_file() else 0
    by_slurm = environment.get("SLURM_RESTART_COUNT", "0")
    return lines + (int(by_slurm) if by_slurm.isdigit() else 0)


class MetricsPage(Writer):
    """Serves the newest values at http://HOST:PORT/metrics, in Prometheus' text format."""

    def __init__(self, listener: socket.socket, model_dir: str, last_step: int) -> None:
        self._model_dir = model_dir
        self._lock = threading.Lock()
        # Name, with its labels -> value.
        self._values: dict[tuple[str, str], float] = {("last_step", ""): last_step}
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == "/metrics"
                body = page.text().encode() if is_known else b"The metrics are at /metrics.\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            @override
            def log_message(self, format: str, *arguments: object) -> None:
                pass  # Requests are no news.

        address = listener.getsockname()
        self._server = http.server.ThreadingHTTPServer(address, Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        threading.Thread(
            target=self._server.serve_forever, name="metrics page", daemon=True
        ).start()

    def text(self) -> str:
        """The page: a line for each value, after the type of its name."""
        restarts = num_restarts(self._model_dir, os.environ)
        with self._lock:
            values = sorted({**self._values, ("restarts_total", ""): restarts}.items())
        lines: list[str] = []
        for (name, labels), value in values:
            kind = f"# TYPE trainer_{name} {'counter' if name.endswith('_total') else 'gauge'}"
            if kind not in lines:
                lines.append(kind)
            lines.append(f"trainer_{name}{labels} {value}")  # Prometheus takes nan and inf, too.
        return "\n".join(lines) + "\n"

    @override
    def begin(self, step: int) -> None:
        self._set("step", "", step)

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        self._set("step", "", step)

    @override
    def write(self, step: int, split: str, values: Values) -> None:
        self._set("step", "", step)  # Not after the evaluation and the save of this step.
        for name, value in values.items():
            by_worker = value if isinstance(value, Mapping) else {"": value}
            for worker, number in by_worker.items():
                if isinstance(number, (int, float)):
                    label = f',worker="{worker}"' if worker else ""
                    self._set(name, f'{{split="{split}"{label}}}', number)

    def _set(self, name: str, labels: str, value: float) -> None:
        with self._lock:
            self._values[re.sub(r"\W", "_", name, flags=re.ASCII), labels] = value

    @override
    def end(self, step: int) -> None:
        self._server.shutdown()
        self._server.server_close()


class KubeflowStatus(Writer):
    """Posts the progress and the metrics of the last reports to Kubeflow's controller.

    Kubeflow Trainer 2.2 sets the variables in the pods of a TrainJob if its feature gate
    TrainJobStatus is on: the URL, and files with the certificate and a token that changes.
    """

    def __init__(self, environment: Mapping[str, str], last_step: int) -> None:
        self._url = environment[_URL]
        self._ca_cert = environment.get(_CA_CERT) or None
        self._token = environment.get(_TOKEN, "")
        self._last_step = last_step
        self._metrics: dict[str, str] = {}
        self._remaining_secs: int | None = None
        self._next = 0.0
        self._has_failed = False

    @override
    def write(self, step: int, split: str, values: Values) -> None:
        prefix = "" if split == "train" else f"{split}_"
        numbers = {
            f"{prefix}{name}"[:_MAX_LETTERS]: f"{value:.6g}"
            for name, value in values.items()
            if isinstance(value, (int, float)) and name not in _NOT_SENT
        }
        self._metrics |= numbers
        if rate := values.get("steps_per_sec"):
            self._remaining_secs = int(max(0, self._last_step - step) / rate)
        if time.monotonic() >= self._next:
            self._post(step)

    @override
    def end(self, step: int) -> None:
        self._post(step)

    def _post(self, step: int) -> None:
        metrics = [{"name": name, "value": value} for name, value in self._metrics.items()]
        status: dict[str, object] = {
            "progressPercentage": min(100, 100 * step // max(1, self._last_step)),
            "metrics": metrics[:_MAX_METRICS],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if self._remaining_secs is not None:
            status["estimatedRemainingSeconds"] = self._remaining_secs
        body = json.dumps({"trainerStatus": status}).encode()
        headers = {"Content-Type": "application/json"}
        try:
            if self._token:
                headers["Authorization"] = f"Bearer {Path(self._token).read_text().strip()}"
            request = urllib.request.Request(self._url, body, headers)
            context = ssl.create_default_context(cafile=self._ca_cert)
            with urllib.request.urlopen(request, timeout=_POST_SECS, context=context):
                pass
        except (OSError, ValueError) as error:
            if not self._has_failed:
                log.warning("Kubeflow does not take the status of this run: %s", first_line(error))
            self._has_failed = True
        self._next = time.monotonic() + _KUBEFLOW_SECS
