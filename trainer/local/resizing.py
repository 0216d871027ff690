"""A cluster of ps on this machine whose number of workers changes while it runs.

    policy = ResizingPolicy(cluster, WantedWorkers(run_dir, least=1, most=4))
    report = run_resizing(Supervisor(policy, starter, model_dir, restarts), policy)

MODEL_DIR/membership/workers has the number of workers that the run shall have. A user or another
program writes it, at any time, also before the start. At a start without it all workers train.

TensorFlow connects a chief to a fixed list of tasks. So for another number the chief stops after a
complete step, saves, and ends all servers; then all tasks start again with the new list. This is no
failure, and --max_restarts does not count it.
"""

import contextlib
from collections.abc import Collection
from functools import partial
from pathlib import Path

from typing_extensions import override

from data.system.background import repeating
from strategies.cluster.tf_config import Cluster, Task
from trainer.exit_codes import EXIT_RESTART
from trainer.local.deaths import ENDED_AS_ASKED
from trainer.local.failures import Resize, write_resize
from trainer.local.launch_report import LaunchReport
from trainer.local.policy import Activity, FixedPolicy, Step
from trainer.local.supervisor import Supervisor
from trainer.local.task_logs import say
from trainer.run_files import MEMBERSHIP

_POLL_SECS = 1.0
_NAME = "workers"


class WantedWorkers:
    """Reads the file; refuses numbers below `least` or above `most`."""

    def __init__(self, run_dir: Path, *, least: int, most: int) -> None:
        self.run_dir = run_dir
        self.path = run_dir / MEMBERSHIP / _NAME
        self.most = most
        self._least = least
        self._refused = ""

    def read(self) -> int | None:
        """The number of workers that is wanted; None if the file is missing or has no such number.

        A wrong content is explained once.
        """
        try:
            text = self.path.read_text(errors="replace").strip()
        except OSError:
            return None
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
        if self._least <= number <= self.most:
            self._refused = ""
            return number
        if text != self._refused and text:  # Empty: another program is about to write it.
            self._refused = text
            say(
                f"{self.path} must have a number from {self._least} (--min_workers) to "
                f"{self.most} (--workers). Received: {text[:40]!r}. The number of workers stays. "
                f"Type: echo {self.most} > {self.path}"
            )
        return None


class ResizingPolicy(FixedPolicy):
    """Runs the chief, all ps, and the first workers of a cluster: as many as are wanted."""

    def __init__(self, cluster: Cluster, wanted: WantedWorkers) -> None:
        """`cluster` has all workers that there may be."""
        self.wanted = wanted
        self._cluster = cluster
        self._is_resizing = False  # The chief was asked to end, because the number changes.
        self._num_workers = wanted.read() or wanted.most
        sized = self._sized()
        super().__init__(sized, sized.tasks())

    def _sized(self) -> Cluster:
        workers = dict(list(self._cluster.jobs["worker"].items())[: self._num_workers])
        return Cluster({**self._cluster.jobs, "worker": workers}, self._cluster.task)

    def on_wanted(self, number: int, activity: Activity) -> Step:
        """Returns the next step if `number` workers are wanted."""
        if self._is_resizing or activity is not Activity.RUNNING or number == self._num_workers:
            return Step.NONE
        self._is_resizing = True
        return Step.STOP_TOGETHER

    @override
    def to_start(self, tasks: Collection[Task]) -> Collection[Task]:
        """Returns `tasks`; none while the chief ends, such as a worker that has just died."""
        return () if self._is_resizing else tasks

    @override
    def on_exit(self, task: Task, exit_code: int, activity: Activity) -> Step | None:
        if not self._is_resizing or activity is Activity.ENDING:
            return None
        is_chief = task == self._cluster.chief
        if exit_code not in ((EXIT_RESTART,) if is_chief else ENDED_AS_ASKED):
            # The chief was done before, or has died: deaths.py decides. The next look at the file
            # begins anew.
            self._is_resizing = False
            return None
        if activity is Activity.RUNNING:
            return Step.NONE
        self._is_resizing = False
        self._resize()
        return Step.START

    def _resize(self) -> None:
        before, number = self._num_workers, self.wanted.read()
        if number is None or number == before:
            return
        self._num_workers = number
        cluster = self._sized()
        self.clusters = {task: cluster.for_task(task) for task in cluster.tasks()}
        why = f"{MEMBERSHIP}/{_NAME} says {number}"
        say(f"{number} worker(s) train from now on, not {before}: {why}.")
        write_resize(self.wanted.run_dir, Resize(number, before, why))


def run_resizing(supervisor: Supervisor, policy: ResizingPolicy) -> LaunchReport:
    """Runs the cluster to its end, while a thread looks at the file about every second."""

    def look() -> None:
        if (number := policy.wanted.read()) is not None:
            supervisor.ask(partial(policy.on_wanted, number))

    with contextlib.suppress(OSError):  # Then nobody can write the file either.
        policy.wanted.path.parent.mkdir(parents=True, exist_ok=True)
    with repeating(look, _POLL_SECS):
        return supervisor.run()
