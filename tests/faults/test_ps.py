"""Workers of parameter servers are killed at the worst moment; no gradient is lost or mixed."""

import json
import signal
from pathlib import Path

from strategies.cluster.tf_config import Task, local_cluster
from tests.cluster.runs import (
    Run,
    TrainOnce,
    by_hand,
    largest_difference,
    read_metrics,
    start,
)

# One ps for each variable, because gradients to one ps are sent together. Two threads: one waits
# in the held gradient, while the other sends the remaining gradients.
SYNC = "ps-sync-3+2"
HELD = "--config=tests/cluster/configs/held.py"
COUNTING = "--config=tests/cluster/configs/counting.py"
STEPS = 200


FLAGS = (HELD, "--num_threads=2", f"--train_steps={STEPS}")


def assert_same_end(run: Run, undisturbed: Run) -> None:
    assert "signal 9" in run.stderr
    assert run.result["step"] == undisturbed.result["step"] == STEPS
    assert run.result["examples"] == undisturbed.result["examples"]
    assert largest_difference(run.variables(), undisturbed.variables()) == 0


def test_worker_killed_between_the_gradients_of_two_variables_mixes_nothing(
    train_once: TrainOnce, tmp_path: Path
) -> None:
    hold_dir = tmp_path / "hold"
    hold_dir.mkdir()
    # With a cache, so that the restarted worker has to read all examples again.
    held = (f"--config.hold_dir={hold_dir}", f"--config.data.cache_bytes={1 << 28}")
    with start(SYNC, tmp_path / "run", *FLAGS, *held) as process:
        process.wait_for_step(10)
        hold = hold_dir / "hold-1"
        hold.touch()
        staged = hold_dir / "staged.json"
        process.wait_until(staged.exists, "a gradient of which one variable has arrived")
        # The fault is where it should be: one variable's gradient is there, the other's is not.
        assert json.loads(staged.read_text()) == {"bias_is_there": False, "has_equal_tags": False}
        process.task("worker 1").kill()
        hold.unlink()
        run = process.wait()
    assert "worker 1" in run.stderr
    assert_same_end(run, train_once(SYNC, *FLAGS))


def test_worker_killed_in_a_long_worker_loop_changes_no_weight(
    train_once: TrainOnce, tmp_path: Path
) -> None:
    """Calls of 40 rounds: an iteration of a worker loop has several assignments, the last skipped.

    On a machine with very slow rounds the calls stay shorter.
    """
    calls = ("--config.steps_per_call=40", "--config.log_every_steps=40")
    with start(SYNC, tmp_path / "run", *FLAGS, *calls) as process:
        process.kill_task("worker 1", 80)
        run = process.wait()
    assert_same_end(run, train_once(SYNC, *FLAGS))


def test_killed_async_worker_is_counted_exactly_and_trains_again_after_its_restart(
    tmp_path: Path,
) -> None:
    hold_dir = tmp_path / "hold"
    hold_dir.mkdir()
    (hold_dir / "pause").touch()
    model_dir = tmp_path / "run"
    cluster = local_cluster("ps", 3, 1)
    held = (COUNTING, f"--config.hold_dir={hold_dir}", "--train_steps=2000")
    flags = (*held, "--num_threads=1", "--config.log_every_steps=50")
    killed = Task("worker", 1)

    def steps_of_killed_worker() -> int:
        reports = read_metrics(model_dir)
        return int(reports[-1]["worker_steps"]["worker 1"]) if reports else 0

    with by_hand(cluster, model_dir, *flags) as tasks:
        tasks.start_all()
        chief = tasks["chief 0"]
        chief.wait_until(lambda: steps_of_killed_worker() > 0, "a step of worker 1")
        (hold_dir / "hold-1").touch()
        chief.wait_until((hold_dir / "weight-1").exists, "worker 1 in the middle of a step")
        tasks["worker 1"].send(signal.SIGKILL)
        assert tasks["worker 1"].wait_alone().exit_code == -signal.SIGKILL
        (hold_dir / "hold-1").unlink()
        before = steps_of_killed_worker()
        tasks.start(killed)
        # More than the steps before its death that were not reported yet.
        chief.wait_until(lambda: steps_of_killed_worker() > before + 40, "steps of worker 1, again")
        (hold_dir / "pause").unlink()
        run = tasks.wait()["chief 0"]

    result = run.result
    (weight,) = run.weights().values()
    assert weight == result["step"] >= 2000, "the weight gains 1 by each update that is applied"
    assert sum(result["worker_steps"].values()) == result["step"]
    batches = result["batches"]
    assert batches["handed_out"] == batches["finished"] == 2000
    assert batches["repeated"] == result["step"] - 2000 == result["worker_repeated"]["worker 1"]
    assert result["worker_repeated"]["worker 0"] == result["worker_repeated"]["worker 2"] == 0
    assert result["examples"] == 2000 * 16
