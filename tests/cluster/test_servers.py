"""Servers of a chief: how they learn their task, how they wait for the chief, and how they end."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strategies.cluster.ports import free_ports
from strategies.cluster.tf_config import Cluster, Task, local_cluster
from tests.cluster.runs import Process, assert_one_error, by_hand, read_metrics, run, train

LINEAR = ("--config=tests/cluster/configs/linear.py", "--num_threads=1", "--train_steps=60")
CHIEF, PS = Task("chief", 0), Task("ps", 0)
WORKER_0, WORKER_1 = Task("worker", 0), Task("worker", 1)


def test_servers_end_by_themselves_when_the_chief_is_killed(tmp_path: Path) -> None:
    cluster = local_cluster("ps", 2, 1)
    flags = ("--config=tests/cluster/configs/slow.py", "--num_threads=1")
    with by_hand(cluster, tmp_path, *flags, "--chief_timeout_secs=3") as tasks:
        tasks.start_all()
        tasks["chief 0"].wait_for_step(20)
        tasks["chief 0"].send(signal.SIGKILL)
        assert tasks["chief 0"].wait_alone().exit_code == -signal.SIGKILL
        ends = tasks.wait(75, -signal.SIGKILL)
    assert [ends[str(task)].exit_code for task in (WORKER_0, WORKER_1, PS)] == [75, 75, 75]
    assert "chief 0" in ends["ps 0"].stderr
    assert "has not answered" in ends["ps 0"].stderr


def test_servers_end_by_themselves_when_no_chief_comes(tmp_path: Path) -> None:
    cluster = local_cluster("ps", 1, 1)
    with by_hand(cluster, tmp_path, "--chief_timeout_secs=2", data=False) as tasks:
        tasks.start(PS)
        tasks.wait(75)


def test_server_waits_as_long_as_the_chief_is_there_though_a_worker_is_late(tmp_path: Path) -> None:
    cluster = local_cluster("ps", 2, 1)
    flags = (*LINEAR, "--chief_timeout_secs=4")
    with by_hand(cluster, tmp_path, *flags) as tasks:
        # Started in the order in which they take longest to be there.
        tasks.start(CHIEF, PS, WORKER_0)
        ps = tasks["ps 0"]
        ps.wait_until(lambda: "ps 0 serves at" in ps.output(), "word that it serves")
        with pytest.raises(subprocess.TimeoutExpired):
            ps.popen.wait(5.0)  # Longer than its --chief_timeout_secs.
        tasks.start(WORKER_1)
        tasks.wait()


# Executes `python -m trainer FLAGS` with a time limit for unknown hosts of a second, not a minute.
IMPATIENT = """
import sys
from strategies.cluster import peers
from trainer.__main__ import run_from_command_line

sys.argv = sys.argv[sys.argv.index("trainer") :]
peers._UNKNOWN_HOST_SECS = 1.0
run_from_command_line()
"""


def test_unknown_host_ends_the_run_with_75_after_a_minute(digits: Path, tmp_path: Path) -> None:
    addresses = [*(f"localhost:{port}" for port in free_ports(2)), "unknown.invalid:1"]
    jobs = {job: {0: addresses.pop()} for job in ("worker", "ps", "chief")}
    env = {"TF_CONFIG": Cluster(jobs, CHIEF).tf_config()}
    argv = (*LINEAR, f"--data_dir={digits}", "--strategy=ps", f"--model_dir={tmp_path}")
    impatient = (sys.executable, "-c", IMPATIENT)
    ended = run(argv, tmp_path, exit_code=75, env=env, under=impatient)
    assert "the host of worker 0 (unknown.invalid:1) is unknown for 1 s" in ended.stderr
    assert "Correct its name, or start this task again" in ended.stderr
    assert not (tmp_path / "config.json").exists()


@pytest.mark.nightly
def test_second_chief_of_the_same_servers_is_told_to_wait(digits: Path, tmp_path: Path) -> None:
    cluster = local_cluster("ps", 1, 1)
    slow = ("--config=tests/cluster/configs/slow.py", "--num_threads=1", f"--data_dir={digits}")
    with by_hand(cluster, tmp_path / "first", *slow, "--train_steps=1000000") as tasks:
        tasks.start_all()
        first = tasks["chief 0"]
        first.wait_for_step(20)
        other = cluster.with_chief(f"localhost:{free_ports(1)[0]}")
        second = tmp_path / "second"
        flags = ("--strategy=ps", *slow, f"--model_dir={second}")
        with Process(flags, second, env={"TF_CONFIG": other.tf_config()}) as process:
            refused = process.wait_alone()
        assert refused.exit_code == 75
        assert cluster.jobs["chief"][0] in refused.stderr
        first.wait_for_more_steps(20)
        first.send(signal.SIGTERM)
        tasks.wait(75)


def test_second_process_of_one_identity_is_refused(tmp_path: Path) -> None:
    cluster = local_cluster("ps", 1, 1)
    flags = ("--chief_timeout_secs=60", "--num_threads=1")
    with by_hand(cluster, tmp_path, *flags, data=False) as tasks:
        tasks.start(PS)
        first = tasks["ps 0"]
        first.wait_until(lambda: "ps 0 serves at" in first.output(), "word that it serves")
        env = {"TF_CONFIG": cluster.for_task(PS).tf_config()}
        with Process(("--strategy=ps", f"--model_dir={tmp_path}"), tmp_path, env=env) as second:
            said = ("Another process is ps 0 already", "end the other")
            assert_one_error(second.wait_alone(), *said)
        assert first.popen.poll() is None
        first.send(signal.SIGTERM)
        tasks.wait(75)


def test_evaluator_follows_the_checkpoints_and_evaluates_the_last(tmp_path: Path) -> None:
    trained = local_cluster("ps", 1, 1)
    jobs = {**trained.jobs, "evaluator": {0: f"localhost:{free_ports(1)[0]}"}}
    cluster = Cluster(jobs, CHIEF)
    hold_dir = tmp_path / "hold"
    hold_dir.mkdir()
    (hold_dir / "pause").touch()
    counting = ("--config=tests/cluster/configs/counting.py", f"--config.hold_dir={hold_dir}")
    calls = ("--train_steps=200", "--config.steps_per_call=5", "--config.checkpoint_every_steps=20")
    flags = (*counting, *calls, "--num_threads=1")
    model_dir = tmp_path / "run"
    followed = model_dir / "evaluator" / "metrics.jsonl"
    with by_hand(cluster, model_dir, *flags) as tasks:
        tasks.start_all()
        tasks["chief 0"].wait_until(followed.exists, "a report of the evaluator")
        (hold_dir / "pause").unlink()
        runs = tasks.wait()
    assert "eval " not in runs["chief 0"].stdout
    assert runs["chief 0"].metrics("eval") == []
    assert runs["chief 0"].result["eval"] == {}
    reports = read_metrics(model_dir / "evaluator")
    assert reports[-1]["step"] == runs["chief 0"].result["step"]
    assert len(reports) > 1, "it only saw the last checkpoint"
    assert all(report["split"] == "eval" and report["examples"] == 360 for report in reports)
    result = json.loads((model_dir / "evaluator" / "result.json").read_text())
    assert result["step"] == reports[-1]["step"]
    assert result["eval"]["loss"] == reports[-1]["loss"] == -result["step"], "minus the weight"
    assert list((model_dir / "tensorboard" / "eval").iterdir())
    best = min(reports, key=lambda report: report["loss"])
    assert f"best-{best['step']:08d}" in runs["chief 0"].checkpoints()


@pytest.mark.nightly
def test_evaluator_says_that_the_last_checkpoint_cannot_be_read(
    digits: Path, tmp_path: Path
) -> None:
    flags = (*LINEAR, f"--data_dir={digits}")
    trained = train("ps-2+1", tmp_path, *flags, "--config.checkpoint_every_steps=20")
    newest = max(path for path in (tmp_path / "checkpoints").glob("step-*"))
    for data in newest.glob("variables.data*"):
        data.write_bytes(bytes(byte ^ 255 for byte in data.read_bytes()))
    jobs = {**local_cluster("ps", 1, 1).jobs, "evaluator": {0: f"localhost:{free_ports(1)[0]}"}}
    env = {"TF_CONFIG": Cluster(jobs, Task("evaluator", 0)).tf_config()}
    argv = ("--strategy=ps", *flags, f"--model_dir={tmp_path}")
    with Process(argv, tmp_path, env=env) as process:
        evaluator = process.wait_alone()
    assert_one_error(evaluator, str(trained.result["step"]), "could be read", "complete")
