"""What this task would do, and what it needs: the plan of the run, memory, disk, GPUs, versions.

wait_for_plan = plan_in_child(recipe, cluster, model_dir, makes_plan=True, reads_input=False)
plan = wait_for_plan(secs)      # a JSON object

The plan needs TensorFlow, which takes seconds and runs ops. So it is made in a fork: this process
stays free for the network, and may still connect to TensorFlow's cluster, which needs a process
without ops.
"""

import contextlib
import multiprocessing
import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.system.cores import num_cores
from data.system.errors import TrainerError
from data.system.files import is_url
from data.system.memory import free_memory_bytes
from data.system.version import version_of
from strategies.cluster.ports import outgoing_ports
from strategies.cluster.tf_config import Cluster, Task
from trainer import flags
from trainer.config import Recipe
from trainer.doctor.exchange import Json
from trainer.guards.fingerprint import as_number, software
from trainer.guards.run_lock import RUN_LOCK, LockedError, locked
from trainer.hooks.input_limit import limit_of
from trainer.run_files import RunFiles, two_digits

if TYPE_CHECKING:
    from data.reader import Reader
    from strategies.ps.placement import Placement
    from trainer.inputs import Inputs

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOCK_SECS = 2.0
# Batches that are in memory at a time: the batch of the step, and those that are prepared.
_BATCHES = 3
_READ_SECS = 2.0  # Of the input, to measure its rate.


def plan_in_child(
    recipe: Recipe, cluster: Cluster, model_dir: str, *, makes_plan: bool, reads_input: bool
) -> Callable[[float | None], Json]:
    """Starts to make the plan. Must be called before this process has threads.

    Without `makes_plan`, of a task that gets the config from its chief, it only finds the GPUs.
    `reads_input` also measures the input, which takes two seconds.
    The returned function waits for the plan, without a limit if it gets None. It returns the plan;
    with `error` if it failed, or `is_late` if it is not ready in that many seconds.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def make() -> None:
        made = _gpus(cluster)
        if makes_plan:
            try:
                made |= _plan(recipe, cluster, model_dir, made["gpus"], reads_input=reads_input)
            except (TrainerError, OSError) as error:
                made["error"] = str(error)
        theirs.send(made)

    process = context.Process(target=make, daemon=True)
    process.start()
    theirs.close()

    def wait(secs: float | None) -> Json:
        limit = None if secs is None else max(0.0, secs)
        try:
            plan: Json = ours.recv() if ours.poll(limit) else {"is_late": True}
        except EOFError:
            process.join()
            plan = {"error": f"the process that made the plan ended: {process.exitcode}"}
        process.kill()
        return plan

    return wait


def machine(cluster: Cluster, model_dir: str, settings: Mapping[str, str]) -> Json:
    """Returns the addresses, free memory and disk, cores, software and settings of this task.

    `settings` is empty in a task that gets the config from its chief.
    """
    packages = {name: version_of(name) for name in ("tensorflow", "keras")}
    report: Json = {
        "task": str(cluster.task),
        "host": socket.gethostname(),
        "machine": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node(),
        "address": cluster.address,
        "addresses": {str(task): cluster.address_of(task) for task in cluster.tasks()},
        "free_memory_bytes": free_memory_bytes(),
        "cores": num_cores(),
        "outgoing_ports": outgoing_ports(),
        "versions": dict(software(**packages)),
        "fingerprint": {name: as_number(value) for name, value in settings.items()},
        "free_disk_bytes": None,
    }
    if not is_url(model_dir):
        report["free_disk_bytes"] = shutil.disk_usage(_existing(model_dir)).free
    return report


def place_fault(model_dir: str) -> str:
    """Returns why a run cannot be saved in `model_dir`; empty if it can."""
    if is_url(model_dir):
        return ""
    existing = _existing(model_dir)
    if not os.access(existing, os.W_OK | os.X_OK):
        return (
            f"this user cannot write to {existing}, where the run would be saved. Change its owner "
            "or its mode, or give another --model_dir"
        )
    if Path(model_dir, RUN_LOCK).exists():
        try:
            # The doctors of other hosts hold the lock for a moment.
            with locked(model_dir, _LOCK_SECS, lambda _: None):
                pass
        except LockedError as error:
            return str(error)
    return ""


def mark_in(model_dir: str) -> Path | None:
    """Makes an empty file for `shared_fault`, and returns it; None if `model_dir` is a URL."""
    if is_url(model_dir):
        return None
    mark = _existing(model_dir) / f".doctor-{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):  # On a full disk nothing is compared.
        mark.touch()
        return mark
    return None


def shared_fault(model_dir: str, mark: str) -> str:
    """Returns a message if `model_dir` is not the directory in which the chief made `mark`."""
    existing = _existing(model_dir)
    if not mark or (existing / Path(mark).name).exists():
        return ""
    return (
        f"{existing} is not the directory {Path(mark).parent} of the chief: a file that the chief "
        "has written is not there. Give a --model_dir of a file system that all hosts share, or "
        "s3://BUCKET/DIRECTORY"
    )


def _existing(model_dir: str) -> Path:
    """The directory, or the nearest directory above it that exists."""
    existing = Path(os.path.abspath(model_dir))
    while not existing.exists():
        existing = existing.parent
    return existing


def _gpus(cluster: Cluster) -> Json:
    from trainer.tf_setup import import_tensorflow

    import_tensorflow()
    import tensorflow as tf

    from strategies.cluster.gpus import choose_gpus
    from strategies.gpus import capability_notes, visible_gpus

    choose_gpus(cluster)
    gpus = tf.config.list_physical_devices("GPU")[: flags.NUM_GPUS.value]
    names = visible_gpus(os.environ)[: len(gpus)]
    return {"gpus": len(gpus), "gpu_notes": capability_notes(gpus), "gpu_names": names}


def _plan(
    recipe: Recipe, cluster: Cluster, model_dir: str, num_gpus: int, *, reads_input: bool
) -> Json:
    import math

    import tensorflow as tf

    from strategies.ps.placement import place
    from trainer.config import data_dir
    from trainer.config_checks import check_replicas
    from trainer.preflight import preflight, slots_included

    config, num_ps = recipe.config, cluster.num("ps")
    own_replicas = max(1, num_gpus)
    if flags.STRATEGY.value == "mirrored":
        own_replicas = flags.REPLICAS.value or own_replicas
    if num_ps:
        num_replicas = cluster.num("worker")
    else:
        num_replicas = own_replicas * len(cluster.trainers)
        check_replicas(config, num_replicas)
    found = preflight(recipe, model_dir)
    train, evaluation = found.inputs.train, found.inputs.evaluation
    example_bytes = sum(
        spec.dtype.size * math.prod(spec.shape[1:])
        for spec in tf.nest.flatten(train.parsed_specs)
        if spec.shape[1:].is_fully_defined()
    )
    is_asynchronous = bool(num_ps) and not flags.SYNC_REPLICAS.value
    replica_examples = config.batch_size if is_asynchronous else config.batch_size // num_replicas
    variable_bytes = sum(group.num_bytes for group in found.groups)
    table_bytes = sum(group.num_bytes for group in found.groups if group.is_table)
    gradient_bytes = sum(group.gradient_bytes for group in found.groups)
    batch_bytes = replica_examples * example_bytes
    plan: Json = {
        "strategy": flags.STRATEGY.value,
        "num_replicas": num_replicas,
        "batch_size": config.batch_size,
        "replica_examples": replica_examples,
        "replica_bytes": batch_bytes,
        "data_dir": data_dir(config),
        "train_examples": train.split.num_examples,
        "train_files": len(train.split.shards),
        "eval_examples": evaluation.split.num_examples,
        "eval_files": len(evaluation.split.shards),
        "variable_bytes": variable_bytes,
        "slots": slots_included(found.groups),
        "gradient_bytes": gradient_bytes,
        "local_steps": config.local_steps.chosen,
        "input": input_lines(found.inputs, model_dir) if reads_input else [],
        "first_step": (found.saved.step if found.saved else 0) + 1,
        "last_step": config.train_steps,
        # One more while the next checkpoint is written, and the best one.
        "disk_bytes": variable_bytes * (config.keep_checkpoints + 2),
    }
    loads: Sequence[int] = ()
    if num_ps:
        num_gradient_buffers = num_replicas if flags.SYNC_REPLICAS.value else 0
        placement = place(found.groups, num_ps, num_gradient_buffers=num_gradient_buffers)
        loads, plan["placement"] = placement.num_bytes, placement.table()
        if flags.PS_STANDBY.value:
            loads = _loads_with_standby(placement, num_gradient_buffers)
    # A worker has its gradients twice: as computed, and as sent or summed.
    worker_bytes = 2 * gradient_bytes + _BATCHES * batch_bytes

    def memory_bytes(task: Task) -> int:
        """The bytes without activations, whose size only a step knows."""
        if not num_ps:
            # The replicas of a process share its tables.
            return int(own_replicas * (variable_bytes - table_bytes + worker_bytes)) + table_bytes
        if task.job == "ps":
            return loads[task.index]
        # A worker of ps reads the variables; the chief copies all of them to save them.
        return variable_bytes if task.job == "chief" else gradient_bytes + worker_bytes

    return plan | {"memory_bytes": {str(task): memory_bytes(task) for task in cluster.tasks()}}


def _loads_with_standby(placement: "Placement", num_gradient_buffers: int) -> list[int]:
    """The bytes on each ps while a copy of --ps_standby is on its way.

    A ps then also holds its own values of two copies, and those of the ps before it.
    """
    held = [0] * len(placement.num_bytes)
    for group in placement.groups:
        held[group.ps] += group.num_bytes - num_gradient_buffers * group.gradient_bytes
    return [load + 2 * held[ps] + 2 * held[ps - 1] for ps, load in enumerate(placement.num_bytes)]


def input_lines(inputs: "Inputs", model_dir: str) -> Sequence[str]:
    """Returns what the input gives: the rate of a short read, and what a former run showed.

    Nothing is read over the network, or if the examples are cached in memory. Other programs on
    this machine change the rate, so it is information, and no finding.
    """
    from trainer.inputs import data_errors_explained

    lines = []
    reader = inputs.train
    if not (reader.caches_examples or any(is_url(shard.path) for shard in reader.split.shards)):
        with data_errors_explained(inputs):
            rate = _examples_per_sec(reader)
        lines.append(
            f"the input gives about {two_digits(rate)} examples/s here without a model; steps that "
            "take more would wait for it (docs/data.md#speed-and-memory)"
        )
    reports = RunFiles(model_dir).read_reports()
    if limit := limit_of([report for report in reports if report.get("split") == "train"]):
        lines.append(f"{model_dir}: {limit.text}")
    return lines


def _examples_per_sec(reader: "Reader") -> float:
    from data.disk_reader import DiskReader

    batches = iter(DiskReader(reader).batches(0, range(reader.order.lanes)))
    next(batches)  # Threads have started, and files are open.
    began, num_batches = time.monotonic(), 0
    while time.monotonic() < began + _READ_SECS:
        next(batches)
        num_batches += 1
    return num_batches * reader.batch_examples() / (time.monotonic() - began)
