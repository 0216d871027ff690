"""A process on a GPU is killed, or lacks memory: nothing is lost, and a message says why."""

import re
import signal
from pathlib import Path

import pytest

from tests.cluster.runs import assert_one_error, assert_same_bits, start, train
from tests.gpu.test_training import IN_MEMORY, ONE, flags, losses

# 500 GB in one tensor, more than any GPU has.
LARGE_MODEL = """
import keras
from trainer.config import Config

IN_CHECK = {in_check}

class Large(keras.layers.Layer):
    def call(self, pixels, training=False):
        many = keras.ops.tile(pixels, (1, 2**25)) if training or IN_CHECK else pixels
        return keras.ops.reshape(many, (keras.ops.shape(pixels)[0], -1, 64))[:, 0]

def get_config():
    return Config(dataset="digits", train_steps=5, jit_compile=False)

def build_model(config):
    layers = [keras.layers.Flatten(), Large(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])
"""


def test_killed_run_resumes_with_equal_bits(gpu: dict[str, str], tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    words = (*flags(), IN_MEMORY, "--deterministic", "--config.checkpoint_every_steps=20")
    # It would go on for long after the checkpoint of step 20.
    with start(ONE, tmp_path / "run", *words, "--train_steps=100000", env=gpu) as process:
        process.wait_until(lambda: any(checkpoints.glob("step-*/checkpoint.json")), "checkpoint")
        process.send(signal.SIGKILL)
        process.wait(exit_code=-signal.SIGKILL)
    end = max(int(path.name[5:]) for path in checkpoints.glob("step-*")) + 40
    resumed, whole, again = (
        train(ONE, tmp_path / name, *words, f"--train_steps={end}", env=gpu)
        for name in ("run", "whole", "again")
    )
    assert_same_bits(resumed, whole)
    assert_same_bits(again, whole)
    assert losses(whole) == losses(again)
    assert losses(whole)[-4:] == losses(resumed)[-4:], "two reports, and the evaluation"


def test_worker_that_is_killed_costs_no_step(gpu: dict[str, str], tmp_path: Path) -> None:
    words = (*flags(steps=2000), "--communication=ring")
    with start("multiworker-2", tmp_path / "run", *words, env=gpu) as process:
        process.wait_for_step(100)
        process.task("worker 1").kill()
        run = process.wait()
    assert run.result["step"] == 2000
    log = (tmp_path / "run" / "tasks" / "worker-0.log").read_text()
    (last,) = re.findall(r"[Ss]tep ([\d,]+), the last that this task completed", log)
    assert int(last.replace(",", "")) >= 100
    assert f"resuming from step {last}" in log


@pytest.mark.parametrize(
    ("in_check", "advice"), [(False, "Raise --config.micro_batches"), (True, "Lower --batch_size")]
)
def test_too_little_memory_is_explained(
    in_check: bool, advice: str, gpu: dict[str, str], tmp_path: Path
) -> None:
    config = tmp_path / "large.py"
    config.write_text(LARGE_MODEL.format(in_check=in_check))
    run = train(ONE, tmp_path / "run", f"--config={config}", exit_code=2, env=gpu)
    assert_one_error(run, "There is not enough memory", advice, "mixed_bfloat16")
