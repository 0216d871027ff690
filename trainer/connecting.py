"""TensorFlow's devices, and the role of a task: what it does for and with other tasks.

role = Role(spec)
role.prepare()
stack.enter_context(configured_tensorflow(spec))    # before TensorFlow touches a device
executor = role.connect(role.use_gpus())            # before the first variable
"""

import contextlib
import os
import sys
from collections.abc import Iterator

import tensorflow as tf

from data.system.cores import num_cores
from data.system.files import shown
from strategies.base import Executor
from strategies.gpus import replica_devices, use_gpus
from strategies.mirrored import MirroredExecutor
from strategies.position import Reached
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.last_step import write_if_newer
from trainer.compiled_programs import kept_programs
from trainer.guards.signals import StopSignals
from trainer.run_files import directory_of_logs
from trainer.run_record.recorder import Recorder
from trainer.task_spec import TaskSpec

# Ops that a worker runs at the same time at least, if other workers are on other hosts. With one
# thread all-reduces wait for the ops of the backward pass: a step took 1.5 times as long.
_OPS_WITH_NETWORK = 4


class Role:
    """The role of a task that trains alone; in_cluster.py has the roles in a cluster.

    task.py calls the methods in this order.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self._spec = spec

    def prepare(self) -> None:
        """Called before TensorFlow is configured; a cluster's GPUs are divided among its tasks.

        Raises ConfigError or ClusterError if the task cannot have its role.
        """

    def run_other(self, signals: StopSignals, recorder: Recorder) -> int | None:
        """Runs a server or an evaluator; returns its exit code. None: this task trains."""

    def use_gpus(self) -> int:
        """Makes the GPUs of this task visible; returns their number."""
        return use_gpus(self._spec.num_gpus if self._spec.computes else 0)

    def answering(self, num_gpus: int) -> contextlib.AbstractContextManager[None]:
        """Inside, where data is opened, tasks that wait for this one see that it is there."""
        return contextlib.nullcontext()

    def connect(self, num_gpus: int) -> Executor:
        """The executor of this task, connected to the other tasks. Raises PeerLostError."""
        return MirroredExecutor.on(replica_devices(self._spec.replicas, num_gpus))

    def check_agreement(self, executor: Executor) -> None:
        """Raises ClusterError if tasks differ in what must be equal, before the model is built."""

    def write_last(self, reached: Reached, checkpointer: Checkpointer) -> None:
        """Saves the last complete step after an error."""
        write_if_newer(reached, checkpointer)


@contextlib.contextmanager
def configured_tensorflow(spec: TaskSpec) -> Iterator[None]:
    """Configures TensorFlow before its first op; in the context, what XLA compiles is kept."""
    configure_tensorflow(spec)
    with contextlib.ExitStack() as stack:
        if spec.recipe.config.jit_compile is not False:
            stack.enter_context(kept_programs(spec.model_dir, spec.num_threads))
        if spec.log_device_placement:
            _write_placement_to_file(spec)
        yield


def configure_tensorflow(spec: TaskSpec) -> None:
    """Sets the numbers of threads, the kind of ops, and where they are placed."""
    num_ops = spec.num_threads
    if spec.strategy == "multiworker" and spec.cluster and spec.cluster.num_hosts > 1:
        num_ops = max(num_ops or num_cores(), _OPS_WITH_NETWORK)
    if spec.op_threads:
        tf.config.threading.set_intra_op_parallelism_threads(spec.op_threads)
    if num_ops:
        tf.config.threading.set_inter_op_parallelism_threads(num_ops)
    if spec.recipe.config.virtual_replicas:
        # The optimizer of graphs would join the sums of several parts of a batch.
        tf.config.threading.set_inter_op_parallelism_threads(num_ops or num_cores())
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    if spec.recipe.config.deterministic:
        tf.config.experimental.enable_op_determinism()
        tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.set_soft_device_placement(True)
    tf.debugging.set_log_device_placement(spec.log_device_placement)


def _write_placement_to_file(spec: TaskSpec) -> None:
    """TensorFlow prints a line per op to descriptor 1; Python's own lines stay where they were."""
    directory, name = directory_of_logs(spec.model_dir), "placement.txt"
    if spec.cluster is None:
        directory = directory.parent
    else:
        name = f"{spec.cluster.task.job}-{spec.cluster.task.index}.{name}"
    path = os.path.join(directory, name)
    os.makedirs(directory, exist_ok=True)
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    with open(path, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
    if spec.is_chief and not spec.is_quiet:
        print(f"the device of each op: {shown(path)}")
