"""Which tasks a supervisor runs, and what it does when the group of hosts changes.

    policy = FixedPolicy(cluster, cluster.tasks())
    policy = ResizingPolicy(cluster, run_dir, least=1)
    report = Supervisor(policy, starter, model_dir, restarts).run()

`FixedPolicy` is for a cluster that stays the same, `ResizingPolicy` for ps on this machine with a
changing number of workers, `ElasticPolicy` (elastic.py) for hosts that come and go. The supervisor
calls all methods in the main thread.
"""

import contextlib
import enum
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path

from typing_extensions import override

from data.system.background import in_background
from strategies.cluster.tf_config import Cluster, Task
from trainer.exit_codes import EXIT_RESTART
from trainer.local.deaths import ENDED_AS_ASKED, TaskEnd
from trainer.local.launch_report import write_resize
from trainer.local.task_logs import say
from trainer.run_files import MEMBERSHIP

_READ_SECS = 0.1  # For the number of workers that is wanted.
_NAME = "workers"  # In MEMBERSHIP: the file with the number of workers that a user wants.


class Activity(enum.Enum):
    """What a supervisor does at the moment."""

    ENDING = "The run ends: nothing is started any more."
    RUNNING = "A task runs."
    DELAYING = "No task runs; one that died is started again after a delay."
    IDLE = "No task runs, and no start is planned."


class Step(enum.Enum):
    """What a supervisor does next."""

    NONE = "Nothing."
    START = "Drop all plans, and start the tasks that `to_start` returns."
    STOP_TOGETHER = "Have the tasks stop at the same step as the tasks of other hosts, and end."
    SAVE_AND_END = "Have each task save its last complete step, and end."
    DONE = "The run is complete: end tasks that do not end by themselves."


class FixedPolicy:
    """The same tasks, with the same addresses, from the start to the end.

    Attributes:
        clusters: The tasks of this launcher, each with the cluster as the task sees it.
    """

    def __init__(self, cluster: Cluster, tasks: Collection[Task]) -> None:
        self.clusters = {task: cluster.for_task(task) for task in tasks}

    def to_start(self, tasks: Collection[Task]) -> Collection[Task]:
        """Returns the tasks of `clusters` to start when `tasks` are due to start."""
        return tasks

    def on_exit(self, task: Task, exit_code: int, activity: Activity) -> Step | None:
        """Returns the step after the end of a task; None if deaths.py must decide."""
        return None

    def look(self, activity: Activity) -> Step:
        """Returns the next step. It is called about every second."""
        return Step.NONE

    def is_over(self) -> bool:
        """Returns True if the run is over when no task runs and no start is planned."""
        return True

    def counts(self, end: TaskEnd) -> bool:
        """Returns True if --max_restarts limits the restarts after such an end."""
        return True

    def ends_all_hosts(self, end: TaskEnd) -> bool:
        """Returns True if an end that no restart repairs ends the launchers of all hosts."""
        return True


class ResizingPolicy(FixedPolicy):
    """Runs the chief, all ps, and the first workers of a cluster of ps: as many as are wanted.

    MODEL_DIR/membership/workers has the number of workers that the run shall have. A user or
    another program writes it, at any time, also before the start. Without it all workers train.

    TensorFlow connects a chief to a fixed list of tasks. So for another number the chief stops
    after a complete step, saves, and ends all servers; then all tasks start again with the new
    list. This is no failure, and --max_restarts does not count it.
    """

    def __init__(self, cluster: Cluster, run_dir: Path, *, least: int) -> None:
        """`cluster` has all workers that there may be. A number below `least` is refused."""
        self.path = run_dir / MEMBERSHIP / _NAME
        with contextlib.suppress(OSError):  # Then nobody can write the file either.
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._cluster = cluster
        self._least, self._most = least, cluster.num("worker")
        self._refused = ""
        self._reading: Future[int | None] | None = None
        self._is_resizing = False  # The chief was asked to end, because the number changes.
        self._resize(self.wanted() or self._most)

    def wanted(self) -> int | None:
        """The number of workers that is wanted; None if the file is missing or has no such number.

        A wrong content is explained once.
        """
        try:
            text = self.path.read_text(errors="replace").strip()
        except OSError:
            return None
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
        if self._least <= number <= self._most:
            self._refused = ""
            return number
        if text != self._refused and text:  # Empty: another program is about to write it.
            self._refused = text
            say(
                f"{self.path} must have a number from {self._least} (--min_workers) to "
                f"{self._most} (--workers). Received: {text[:40]!r}. The number of workers stays. "
                f"Type: echo {self._most} > {self.path}"
            )
        return None

    def _resize(self, num_workers: int) -> None:
        self._num_workers = num_workers
        workers = dict(list(self._cluster.jobs["worker"].items())[:num_workers])
        sized = Cluster({**self._cluster.jobs, "worker": workers}, self._cluster.task)
        super().__init__(sized, sized.tasks())

    @override
    def look(self, activity: Activity) -> Step:
        # On a thread: storage that does not answer must not stop the supervisor.
        self._reading = self._reading or in_background(self.wanted)
        try:
            number = self._reading.result(_READ_SECS)
        except TimeoutError:
            return Step.NONE
        self._reading = None
        if self._is_resizing or activity is not Activity.RUNNING:
            return Step.NONE
        self._is_resizing = number not in (None, self._num_workers)
        return Step.STOP_TOGETHER if self._is_resizing else Step.NONE

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
            # The chief was done before, or has died: deaths.py decides. The next look begins anew.
            self._is_resizing = False
            return None
        if activity is Activity.RUNNING:
            return Step.NONE
        self._is_resizing = False
        before, number = self._num_workers, self.wanted()
        if number is not None and number != before:
            self._resize(number)
            why = f"{MEMBERSHIP}/{_NAME} says {number}"
            say(f"{number} worker(s) train from now on, not {before}: {why}.")
            write_resize(self._run_dir, workers=number, workers_before=before, why=why)
        return Step.START
