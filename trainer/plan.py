"""Plan: what one task was asked to do, checked; from the command line to whoever does it."""

from dataclasses import dataclass

from strategies.cluster import Cluster
from trainer.config import Recipe


@dataclass(frozen=True)
class Plan:
    """What one task was asked to do.

    Attributes:
        strategy: mirrored, multiworker or ps.
        recipe: The config and the functions of its file.
        cluster: The cluster and this task's place in it; None for a process alone.
        model_dir: Where the run is kept.
        replicas: Replicas of mirrored; 0 for one on each GPU, or one CPU.
        num_gpus: How many GPUs to use; None for all.
        communication: auto, ring or nccl.
        num_threads: Of TensorFlow in this process; 0 leaves it to TensorFlow.
        log_device_placement: Whether TensorFlow logs where each op runs.
        replicas_to_aggregate: ps: gradients of a step, or 0 for asynchronous steps.
        wire_dtype: In what gradients travel: float32, float16 or bfloat16.
        max_staleness: ps, asynchronous: steps after which a gradient is too old; None for never.
        is_checked: Whether a launcher has just found the data to fit the model.
        serves: Whether this task does what a chief elsewhere says, and no more.
        chief_timeout_secs: How long this task waits for a chief that does not answer; None: ever.
        grace_secs: How long this task has for saving once it is asked to stop.
        stall_timeout_secs: How long this task may stand still; 0 for ever.
        unknown_host_secs: How long the name of another task's host may be unknown.
    """

    strategy: str
    recipe: Recipe
    cluster: Cluster | None
    model_dir: str
    replicas: int = 0
    num_gpus: int | None = None
    communication: str = "auto"
    wire_dtype: str = "float32"
    num_threads: int = 0
    log_device_placement: bool = False
    replicas_to_aggregate: int = 0
    max_staleness: int | None = None
    is_checked: bool = False
    serves: bool = False
    chief_timeout_secs: float | None = None
    grace_secs: float = 30.0
    stall_timeout_secs: float = 300.0
    unknown_host_secs: float = 0.0

    @property
    def evaluates_alone(self) -> bool:
        """Whether this task is the evaluator, which follows a run from outside."""
        return self.cluster is not None and self.cluster.task.job == "evaluator"

    @property
    def is_chief(self) -> bool:
        """Whether this task writes."""
        return self.cluster is None or self.cluster.is_chief
