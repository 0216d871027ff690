"""The number of workers of ps changes while it trains, on one machine and with hosts."""

import contextlib
import signal
from pathlib import Path

import pytest

from strategies.cluster.ports import free_ports
from tests.chaos.chaos import lives_of
from tests.chaos.journal import pause_of
from tests.cluster.elastic import Launchers, difference_from
from tests.cluster.runs import (
    NUM_NUMBERED,
    Run,
    json_lines,
    largest_difference,
    lines_so_far,
    start,
    train,
)

SYNC = "ps-sync-4+1"
CHANGES = [(1, 4), (4, 2)]
PAUSE_SECS = 0.1  # After every 5 steps, until all changes were made.


class Resized:
    """A run that begins with one worker of at most four."""

    def __init__(self, model_dir: Path, *flags: str) -> None:
        self._model_dir = model_dir
        self.ask(1)
        pause_of(model_dir).write_text(str(PAUSE_SECS))
        self.process = start("ps-4+1", model_dir, "--min_workers=1", *flags)

    def ask(self, number: int) -> None:
        wanted = self._model_dir / "membership" / "workers"
        wanted.parent.mkdir(parents=True, exist_ok=True)
        wanted.write_text(f"{number}\n")

    def grow_and_shrink(self) -> None:
        """Trains with 1, then 4, then 2 workers: at least five steps with each number."""
        self._wait_for_steps(after=0)
        for number, (_, wanted) in enumerate(CHANGES, 1):
            self.ask(wanted)
            self._wait_for_steps(after=number)

    def wait_for_steps_after_the_last(self) -> None:
        last = self._steps()[-1][-1]
        self.process.wait_until(lambda: self._steps()[-1][-1] > last, f"a step after {last}")

    def finish(self) -> Run:
        pause_of(self._model_dir).unlink()
        return self.process.wait()

    def _wait_for_steps(self, *, after: int) -> None:
        """Waits until the chief has made steps after `after` changes, each a start.

        It may start more often: rarely, TensorFlow damages a message, and the chief ends with 75.
        """

        def has_trained() -> bool:
            steps = self._steps()
            return len(resizes(self._model_dir)) == after < len(steps) and len(steps[-1]) > 1

        self.process.wait_until(has_trained, f"a step after {after} changes")

    def _steps(self) -> list[list[int]]:
        """The steps after each call of the executor, for each start of the chief."""
        return [[step for _, step in life] for life in lives_of(self._model_dir)]


def resizes(model_dir: Path) -> list[tuple[int, int]]:
    lines = [line for line in lines_so_far(model_dir / "failures.jsonl") if "workers" in line]
    assert all(line["why"] == f"membership/workers says {line['workers']}" for line in lines)
    return [(line["workers_before"], line["workers"]) for line in lines]


def records_what_was_typed(model_dir: Path) -> bool:
    """Returns True if a run with another number of workers can sum the gradients of all of them."""
    return "replicas_to_aggregate" not in (model_dir / "config.json").read_text()


@pytest.mark.timeout(240)
def test_synchronous_run_with_1_then_4_then_2_workers_ends_with_the_undisturbed_weights(
    tmp_path: Path,
) -> None:
    flags = ("--config=tests/chaos/digits.py", "--train_steps=120")
    undisturbed = train(SYNC, tmp_path / "undisturbed", *flags)
    resized = Resized(tmp_path / "resized", "--sync_replicas", *flags)
    with resized.process:
        resized.grow_and_shrink()
        # Two workers compute the four sub-batches of a step; then one of them for a while.
        resized.process.task("worker 1").send_signal(signal.SIGKILL)
        resized.wait_for_steps_after_the_last()
        run = resized.finish()
    assert resizes(run.model_dir) == CHANGES
    deaths = json_lines(run.model_dir / "tasks" / "restarts.jsonl")
    killed = [death["task"] for death in deaths if death["exit_code"] == -signal.SIGKILL]
    assert killed == ["worker 1"]
    assert run.result["examples"] == undisturbed.result["examples"]
    assert records_what_was_typed(run.model_dir)
    assert largest_difference(run.variables(), undisturbed.variables()) == 0.0


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_hosts_of_synchronous_ps_join_and_leave_with_the_chief_and_no_weight_changes(
    tmp_path: Path,
) -> None:
    steps, model_dir = 300, tmp_path / "run"
    flags = ("--config=tests/chaos/digits.py", f"--train_steps={steps}")
    undisturbed = train(SYNC, tmp_path / "undisturbed", *flags)
    listed = ",".join(f"localhost:{port}" for port in free_ports(5))
    elastic = ("--sync_replicas", "--min_workers=1", "--rejoin_secs=6", "--num_threads=1")
    with contextlib.ExitStack() as stack:
        launchers = Launchers(stack, model_dir, listed, (*flags, *elastic), num_ps=1)
        launchers.start(4, 1)  # The ps, and a worker.
        launchers.wait_for_group(2)
        launchers.start(0, 2, 3)
        launchers.wait_for_group(5)
        leaves = launchers.on.pop(3)
        leaves.send(signal.SIGTERM)  # As an autoscaler ends a pod.
        assert leaves.wait_alone().exit_code == 75, leaves.output()
        launchers.wait_for_group(4)
        launchers.kill(0)  # With the chief. The ps keeps the last step.
        launchers.wait_for_group(3)
        launchers.finish(steps)
    assert records_what_was_typed(model_dir)
    lines = [line for line in json_lines(model_dir / "failures.jsonl") if "workers" in line]
    changes = [(line["workers_before"], line["workers"]) for line in lines]
    assert changes[0] == (4, 1)
    assert changes[-2:] == [(4, 3), (3, 2)]
    addresses = listed.split(",")
    assert [line["why"] for line in lines[-2:]] == [
        f"left: {addresses[3]}",
        f"away: {addresses[0]}",
    ]
    assert difference_from(undisturbed, model_dir) == 0.0


@pytest.mark.timeout(240)
def test_asynchronous_run_with_1_then_4_then_2_workers_uses_each_example_once_an_epoch(
    numbered: Path, tmp_path: Path
) -> None:
    epochs, batches = 8, NUM_NUMBERED // 32
    flags = ("--config=tests/cluster/configs/numbers.py", f"--data_dir={numbered}")
    resized = Resized(tmp_path / "run", *flags, f"--train_steps={epochs * batches}")
    with resized.process:
        resized.grow_and_shrink()
        run = resized.finish()
    assert resizes(run.model_dir) == CHANGES
    step, total = 0, 0.0
    for report in run.metrics("train"):  # Each has the mean number since the report before.
        total += report["number"] * 32 * (report["step"] - step)
        step = report["step"]
    assert round(total) == epochs * sum(range(NUM_NUMBERED))
    expected = {"handed_out": epochs * batches, "finished": epochs * batches, "repeated": 0}
    assert run.result["batches"] == expected
    assert run.result["worker_steps"].keys() == {f"worker {index}" for index in range(4)}
