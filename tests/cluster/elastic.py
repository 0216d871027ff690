"""The launchers of an elastic run: hosts that a test starts, kills and cuts off.

with ExitStack() as stack:
    launchers = Launchers(stack, model_dir, "localhost:5001,localhost:5002", flags)
    launchers.start(0, 1)
    launchers.wait_for_group(2)
    launchers.kill(0)
    launchers.finish()

`finish` needs the config tests/chaos/digits.py: it pauses after each call until `finish`, so that
the run is not over before the hosts have come and gone.
"""

import contextlib
import json
import signal
from pathlib import Path

from tests.chaos.journal import pause_of
from tests.cluster.runs import (
    Process,
    Run,
    assert_nothing_left,
    largest_difference,
    last_step,
    with_data,
)

PAUSE_SECS = 0.5  # After every 5 steps.


def flags_for(num_steps: int) -> tuple[str, ...]:
    """The flags of a run with a checkpoint every 20 steps."""
    return (
        "--config=tests/chaos/digits.py",
        f"--train_steps={num_steps}",
        "--num_threads=1",
        # Sums in another order are rounded differently, and large steps amplify small differences.
        "--config.optimizer=sgd",
        "--learning_rate=0.003",
    )


class Launchers:
    """`listed` is --hosts, with `num_ps` ps at the end; `under` has a prefix of each command."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        model_dir: Path,
        listed: str,
        flags: tuple[str, ...],
        under: tuple[tuple[str, ...], ...] = (),
        num_ps: int = 0,
    ) -> None:
        self._stack = stack
        self.model_dir = model_dir
        pause_of(model_dir).write_text(str(PAUSE_SECS))
        self._under = under
        self._argv = (
            *(("--strategy=ps", f"--ps={num_ps}") if num_ps else ("--strategy=multiworker",)),
            f"--hosts={listed}",
            f"--model_dir={model_dir}",
            *with_data(flags),
        )
        self._num_workers = listed.count(",") + 1 - num_ps
        self.on: dict[int, Process] = {}

    def start(self, *indices: int, flags: tuple[str, ...] = ()) -> None:
        """Starts the launchers of hosts, with more `flags`."""
        for index in indices:
            job, of_job = ("worker", index), ("ps", index - self._num_workers)
            name, number = job if index < self._num_workers else of_job
            task = () if self._under else (f"--job_name={name}", f"--task_index={number}")
            under = self._under[index] if self._under else ()
            process = Process((*self._argv, *task, *flags), self.model_dir, under=under)
            self.on[index] = self._stack.enter_context(process)

    def kill(self, *indices: int) -> None:
        for index in indices:
            self.on[index].send(signal.SIGKILL)
        for index in indices:
            self.on.pop(index).wait_for_family_to_end()

    def wait_for_group(self, size: int) -> None:
        """Waits until `size` hosts have made 20 steps together."""
        some = next(iter(self.on.values()))
        some.wait_until(lambda: len(group(self.model_dir)) == size, f"a group of {size}")
        some.wait_for_more_steps(20)

    def finish(self, num_steps: int) -> None:
        """Waits for the end of the run, which must not be near."""
        assert last_step(self.model_dir) < num_steps, "the run was over too early"
        pause_of(self.model_dir).unlink()
        self.wait()

    def wait(self) -> list[Run]:
        """Waits for the end of all launchers, which must be with 0."""
        runs = [process.wait_alone() for _, process in sorted(self.on.items())]
        for (_, process), run in zip(sorted(self.on.items()), runs, strict=True):
            assert run.exit_code == 0, process.output()
            process.wait_for_family_to_end()
        assert_nothing_left(self.model_dir)
        return runs


def group(model_dir: Path) -> list[str]:
    """The members of the newest group that is written down."""
    written = sorted((model_dir / "membership").glob("group-*.json"))
    return json.loads(written[-1].read_text())["members"] if written else []


def difference_from(undisturbed: Run, model_dir: Path) -> float:
    """The largest difference of a variable; checks that each batch was used once."""
    run = Run(0, "", "", model_dir)
    step, mark = undisturbed.result["step"], run.mark()
    assert (mark["next_batch"], mark["open_shares"], mark["skipped"]) == (step, [], [])
    for name in ("examples", "step"):
        assert run.result[name] == undisturbed.result[name]
    return largest_difference(run.variables(), undisturbed.variables())
