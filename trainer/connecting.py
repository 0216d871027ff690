"""TensorFlow's devices, and this task's place in its cluster: a server, or an executor.

check_cluster(spec)
stack.enter_context(configured_tensorflow(spec))    # before TensorFlow touches a device
num_gpus = use_gpus_of(spec)
serve_task(spec, signals, recorder, num_gpus)       # ends the process; or
executor = connect(spec, num_gpus)                  # before the first variable

Strategies other than `mirrored` are imported where they begin: tasks start sooner without others.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import tensorflow as tf

from data.system.compat.connections import limit_silence
from data.system.cores import num_cores
from data.system.files import is_s3, is_url, shown
from data.system.stopwatch import SERVING
from strategies.base import Executor
from strategies.cluster.gpus import choose_gpus
from strategies.cluster.peers import check_own_address, port_of
from strategies.cluster.ports import held
from strategies.cluster.rendezvous import Processes, connecting
from strategies.cluster.tf_config import Cluster
from strategies.gpus import replica_devices, use_gpus
from strategies.mirrored import MirroredExecutor
from trainer.compiled_programs import kept_programs
from trainer.config import ConfigError, data_dir
from trainer.exit_codes import EXIT_RESTART
from trainer.guards.fingerprint import versions
from trainer.guards.signals import StopSignals
from trainer.inputs import open_inputs
from trainer.run_record.recorder import Recorder
from trainer.task_spec import TaskSpec

log = logging.getLogger(__name__)

# Ops that a worker runs at the same time at least, if other workers are on other hosts. With one
# thread all-reduces wait for the ops of the backward pass: a step took 1.5 times as long.
_OPS_WITH_NETWORK = 4


def check_cluster(spec: TaskSpec) -> None:
    """Raises ConfigError or ClusterError if this task cannot have its place in the cluster."""
    if spec.cluster is None:
        return
    if spec.has_evaluator and spec.recipe.config.early_stopping.patience:
        raise ConfigError(
            "config.early_stopping needs a run that evaluates, but TF_CONFIG names an evaluator, "
            "whose results come too late for the tasks that train. Leave one of the two out."
        )
    check_own_address(spec.cluster)


@contextlib.contextmanager
def configured_tensorflow(spec: TaskSpec) -> Iterator[None]:
    """Configures TensorFlow before its first op; in the context, what XLA compiles is kept."""
    if spec.cluster:
        choose_gpus(spec.cluster, is_launched=spec.is_checked)
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


def use_gpus_of(spec: TaskSpec) -> int:
    """Makes the GPUs of this task visible, and limits how long its connections may be silent."""
    num_gpus = use_gpus(spec.num_gpus if spec.computes else 0)
    if spec.cluster and spec.stall_timeout_secs:
        # The kernel repeats packets at intervals that double, so a connection may not outlive a
        # silence of half the limit. Within that time a silent task is considered lost, by the chief
        # or another worker after 0.5 of --stall_timeout_secs, by a worker that serves after 0.65.
        limit_silence(spec.stall_timeout_secs * (1.5 if spec.serves else 1.0))
    return num_gpus


def _write_placement_to_file(spec: TaskSpec) -> None:
    """TensorFlow prints a line per op to descriptor 1; Python's own lines stay where they were."""
    directory = spec.model_dir if spec.cluster is None else f"{spec.model_dir}/tasks"
    if is_url(directory):
        raise ConfigError(
            f"--log_device_placement writes to a file in --model_dir={spec.model_dir}, which must "
            "be a directory of this machine. Give such a directory, or leave the flag out."
        )
    os.makedirs(directory, exist_ok=True)
    task = spec.cluster.task if spec.cluster else None
    path = f"{directory}/{f'{task.job}-{task.index}.' if task else ''}placement.txt"
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    with open(path, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
    if spec.is_chief and not spec.is_quiet:
        print(f"the device of each op: {shown(path)}")


def serve_task(spec: TaskSpec, signals: StopSignals, recorder: Recorder, num_gpus: int) -> NoReturn:
    """Serves the chief until it ends this process."""
    from strategies.ps.servers import ask_chief_to_stop, serve

    cluster = spec.cluster
    assert cluster is not None
    if cluster.task.job == "worker" and is_s3(data_dir(spec.recipe.config)):
        open_inputs(spec.recipe, copies_all=True)  # The graphs of a worker read files.

    def leave() -> None:
        if not ask_chief_to_stop(cluster):
            log.warning("there is no chief: ending.")
            os._exit(EXIT_RESTART)
        log.info("%s: the chief saves, and then ends all tasks.", cluster.task)

    def end_without_chief(message: str) -> None:
        log.error("%s: ending. Restart this task when it can reach the chief and each ps.", message)
        os._exit(EXIT_RESTART)

    def end(exit_code: int) -> None:
        recorder.close()
        os._exit(exit_code)

    signals.on_stop(leave, spec.grace_secs)
    recorder.open()
    recorder.stopwatch.begin(None, SERVING)
    serve(
        cluster,
        spec.num_threads,
        spec.chief_timeout_secs,
        num_gpus=num_gpus,
        op_threads=spec.op_threads,
        versions=versions(),
        # Later than the chief, which ends the run if a ps is silent for all tasks.
        silence_secs=0.65 * spec.stall_timeout_secs,
        on_gone=end_without_chief,
        on_end=end,
    )


def answering_servers(spec: TaskSpec, num_gpus: int) -> contextlib.AbstractContextManager[None]:
    """Under ps, opens the chief's port early, so that servers that wait for the chief see it."""
    if spec.cluster is not None and "ps" in spec.cluster.jobs:
        if not spec.cluster.is_server:
            return held(port_of(spec.cluster.address))
        from strategies.ps.servers import start_server

        start_server(spec.cluster, spec.num_threads, num_gpus, spec.op_threads)
    return contextlib.nullcontext()


def connect(spec: TaskSpec, num_gpus: int) -> Executor:
    """The executor of this task, connected to the other tasks. Raises PeerLostError."""
    cluster = spec.cluster
    if cluster is None:
        return MirroredExecutor.on(replica_devices(spec.replicas, num_gpus))

    def end_unconnected(message: str) -> None:
        log.error("%s: ending. Start this task again when all tasks answer.", message)
        os._exit(EXIT_RESTART)

    def watched(cluster: Cluster, processes: Processes) -> contextlib.AbstractContextManager[None]:
        return connecting(cluster, spec.stall_timeout_secs / 2, end_unconnected, processes)

    if spec.strategy == "multiworker":
        from strategies.multiworker import MultiWorkerExecutor

        return MultiWorkerExecutor.connect(cluster, spec.transfer, watched)
    connected = cluster, versions(), watched
    if to_aggregate := spec.replicas_to_aggregate:
        from strategies.ps.sync.executor import SynchronousExecutor

        return SynchronousExecutor.connect(
            *connected, replicas_to_aggregate=to_aggregate, transfer=spec.transfer
        )
    from strategies.ps.asynchronous import AsynchronousExecutor

    return AsynchronousExecutor.connect(
        *connected, max_staleness=spec.max_staleness, transfer=spec.transfer
    )
