"""Which tasks a supervisor runs, and what it does when the group of hosts changes.

    policy = FixedPolicy(cluster, cluster.tasks())
    report = Supervisor(policy, starter, model_dir, restarts).run()

`FixedPolicy` is for a cluster that stays the same, `ElasticPolicy` (elastic.py) for hosts that come
and go, `ResizingPolicy` (resizing.py) for a local cluster with a changing number of workers. The
supervisor calls all methods in the main thread.
"""

import enum
from collections.abc import Collection

from strategies.cluster.tf_config import Cluster, Task
from trainer.local.deaths import TaskEnd


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
