"""Runs that are killed at a random moment, and runs that resume with other numbers of workers.

`TRAINER_KILLS` says at how many moments a run is killed; the seed is in the test's name.
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.runs import (
    NUM_NUMBERED,
    TrainOnce,
    assert_same_bits,
    largest_difference,
    start,
    topologies,
    train,
)

KILLS = int(os.environ.get("TRAINER_KILLS", "1"))
NUMBERED = "--config=tests/cluster/configs/straggler.py"


@pytest.mark.parametrize(
    "topology", topologies("ps-sync-3+1", nightly=("mirrored-2", "multiworker-2"))
)
@pytest.mark.parametrize("seed", range(KILLS))
def test_run_killed_at_a_random_moment_ends_bit_for_bit_as_an_undisturbed_one(
    seed: int, topology: str, train_once: TrainOnce, tmp_path: Path
) -> None:
    slow = "--config=tests/cluster/configs/slow.py"
    flags = (slow, "--config.checkpoint_every_steps=30")
    chance = random.Random(f"{topology} {seed}")
    with start(topology, tmp_path, *flags) as process:
        process.wait_for_step(chance.randrange(20, 240))
        time.sleep(chance.uniform(0, 0.3))  # Anywhere between two reports, or in a save.
        assert process.popen.poll() is None, "was too late to be killed"
        process.send(signal.SIGKILL)
        assert process.wait_alone().exit_code == -signal.SIGKILL
        process.wait_for_family_to_end()

    run = train(topology, tmp_path, *flags, "--config.pause_secs=0")

    assert run.result["step"] == 300
    assert_same_bits(run, train_once(topology, *flags, "--config.pause_secs=0"))
    assert run.steps("train") == sorted(set(run.steps("train")))


def test_epoch_begun_by_two_workers_is_finished_by_any_number(
    numbered: Path, tmp_path: Path
) -> None:
    num_batches = NUM_NUMBERED // 32
    flags = (NUMBERED, f"--data_dir={numbered}", f"--config.log_every_steps={num_batches}")
    alone = train("mirrored-1", tmp_path / "alone", *flags, f"--train_steps={num_batches}")
    half = train("multiworker-2", tmp_path / "half", *flags, "--train_steps=12")
    (report,) = half.metrics("train")
    sum_of_half = round(report["number"] * 12 * 32)
    assert largest_difference(alone.weights(), half.weights()) > 1e-3

    for num_workers in (1, 3, 4):
        model_dir = tmp_path / str(num_workers)
        shutil.copytree(tmp_path / "half", model_dir)
        to_end = f"--train_steps={num_batches}"
        finished = train(f"multiworker-{num_workers}", model_dir, *flags, to_end)
        sum_after_resume = round(finished.metrics("train")[-1]["number"] * (num_batches - 12) * 32)
        assert sum_of_half + sum_after_resume == sum(range(NUM_NUMBERED)), "not each example once"
        # The weights show that the batches were the same.
        assert largest_difference(alone.weights(), finished.weights()) < 1e-5
