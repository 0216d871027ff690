"""Hosts leave and join a run of multiworker, and the others go on with the same weights."""

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import dropped, hosts, num_dropped, reason_why_not
from strategies.cluster.ports import free_ports
from tests.chaos.journal import pause_of
from tests.cluster.runs import (
    TOPOLOGIES,
    Process,
    Run,
    assert_nothing_left,
    largest_difference,
    read_metrics,
    train,
)

STEPS = 600
CONFIG = "--config=tests/chaos/digits.py"  # With a checkpoint every 20 steps.
PAUSE_SECS = 0.5  # After every 5 steps, until the hosts have come and gone.


@pytest.fixture(scope="module")
def flags(digits: Path) -> tuple[str, ...]:
    # Sums in another order are rounded differently, and Adam amplifies small differences.
    optimizer = ("--config.optimizer=sgd", "--learning_rate=0.05")
    return (CONFIG, f"--data_dir={digits}", f"--train_steps={STEPS}", "--num_threads=1", *optimizer)


@pytest.fixture(scope="module")
def undisturbed(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    model_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    return train(TOPOLOGIES["mirrored-2"], model_dir, *flags)


class Launchers:
    """The launchers of hosts; `listed` is --hosts, and `under` a prefix of each one's command."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        model_dir: Path,
        listed: str,
        flags: tuple[str, ...],
        under: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        self._stack = stack
        self.model_dir = model_dir
        pause_of(model_dir).write_text(str(PAUSE_SECS))
        self._under = under
        self._argv = (
            "--strategy=multiworker",
            f"--hosts={listed}",
            f"--model_dir={model_dir}",
            *flags,
        )
        self.on: dict[int, Process] = {}

    def start(self, *indices: int) -> None:
        for index in indices:
            task = () if self._under else ("--job_name=worker", f"--task_index={index}")
            under = self._under[index] if self._under else ()
            process = Process((*self._argv, *task), self.model_dir, under=under)
            self.on[index] = self._stack.enter_context(process)

    def kill(self, *indices: int) -> None:
        for index in indices:
            self.on[index].send(signal.SIGKILL)
        for index in indices:
            self.on.pop(index).wait_for_family_to_end()

    def wait_for_group(self, size: int) -> int:
        """Waits until `size` hosts have made 20 steps together; returns the last step."""
        some = next(iter(self.on.values()))
        some.wait_until(lambda: len(group(self.model_dir)) == size, f"a group of {size}")
        step = last_step(self.model_dir)
        some.wait_for_step(step + 20)
        return last_step(self.model_dir)

    def finish(self) -> None:
        assert last_step(self.model_dir) < STEPS, "the run was over too early"
        pause_of(self.model_dir).unlink()
        runs = {index: process.wait_alone() for index, process in self.on.items()}
        for index, run in runs.items():
            assert run.exit_code == 0, self.on[index].output()
            self.on[index].wait_for_family_to_end()
        assert_nothing_left(self.model_dir)


def group(model_dir: Path) -> list[str]:
    """The members of the newest group that is written down."""
    written = sorted((model_dir / "membership").glob("group-*.json"))
    return json.loads(written[-1].read_text())["members"] if written else []


def last_step(model_dir: Path) -> int:
    return max((line["step"] for line in read_metrics(model_dir)), default=0)


def assert_as_undisturbed(model_dir: Path, undisturbed: Run) -> None:
    run = Run(0, "", "", model_dir)
    assert largest_difference(run.variables(), undisturbed.variables()) < 1e-5
    mark: dict[str, Any] = json.loads(
        (model_dir / f"checkpoints/step-{STEPS:08d}/checkpoint.json").read_text()
    )
    assert (mark["next_batch"], mark["open_shares"], mark["skipped"]) == (STEPS, [], [])
    for name in ("examples", "step"):
        assert run.result[name] == undisturbed.result[name]


@pytest.mark.timeout(300)
def test_1_then_4_then_2_then_3_workers_train_to_the_same_weights(
    flags: tuple[str, ...], undisturbed: Run, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    listed = ",".join(f"localhost:{port}" for port in free_ports(4))
    elastic = ("--min_workers=1", "--rejoin_secs=6")
    with contextlib.ExitStack() as stack:
        launchers = Launchers(stack, model_dir, listed, (*flags, *elastic))
        launchers.start(1)
        launchers.wait_for_group(1)
        launchers.start(0, 2, 3)
        launchers.wait_for_group(4)
        launchers.kill(0, 1)  # With the chief.
        launchers.wait_for_group(2)
        launchers.start(1)
        launchers.wait_for_group(3)
        launchers.finish()
    assert_as_undisturbed(model_dir, undisturbed)


@pytest.mark.skipif(bool(reason_why_not()), reason=reason_why_not() or "hosts can be made")
@pytest.mark.timeout(300)
def test_hosts_continue_without_a_host_that_is_cut_off_and_take_it_in_again(
    flags: tuple[str, ...], undisturbed: Run, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(hosts(3))
        listed = ",".join(host.address for host in places)
        under = tuple(host.command for host in places)
        elastic = ("--min_workers=2", "--rejoin_secs=10")
        launchers = Launchers(stack, model_dir, listed, (*flags, *elastic), under)
        launchers.start(2, 0, 1)
        launchers.on[0].wait_for_step(40)
        assert group(model_dir) == []
        # Host 0 has the chief. It still reaches the directory of the run, and tries to train.
        lost = [(places[0], other) for other in places[1:]]
        with dropped(*lost):
            launchers.wait_for_group(2)
            assert group(model_dir) == [f"{host.address}:2222" for host in places[1:]]
            assert num_dropped(*lost) > 0
        launchers.wait_for_group(3)
        launchers.finish()
    assert_as_undisturbed(model_dir, undisturbed)
