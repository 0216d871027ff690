"""What is found in a model directory before a run: its result, damage, and a disk without room."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disks import mounted
from trainer.checkpoints.checkpointer import ModelDirError
from trainer.checkpoints.file_checks import DiskError
from trainer.config import Config, load_recipe
from trainer.model_dir import check_model_dir, disk_errors_explained, finished_result
from trainer.preflight import num_replicas_here, preflight
from trainer.run_files import RunFiles

CONFIG = Config(dataset="digits", train_steps=100)
DONE: dict[str, Any] = {"exit_code": 0, "eval": {}}
EARLY = dataclasses.asdict(CONFIG.early_stopping)


@pytest.mark.parametrize(
    ("result", "is_finished"),
    [
        ({"step": 100, **DONE}, True),
        ({"step": 99, **DONE}, False),
        ({"step": 50, **DONE, "stopped_early_by": EARLY}, True),
        ({"step": 50, **DONE, "stopped_early_by": {**EARLY, "patience": 9}}, False),
        ({"step": 100, "exit_code": 75}, False),
        # Ended while a step was on devices that did not answer.
        ({"step": None, "exit_code": 75}, False),
        (None, False),
    ],
)
def test_only_a_run_of_enough_steps_that_ended_well_is_finished(
    result: dict[str, Any] | None, is_finished: bool, tmp_path: Path
) -> None:
    if result:
        (tmp_path / "result.json").write_text(json.dumps(result))
    assert finished_result(str(tmp_path), CONFIG) == (result if is_finished else None)


def test_replicas_of_a_host_are_its_gpus_or_one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus: list[str] = []
    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: gpus)
    assert num_replicas_here(None) == num_replicas_here(0) == 1
    gpus += ["GPU:0", "GPU:1"]
    assert num_replicas_here(None) == num_replicas_here(2) == 2
    assert num_replicas_here(0) == 1


@pytest.mark.parametrize(
    ("content", "damage"),
    [
        (b"", "Expecting value"),
        (b'{"step": 100, "exit_c', "Unterminated string"),
        (b'{"step": 100, "eval": {}}', "no 'exit_code'"),
        (b'{"exit_code": 0, "eval": {}}', "no 'step'"),
        (b'{"step": 100, "exit_code": 0}', "no 'eval'"),
        (b"[]", "a list"),
        (b"\xff\xfe\x00", "decode"),
        (b"\0" * 300, "Expecting value"),
        (b"[" * 100_000, "too deeply"),
    ],
)
def test_damaged_result_is_named_and_counts_as_missing(
    content: bytes, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    for _ in range(2):  # An evaluator reads it once a second.
        assert finished_result(str(tmp_path), CONFIG) is None
    (message,) = caplog.messages
    assert f"{path} is damaged" in message
    assert damage in message


def test_result_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    assert finished_result(str(tmp_path), CONFIG) is None
    with (
        pytest.raises(ModelDirError, match=r"cannot be written: Is a directory\. Give a directory"),
        disk_errors_explained(str(tmp_path)),
    ):
        RunFiles(str(tmp_path)).remove_result()


@pytest.mark.parametrize("name", ["tasks", "checkpoints", "tensorboard", "export", "evaluator"])
def test_file_in_the_place_of_a_directory_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ModelDirError, match=f"{name} is a file.* Move it"):
        check_model_dir(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "result.json", "metrics.jsonl"])
def test_directory_in_the_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ModelDirError, match=f"{name} is a directory.* Move it"):
        check_model_dir(str(tmp_path))


def test_full_disk_is_no_usage_error(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "size=32k", "tmpfs", at=tmp_path):
        with pytest.raises(DiskError, match=r"No space left on device\. Make room"):
            check_model_dir(f"{tmp_path}/run")
        assert list(tmp_path.iterdir()) == []


def test_disk_that_became_read_only_is_no_usage_error(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "tmpfs", at=tmp_path):
        check_model_dir(f"{tmp_path}/run")
        assert list(tmp_path.iterdir()) == []
        remount = ["mount", "-o", "remount,ro", str(tmp_path)]
        subprocess.run(remount, check=True)
        with pytest.raises(ModelDirError, match=r"Read-only file system\. Give a directory"):
            check_model_dir(f"{tmp_path}/run")
        subprocess.run([*remount[:2], "remount,rw", str(tmp_path)], check=True)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.json").write_text("{}")
        subprocess.run(remount, check=True)
        with pytest.raises(DiskError, match=r"Read-only file system\. Make room"):
            check_model_dir(f"{tmp_path}/run")


def test_no_place_for_temporary_files_is_explained() -> None:
    script = """
        for directory in /tmp /var/tmp /usr/tmp; do
            [ ! -d $directory ] || mount --bind $directory $directory || exit 99
            [ ! -d $directory ] || mount -o remount,bind,ro $directory || exit 99
        done
        cd /proc && exec "$@"
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "trainer"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])} | {"TMPDIR": ""},
        capture_output=True,
        text=True,
    )
    if done.returncode in (1, 99) and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    assert done.returncode == 2, done.stderr
    assert "export TMPDIR=DIR" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_check_says_how_large_tables_are(digits: Path, tmp_path: Path) -> None:
    recipe = load_recipe("tests/cluster/configs/tables.py")
    recipe.config.data_dir = str(digits)
    lines = preflight(recipe, str(tmp_path / "run")).describe(3, 0).splitlines()
    tables = [line.partition(": ")[2] for line in lines if line.startswith("table ")]
    # Rows of 8 numbers, and as many of Adagrad's accumulator.
    on_each = "on each parameter server 21,846 rows, 1,398,144 bytes"
    during = "rows of 8 are made for ids during training"
    sizes = f"65,536 rows of 8, 4,194,304 bytes with its slots; {on_each}"
    assert tables == [sizes, during, during]
