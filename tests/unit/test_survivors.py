"""After the loss of a worker: one checkpoint of the furthest step, never over a better one."""

import concurrent.futures
import contextlib
import functools
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from data.system import files
from data.tfrecord.split import Split
from strategies.cluster.ports import free_ports, held
from strategies.cluster.tf_config import Cluster, Task
from strategies.mirrored import MirroredExecutor
from strategies.position import Position, Reached
from tests.damage import flip_bit
from tests.unit.test_checkpointer import Gate
from tests.unit.toy import Toy, assert_restores, file_size_limit
from trainer.checkpoints import survivors
from trainer.checkpoints.last_step import save_last_complete_step


class Lost(MirroredExecutor):
    """An executor whose variables are between two steps."""

    @override
    def return_to_complete_step(self) -> Reached | None:
        return None


def port_of(cluster: Cluster, index: int) -> int:
    return int(cluster.address_of(Task("worker", index)).rpartition(":")[2])


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """The cluster that worker 1 sees; no worker runs."""
    ports = free_ports(3)
    return Cluster(
        {"worker": {i: f"127.0.0.1:{port}" for i, port in enumerate(ports)}}, Task("worker", 1)
    )


def trained(split: Split, model_dir: Path, num_steps: int, **options: Any) -> Toy:
    toy = Toy(split, model_dir, executor=options.pop("executor", MirroredExecutor), **options)
    toy.start()
    toy.executor.run(num_steps)
    return toy


def save(toy: Toy, cluster: Cluster) -> None:
    write = functools.partial(survivors.write_once, cluster=cluster)
    save_last_complete_step(toy.executor, toy.learner, toy.checkpointer, write)


def lock_of(toy: Toy, step: int, task: str) -> Path:
    path = Path(toy.model_dir, "checkpoints/claims", f"step-{step:08d}.0")
    path.parent.mkdir(parents=True)
    path.write_text(task)
    return path


def test_last_step_is_saved_as_a_checkpoint_from_which_a_run_continues(
    split: Split, tmp_path: Path, cluster: Cluster
) -> None:
    toy = trained(split, tmp_path, 7)
    unfinished = tmp_path / "checkpoints/step-00000007"  # Of a dead chief.
    unfinished.mkdir(parents=True)
    (unfinished / "variables.index").write_bytes(b"half")
    save(toy, cluster)

    assert toy.checkpoints() == ["claims", "step-00000007"]
    assert list((tmp_path / "checkpoints/claims").iterdir()) == []
    assert_restores(split, tmp_path, 7, toy.state())


@pytest.mark.slow
def test_checkpoint_of_a_later_or_the_same_step_stays_as_it_is(
    split: Split, tmp_path: Path, cluster: Cluster
) -> None:
    chief = trained(split, tmp_path, 5)
    chief.checkpointer.save(5, chief.executor.position, {})
    chief.checkpointer.wait()
    mark = tmp_path / "checkpoints/step-00000005/checkpoint.json"
    before = mark.read_bytes(), mark.stat().st_mtime_ns
    for num_steps in (5, 3):
        save(trained(split, tmp_path, num_steps), cluster)
        assert (mark.read_bytes(), mark.stat().st_mtime_ns) == before
        assert "step-00000003" not in chief.checkpoints()


def test_other_checkpoints_stay_though_this_worker_did_not_write_them(
    split: Split, tmp_path: Path, cluster: Cluster
) -> None:
    survivor = trained(split, tmp_path, 6, keep=1)
    chief = trained(split, tmp_path, 0, keep=3)
    for step in (2, 4):
        chief.executor.run(2)
        chief.checkpointer.save(step, chief.executor.position, {})
    chief.checkpointer.wait()
    save(survivor, cluster)
    assert chief.checkpoints() == ["claims", "step-00000002", "step-00000004", "step-00000006"]


@pytest.mark.parametrize("at_most", [None, 6], ids=["damaged", "damaged for another task"])
def test_later_checkpoint_that_a_restart_skipped_counts_when_it_is_written_anew(
    at_most: int | None, split: Split, tmp_path: Path, cluster: Cluster
) -> None:
    Toy(split, tmp_path, keep=9).train_and_save(3, 7)
    if at_most is None:
        flip_bit(tmp_path / "checkpoints/step-00000007/variables.index", 7)
    survivor, other = Toy(split, tmp_path), Toy(split, tmp_path, keep=9)
    for toy in (survivor, other):
        assert toy.restore(at_most).step == 3
        toy.start(Position(3))
        toy.executor.run(2)
    save(survivor, cluster)
    assert "step-00000005" in survivor.checkpoints()

    other.executor.run(2)
    other.checkpointer.save_for_restart(7, Position(7), {})
    assert other.checkpointer.has_saved(7)
    survivor.executor.run(1)
    save(survivor, cluster)
    assert "step-00000006" not in survivor.checkpoints()


def assert_waits_for(writer: Toy, toy: Toy, cluster: Cluster, secs: float) -> None:
    """`toy` waits `secs` until `writer` has saved step 4, and does not save it, too."""
    directory = Path(toy.model_dir, "checkpoints")
    mark = directory / "step-00000004/checkpoint.json"
    waiting = threading.Thread(target=save, args=(toy, cluster))
    waiting.start()
    waiting.join(timeout=secs)
    assert waiting.is_alive(), "it did not wait"
    assert not mark.exists()
    writer.checkpointer.save(4, writer.executor.position, {})
    writer.checkpointer.wait()
    written = mark.stat().st_ino
    waiting.join(timeout=30)
    assert not waiting.is_alive()
    assert mark.stat().st_ino == written, "it wrote the step, too"


@pytest.mark.slow
def test_worker_waits_for_the_writer_of_its_step(
    split: Split, tmp_path: Path, cluster: Cluster
) -> None:
    toy, writer = trained(split, tmp_path, 4), trained(split, tmp_path, 4)
    lock = lock_of(toy, 4, "worker 2")
    with held(port_of(cluster, 2)):  # The writer lives.
        assert_waits_for(writer, toy, cluster, 1.0)
    assert lock.exists()


@pytest.mark.parametrize(
    ("step", "lives"), [(4, False), (3, True)], ids=["of a dead writer", "of an earlier step"]
)
def test_lock_holds_no_worker_back(
    step: int, lives: bool, split: Split, tmp_path: Path, cluster: Cluster
) -> None:
    toy = trained(split, tmp_path, 4)
    lock_of(toy, step, "worker 2")
    with held(port_of(cluster, 2)) if lives else contextlib.nullcontext():
        save(toy, cluster)
    assert "step-00000004" in toy.checkpoints()


@pytest.mark.slow
def test_chief_that_is_left_writes_first(
    split: Split, tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivors, "_CHIEF_SECS", 2.0)
    toy, chief = trained(split, tmp_path, 4), trained(split, tmp_path, 4)
    with held(port_of(cluster, 0)):
        assert_waits_for(chief, toy, cluster, 0.5)
        # A chief that does nothing does not hold the others back for long.
        toy.executor.run(1)
        save(toy, cluster)
    assert "step-00000005" in toy.checkpoints()


@pytest.mark.slow
def test_worker_waits_for_the_chief_that_was_writing_its_step_before_the_loss(
    split: Split, tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivors, "_CHIEF_SECS", 0.5)
    toy, chief = trained(split, tmp_path, 4), trained(split, tmp_path, 4)
    gate = Gate(monkeypatch)
    chief.checkpointer.save(4, chief.executor.position, {})
    assert gate.come.acquire(timeout=60)
    of_chief = Cluster(cluster.jobs, Task("worker", 0))
    savers = [
        threading.Thread(target=save, args=args) for args in ((chief, of_chief), (toy, cluster))
    ]
    with held(port_of(cluster, 0)):
        for saver in savers:
            saver.start()
        assert not gate.come.acquire(timeout=2), "the worker wrote the step, too"
        gate.is_open.set()
        for saver in savers:
            saver.join(timeout=60)
    assert_restores(split, tmp_path, 4, toy.state())


def test_full_disk_is_logged_and_leaves_no_lock(
    split: Split, tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    toy = trained(split, tmp_path, 4)
    with file_size_limit(100), caplog.at_level(logging.WARNING):
        save(toy, cluster)
    assert "step-00000004 could not be written" in caplog.text
    assert [name for name in toy.checkpoints() if name.startswith("step-")] == []
    assert list((tmp_path / "checkpoints/claims").iterdir()) == []


def test_state_between_two_steps_and_damaged_state_are_not_saved(
    split: Split, tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    save(trained(split, tmp_path, 4, executor=Lost), cluster)
    assert "of no complete step" in caplog.text
    toy = trained(split, tmp_path, 4)
    toy.learner.variables[0].assign(toy.learner.variables[0] * np.nan)
    save(toy, cluster)
    assert "Step 4 is not saved" in caplog.text
    assert not (tmp_path / "checkpoints").exists()


def test_one_of_many_threads_creates_a_file(tmp_path: Path) -> None:
    path, barrier = str(tmp_path / "lock"), threading.Barrier(8)

    def create(number: int) -> bool:
        barrier.wait()
        return files.create_new(path, b"%d" % number)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        created = list(pool.map(create, range(8)))
    assert [number for number in range(8) if created[number]] == [int(Path(path).read_text())]


def test_wait_for_a_slow_writer_ends(
    split: Split,
    tmp_path: Path,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(survivors, "_WAIT_SECS", 0.5)
    toy = trained(split, tmp_path, 4)
    lock_of(toy, 4, "worker 2")
    with held(port_of(cluster, 2)):
        save(toy, cluster)
    assert "has not saved step 4" in caplog.text
