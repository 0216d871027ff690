"""Runs from and to s3://, against moto's server behind a link that can be slow or cut."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.slow_link import SlowLink
from data.system import files, object_store
from tests.cluster.runs import ROOT, TIMEOUT_SECS, Process, Topology, assert_refused
from tests.s3 import link, needs_s3, url

__all__ = ["link", "url"]  # Fixtures.
pytestmark = [needs_s3, pytest.mark.nightly]

# A checkpoint of the digits' network, 0.5 MB, takes seconds.
_SLOW_BYTES_PER_SEC = 200e3


def start(topology: str, url: str, directory: Path, *flags: str) -> Process:
    """Starts a run at `url`. Its working directory is `directory`, which then has runs/."""
    argv = (
        *Topology(topology).argv,
        f"--config={ROOT}/configs/digits.py",
        f"--model_dir={url}/run",
        f"--data_dir={url}/digits",
        f"--data_cache_dir={directory}/copies",
        "--config.checkpoint_every_steps=20",
        "--config.log_every_steps=20",
        *flags,
    )
    return Process(argv, directory / "runs" / url.removeprefix("s3://") / "run", cwd=directory)


def is_there(link: SlowLink, url: str) -> bool:
    """Returns True if there is such an object. Asks the server, and not by the link."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    address = f"http://127.0.0.1:{link.to_port}/{bucket}?list-type=2&prefix={key}"
    with urllib.request.urlopen(address) as answer:
        return f"<Key>{key}</Key>" in answer.read().decode()


def checkpoint(url: str, step: int) -> str:
    return f"{url}/run/checkpoints/step-{step:08d}"


def reports(url: str, split: str) -> list[Any]:
    lines = map(json.loads, files.read_text(f"{url}/run/metrics.jsonl").splitlines())
    return [line["step"] for line in lines if line["split"] == split]


def test_run_killed_during_an_upload_resumes_under_other_strategies(
    link: SlowLink, url: str, digits: Path, tmp_path: Path
) -> None:
    object_store.upload_tree(str(digits), f"{url}/digits")
    link.bytes_per_sec = _SLOW_BYTES_PER_SEC
    with start("mirrored-1", url, tmp_path, "--train_steps=60") as process:
        first = f"{checkpoint(url, 20)}/checkpoint.json"
        process.wait_until(lambda: is_there(link, first), "first checkpoint")
        num_sent = link.num_sent
        link.bytes_per_sec = _SLOW_BYTES_PER_SEC / 10
        process.wait_until(lambda: link.num_sent > num_sent + 100_000, "second upload")
        process.send(signal.SIGKILL)
        process.popen.wait()
    link.bytes_per_sec = 1e9
    assert not is_there(link, f"{checkpoint(url, 40)}/checkpoint.json"), "killed too late"
    with start("multiworker-2", url, tmp_path, "--train_steps=60") as process:
        run = process.wait()
    assert "resuming from step 20" in run.stdout
    assert reports(url, "train") == [20, 40, 60]
    for step in (20, 40, 60):
        assert "checkpoint.json" in files.names_in(checkpoint(url, step))
    assert {"worker-0.log", "worker-1.log"} <= set(files.names_in(f"{url}/run/tasks"))
    assert "train" in files.names_in(f"{url}/run/tensorboard")
    # Workers of ps read complete copies.
    with start("ps-sync-1+1", url, tmp_path, "--train_steps=80") as process:
        run = process.wait()
    assert "resuming from step 60" in run.stdout
    assert json.loads(files.read_text(f"{url}/run/result.json"))["step"] == 80
    assert reports(url, "train") == [20, 40, 60, 80]
    assert "model.keras" in files.names_in(f"{url}/run/export")
    assert predictions(f"{url}/run") == 3


def predictions(model_dir: str) -> int:
    """The number of lines that trainer.predict prints."""
    flags = [f"--model_dir={model_dir}", "--num_examples=3"]
    argv = [sys.executable, "-m", "trainer.predict", *flags]
    output = subprocess.check_output(argv, text=True, timeout=TIMEOUT_SECS, cwd=ROOT)
    return len([json.loads(line) for line in output.splitlines()])


def test_bucket_that_fails_is_survived_as_a_full_disk_is(
    link: SlowLink, url: str, digits: Path, tmp_path: Path
) -> None:
    object_store.upload_tree(str(digits), f"{url}/digits")
    flags = ("--train_steps=100", "--config.export=false")
    link.bytes_per_sec = _SLOW_BYTES_PER_SEC
    with start("mirrored-1", url, tmp_path, *flags) as process:
        first = f"{checkpoint(url, 20)}/checkpoint.json"
        process.wait_until(lambda: is_there(link, first), "first checkpoint")
        link.is_open = False
        run = process.wait(exit_code=75)
    assert "could not be written" in run.stderr
    assert "Step 100 could not be saved" in run.stderr
    assert "step 100/100  train" in run.stdout, "training did not continue"
    assert "Traceback" not in run.stderr
    # What cannot be reached at the start is not a mistake of the user.
    with start("mirrored-1", url, tmp_path, *flags) as process:
        run = process.wait(exit_code=75)
    assert "Traceback" not in run.stderr
    assert "Start again" in run.stderr
    link.is_open, link.bytes_per_sec = True, 1e9
    with start("mirrored-1", url, tmp_path, *flags) as process:
        run = process.wait()
    assert "resuming from step " in run.stdout
    assert reports(url, "train") == [20, 40, 60, 80, 100]


def test_mistakes_are_found_before_anything_starts(
    link: SlowLink, url: str, tmp_path: Path
) -> None:
    (tmp_path / "obstore.py").write_text("raise ImportError('not installed')\n")
    without, none = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, tmp_path / "none"
    flags = [f"--model_dir={url}"]
    assert_refused(flags, none, "needs the package obstore", "pip install", env=without)
    flags = ["--strategy=multiworker", "--isolate=on", f"--data_dir={url}"]
    assert_refused(flags, none, "--isolate=on", url, "--isolate=auto")
    flags = ["--model_dir=s3://no-bucket-here/run"]
    assert_refused(flags, none, *flags, "no such bucket")
    flags = [f"--data_dir={url}/nothing", f"--model_dir={tmp_path}/run"]
    assert_refused(flags, none, f"{url}/nothing", "--data_dir=DIR")
