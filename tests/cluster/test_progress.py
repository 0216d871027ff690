"""What a run reports to schedulers while it trains."""

import signal
import socket
import urllib.request
from pathlib import Path

from strategies.cluster.ports import free_ports
from tests.cluster.runs import assert_refused, start
from tests.unit.test_progress import Controller


def test_chief_serves_its_metrics_and_tells_kubeflow_while_it_trains(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    controller = Controller(tmp_path)
    page = ""

    def has_reports() -> bool:
        nonlocal page
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                page = answer.read().decode()
        except OSError:
            return False
        return 'trainer_loss{split="train"}' in page

    try:
        argv = ("--config=tests/cluster/configs/slow.py", f"--metrics_port={port}")
        with start("mirrored-1", tmp_path / "run", *argv, env=controller.environment) as process:
            process.wait_until(has_reports, "reports on the page")
            process.wait()
    finally:
        controller.close()
    assert 'trainer_examples_per_sec{split="train"}' in page
    assert "trainer_restarts_total 0\n" in page
    (_, first), *_, (_, last) = controller.received
    assert first["trainerStatus"]["progressPercentage"] < 100
    assert last["trainerStatus"]["progressPercentage"] == 100


def test_last_report_of_a_run_that_is_stopped_is_told_to_kubeflow(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    try:
        argv = ("--config=tests/cluster/configs/slow.py", "--config.log_every_steps=1000000")
        with start("mirrored-1", tmp_path / "run", *argv, env=controller.environment) as process:
            process.wait_until(lambda: "compiling" in process.output(), "training")
            process.send(signal.SIGTERM)
            run = process.wait(exit_code=75)
    finally:
        controller.close()
    (report,) = run.metrics("train")
    *_, (_, status) = controller.received
    sent = {metric["name"]: metric["value"] for metric in status["trainerStatus"]["metrics"]}
    assert sent["loss"] == f"{report['loss']:.6g}"


def test_port_of_metrics_that_is_in_use_is_one_error(digits: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flag = f"--metrics_port={taken.getsockname()[1]}"
        argv = (f"--model_dir={tmp_path / 'run'}", f"--data_dir={digits}", flag)
        assert_refused(argv, tmp_path / "run", flag, "in use", "Give another --metrics_port")
