"""TaskSpec: what one task must do, checked; from the command line to the code that does it."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategies.transfer import AS_COMPUTED, Transfer
from trainer.config import Recipe

if TYPE_CHECKING:
    from strategies.cluster.tf_config import Cluster


@dataclass(frozen=True)
class TaskSpec:
    """What one task must do. trainer/flags/ explains the fields that are named like flags."""

    strategy: str
    recipe: Recipe
    cluster: "Cluster | None"  # With this task's place in it; None for a single process.
    model_dir: str
    is_latest: bool = False  # runs/latest will point to model_dir.
    replicas: int = 0
    num_gpus: int | None = None
    transfer: Transfer = AS_COMPUTED
    num_threads: int = 0
    log_device_placement: bool = False
    replicas_to_aggregate: int = 0  # ps: gradients per step; 0 for asynchronous steps.
    max_staleness: int | None = None
    ps_standby: int = 0  # Steps between two copies to other ps tasks; 0: none.
    is_checked: bool = False  # A launcher has just checked that the data fits the model.
    serves: bool = False  # This task only executes what a chief in another process sends.
    chief_timeout_secs: float | None = None  # None waits without a limit.
    is_verbose: bool = False
    is_quiet: bool = False
    flags: Sequence[str] = ()  # The flags that choose the strategy, for `--model_dir=RUN` alone.
    grace_secs: float = 25.0
    stall_timeout_secs: float = 300.0
    metrics_listener: socket.socket | None = None  # Of the chief, for readers of its metrics.

    @property
    def has_evaluator(self) -> bool:
        """True if the cluster has an evaluator task, so that the other tasks do not evaluate."""
        return self.cluster is not None and self.cluster.num("evaluator") > 0

    @property
    def is_chief(self) -> bool:
        """True for the task that writes the files of the run."""
        return self.cluster is None or self.cluster.is_chief

    @property
    def computes(self) -> bool:
        """True if this task computes gradients or evaluates: the others use no GPU."""
        return self.strategy != "ps" or (
            self.cluster is not None and self.cluster.task.job in ("worker", "evaluator")
        )

    @property
    def op_threads(self) -> int:
        """The threads of an op; 0 means one for each core.

        The order of a sum within an op depends on them, so config.virtual_replicas needs one.
        """
        return 1 if self.recipe.config.virtual_replicas else self.num_threads

    @property
    def generation(self) -> int | None:
        """The generation of this task's group of hosts; None if the cluster is not elastic."""
        return None if self.cluster is None else self.cluster.generation
