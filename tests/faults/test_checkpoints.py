"""Disks that are full, read-only or wrong, and kills in the middle of a write."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from strategies.cluster.ports import free_ports
from strategies.cluster.tf_config import Cluster, Task, local_cluster
from tests.cluster.runs import (
    Process,
    Run,
    TrainOnce,
    assert_nothing_left,
    assert_same_bits,
    start,
    train,
)
from tests.damage import flip_bit
from tests.faults.disks import mounted

STEPS = 200
# More than a terminal, a report or a mark takes, and less than the variables: see slow.py.
LIMIT_BYTES = 100_000
ALONE = "mirrored-1"
QUICKLY = "--config.pause_secs=0"


FLAGS = (
    "--config=tests/cluster/configs/slow.py",
    "--config.checkpoint_every_steps=10",
    f"--train_steps={STEPS}",
)


@pytest.fixture
def undisturbed(train_once: TrainOnce) -> Run:
    return train_once(ALONE, *FLAGS, QUICKLY)


def wait_for_checkpoints(process: Process, number: int = 2) -> None:
    process.wait_until(lambda: len(complete_steps(process.model_dir)) >= number, "checkpoints")


def complete_steps(model_dir: Path) -> list[int]:
    """The steps of complete checkpoints."""
    marks = model_dir.glob("checkpoints/step-*/checkpoint.json")
    return sorted(int(mark.parent.name.partition("-")[2]) for mark in marks)


@contextlib.contextmanager
def full_disk(process: Process) -> Iterator[None]:
    """The file system of the run, a small one, is full, and stays so when the run removes files."""
    filler = process.model_dir.parent / "filler"
    is_over = threading.Event()

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            while not is_over.wait(0.01):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(4096))

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        yield
    finally:
        is_over.set()
        filling.join()
        filler.unlink()


@contextlib.contextmanager
def read_only_disk(process: Process) -> Iterator[None]:
    """The directory of the checkpoints takes no change."""
    directory = process.model_dir / "checkpoints"
    with mounted("--bind", str(directory), at=directory):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(directory)], check=True)
        yield


def limit_files(pid: int, num_bytes: int) -> None:
    """No file of a process may be larger. Needs no special right."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


@contextlib.contextmanager
def limited_files(process: Process) -> Iterator[None]:
    """No file of the run may be as large as its variables."""
    former = resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE)
    limit_files(process.popen.pid, LIMIT_BYTES)
    try:
        yield
    finally:
        resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, former)


Fault = Callable[[Process], contextlib.AbstractContextManager[None]]
FAULTS: dict[Fault, str] = {
    full_disk: "No space left on device",
    read_only_disk: "Read-only file system",
    limited_files: "File too large",
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for some checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs", at=disk):
        yield disk


@pytest.fixture(params=FAULTS, ids=lambda fault: fault.__name__)
def fault(request: pytest.FixtureRequest) -> Fault:
    chosen: Fault = request.param
    return chosen


@pytest.fixture
def model_dir(fault: Fault, request: pytest.FixtureRequest) -> Path:
    """Of a run to which `fault` can happen."""
    disk = request.getfixturevalue("small_disk" if fault is full_disk else "tmp_path")
    return Path(disk) / "run"


def test_run_outlives_a_disk_that_takes_no_checkpoint_for_a_while(
    fault: Fault, model_dir: Path, undisturbed: Run
) -> None:
    # More reports than fit into what is left of a block.
    often = ("--config.log_every_steps=1", "--config.pause_secs=0.03")
    with start(ALONE, model_dir, *FLAGS, *often) as process:
        wait_for_checkpoints(process)
        with fault(process):
            process.wait_until(
                lambda: process.warned("could not be written") > 2, "saves that fail"
            )
            before = complete_steps(model_dir)
            assert len(before) > 1, "a complete checkpoint was deleted for an incomplete one"
        process.wait_until(
            lambda: complete_steps(model_dir)[-1] > before[-1], "a save, tried again"
        )
        run = process.wait()
    reasons = re.findall(r"step-0*(\d+) could not be written: .*", run.stderr)
    assert len(reasons) > 2
    assert FAULTS[fault] in run.stderr
    assert not set(map(int, reasons)) & set(before)
    assert "Traceback" not in run.stderr
    assert all((path / "checkpoint.json").exists() for path in model_dir.glob("checkpoints/*"))
    assert_same_bits(run, undisturbed)

    lost = set(range(1, STEPS + 1)) - set(run.steps("train"))
    if fault is full_disk:
        assert lost, "no report was lost"
        lost_evaluations = len(undisturbed.metrics("eval")) - len(run.metrics("eval"))
        assert f"metrics.jsonl lacks {len(lost) + lost_evaluations} report(s)" in run.stderr
    else:
        assert not lost
        assert "lacks" not in run.stderr


def test_run_whose_last_state_cannot_be_saved_says_so_and_finishes_when_there_is_room(
    undisturbed: Run, small_disk: Path
) -> None:
    model_dir = small_disk / "run"
    with start(ALONE, model_dir, *FLAGS) as process:
        wait_for_checkpoints(process)
        with full_disk(process):
            before = complete_steps(model_dir)
            run = process.wait(exit_code=75)
            assert f"Step {STEPS} could not be saved" in run.stderr
            assert "Traceback" not in run.stderr
            assert complete_steps(model_dir)[-1] >= before[-1]
            assert complete_steps(model_dir)[-1] < STEPS
            assert not (model_dir / "result.json").exists()
            refused = train(ALONE, model_dir, *FLAGS, exit_code=75)
            assert "error: --model_dir=" in refused.stderr
            assert "No space left on device. Make room" in refused.stderr
            assert "Traceback" not in refused.stderr

    complete = train(ALONE, model_dir, *FLAGS)
    assert complete.result["step"] == STEPS
    assert_same_bits(complete, undisturbed)


def test_task_that_dies_on_a_full_disk_ends_with_75_and_resumes_when_there_is_room(
    undisturbed: Run, small_disk: Path
) -> None:
    model_dir = small_disk / "run"
    supervised = (*FLAGS, "--max_restarts=1")
    with start(ALONE, model_dir, *supervised) as process:
        wait_for_checkpoints(process)
        task = process.task("worker 0")
        with full_disk(process):
            process.wait_until(
                lambda: "could not be written" in process.output(), "a save that fails"
            )
            task.kill()
            run = process.wait(exit_code=75)
    assert "worker 0 (process" in run.stderr
    assert "died: signal 9 (Killed). Restarting all tasks now." in run.stderr
    assert "No space left on device. Make room" in run.stdout
    assert "Traceback" not in run.stderr + run.stdout

    complete = train(ALONE, model_dir, *FLAGS, QUICKLY)
    assert_same_bits(complete, undisturbed)


def suspend(task: psutil.Process) -> None:
    """Returns when all threads of `task` are stopped, which takes a moment."""
    task.suspend()
    threads = Path(f"/proc/{task.pid}/task")
    while any(") T " not in (thread / "stat").read_text() for thread in threads.iterdir()):
        time.sleep(0.001)


def test_model_dir_deleted_during_a_run_is_written_anew_and_said(
    undisturbed: Run, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    with start(ALONE, model_dir, *FLAGS, "--max_restarts=1") as process:
        wait_for_checkpoints(process)
        task = process.task("worker 0")
        suspend(task)  # So that it writes nothing while its directory is deleted.
        shutil.rmtree(model_dir)
        task.resume()
        run = process.wait()
    output = run.stdout + run.stderr
    assert f"{model_dir}/config.json was deleted before step" in output
    # By the launcher: the complete directory, unless the task has made it anew before.
    assert run.stderr.count("was deleted, with") == 1
    (step,) = run.result["files_deleted_before_steps"]
    assert run.config["strategy"] == "mirrored"
    assert run.steps("train")[-1] >= step
    assert "Traceback" not in output
    assert_same_bits(run, undisturbed)


@pytest.mark.parametrize(
    ("deleted", "message"),
    [
        (".", "{} was deleted, with all files of the run so far."),
        ("checkpoints", "has reports up to step"),
    ],
    ids=["all", "checkpoints"],
)
def test_files_deleted_before_a_restart_are_said(
    deleted: str, message: str, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    quick = (*FLAGS, "--train_steps=100", "--max_restarts=1")
    with start(ALONE, model_dir, *quick) as process:
        wait_for_checkpoints(process, 1)
        task = process.task("worker 0")
        suspend(task)
        shutil.rmtree(model_dir / deleted)
        task.kill()
        run = process.wait()
    # The launcher says the first on standard error; the second is in the output of the task.
    assert message.format(model_dir) in run.stderr + run.stdout
    assert "resuming" not in run.stdout
    assert run.result["step"] == 100


def test_all_tasks_end_with_75_where_the_chief_cannot_save_the_last_step(tmp_path: Path) -> None:
    topology = "multiworker-2"
    without_restarts = (*FLAGS, "--train_steps=100", "--max_restarts=0")
    with start(topology, tmp_path, *without_restarts) as process:
        wait_for_checkpoints(process, 1)
        limit_files(process.task("worker 0").pid, LIMIT_BYTES)
        run = process.wait(exit_code=75)
    assert "Step 100 could not be saved" in run.stdout + run.stderr
    assert run.result["exit_code"] == 75
    assert "could not be saved" in run.result["why"]
    assert max(complete_steps(tmp_path)) < 100

    complete = train(topology, tmp_path, *FLAGS, "--train_steps=100")
    assert complete.result["step"] == 100


def test_run_killed_in_the_middle_of_a_write_resumes_from_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    wide = (*FLAGS, "--config.units=6000", "--train_steps=100")

    def half_written() -> list[Path]:
        """The newest checkpoint, if it has files but no mark. (Older ones may be in removal.)"""
        newest = max(tmp_path.glob("checkpoints/step-*"))
        with contextlib.suppress(FileNotFoundError):
            if os.listdir(newest) and not (newest / "checkpoint.json").exists():
                return [newest]
        return []

    with start(ALONE, tmp_path, *wide) as process:
        wait_for_checkpoints(process, 1)
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, "was never seen in the middle of a write"
            if half_written():
                process.send(signal.SIGSTOP)
                if half_written():
                    break
                process.send(signal.SIGCONT)
        (damaged,) = half_written()
        before = complete_steps(tmp_path)
        process.send(signal.SIGKILL)
        assert process.wait_alone().exit_code == -signal.SIGKILL
    assert half_written() == [damaged]

    run = train(ALONE, tmp_path, *wide)
    assert f"resuming from step {before[-1]}\n" in run.stdout
    assert damaged.name in run.stderr
    undisturbed = train(ALONE, tmp_path / "undisturbed", *wide, QUICKLY)
    assert_same_bits(run, undisturbed)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    "name", ["multiworker-2", pytest.param("ps-sync-3+1", marks=pytest.mark.nightly)]
)
def test_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(
    name: str, tmp_path: Path
) -> None:
    quick = (*FLAGS, QUICKLY)
    undisturbed = train(name, tmp_path / "run", *quick, "--train_steps=60")
    shutil.copytree(tmp_path / "run", tmp_path / "damaged")
    (tmp_path / "damaged" / "result.json").unlink()
    newest = tmp_path / "damaged" / "checkpoints" / "step-00000060"
    data = newest / "variables.data-00000-of-00001"
    flip_bit(data, data.stat().st_size // 2)
    run = train(name, tmp_path / "damaged", *quick, "--train_steps=60")
    output = run.stdout + run.stderr
    assert f"{newest} is not complete: {data.name} has another checksum" in output
    assert "resuming from step 50\n" in run.stdout
    assert_same_bits(run, undisturbed)
    assert run.mark(newest.name)["step"] == 60


@pytest.mark.nightly
def test_evaluator_on_a_full_disk_asks_to_be_started_again(digits: Path, tmp_path: Path) -> None:
    flags = ("--config=tests/cluster/configs/linear.py", f"--data_dir={digits}")
    model_dir = tmp_path / "run"
    train("ps-2+1", model_dir, *flags, "--config.checkpoint_every_steps=20")
    # As if it were still training.
    (model_dir / "result.json").rename(tmp_path / "result.json")
    evaluations = model_dir / "evaluator"
    evaluations.mkdir()
    jobs = {**local_cluster("ps", 1, 1).jobs, "evaluator": {0: f"localhost:{free_ports(1)[0]}"}}
    env = {"TF_CONFIG": Cluster(jobs, Task("evaluator", 0)).tf_config()}
    argv = ("--strategy=ps", *flags, f"--model_dir={model_dir}")
    with mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", at=evaluations):
        with Process(argv, model_dir, env=env) as process:
            process.wait_until((evaluations / "metrics.jsonl").exists, "a report")
            with contextlib.suppress(OSError), (evaluations / "filler").open("wb", 0) as file:
                while True:
                    file.write(bytes(4096))
            (tmp_path / "result.json").rename(model_dir / "result.json")
            evaluator = process.wait_alone()
        assert "No space left on device" in evaluator.stderr
        assert evaluator.exit_code == 75
        (evaluations / "filler").unlink()
        with Process(argv, model_dir, env=env) as process:
            assert process.wait_alone().exit_code == 0
        step = json.loads((model_dir / "result.json").read_text())["step"]
        assert json.loads((evaluations / "result.json").read_text())["step"] == step
