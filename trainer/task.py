"""One task of a run, from a checked command line to its exit code.

    spec = TaskSpec(strategy="mirrored", recipe=recipe, cluster=None, model_dir="runs/a")
    exit_code = run(spec)

`run` is the whole life of a task, in eight numbered steps. The order is given by TensorFlow and by
the user: mistakes in the cluster and the data are found before this task connects (mistakes in the
model: in step 5), devices are configured before the first op, and the executor is connected before
the first variable.
"""

import contextlib
import dataclasses
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import tensorflow as tf

from data.system.cores import num_cores
from data.system.errors import TrainerError
from data.system.files import absolute as absolute_path
from data.system.files import exists, is_s3, is_url, shown
from data.system.stopwatch import SERVING
from strategies.base import DataFaultError, Executor, PeerLostError, Position
from strategies.cluster.connections import limit_silence
from strategies.cluster.peers import check_own_address, port_of
from strategies.cluster.ports import held
from strategies.cluster.rendezvous import Processes, connecting
from strategies.cluster.tf_config import Cluster, ClusterError
from strategies.lost_peers import loss_of
from strategies.mirrored import MirroredExecutor, replica_devices, use_gpus
from strategies.multiworker import MultiWorkerExecutor
from strategies.ps.asynchronous import AsynchronousExecutor
from strategies.ps.servers import ask_chief_to_stop, serve, start_server
from strategies.ps.sync.executor import SynchronousExecutor
from trainer.build import build_checkpointer, check_for_strategy, check_standby
from trainer.checkpoints.finite import NonFiniteLossError
from trainer.checkpoints.marks import Saved
from trainer.checkpoints.survivors import remove_claims, save_last_complete_step
from trainer.checkpoints.takeover import save_left_step
from trainer.compilation import choose_compilation
from trainer.compiled_programs import kept_programs
from trainer.config import ConfigError, changed_fields, data_dir, to_json
from trainer.config_checks import check_replicas
from trainer.config_file import absolute
from trainer.evaluator import follow
from trainer.exit_codes import EXIT_BUG, EXIT_DONE, EXIT_RESTART, first_line
from trainer.guards import run_lock
from trainer.guards.fingerprint import (
    as_number,
    log_keras_settings,
    process_settings,
    shared_settings,
    versions,
)
from trainer.guards.signals import StopSignals
from trainer.guards.watchdog import Watchdog
from trainer.hooks.base import CatchUp, Hook
from trainer.hooks.building import Parts, chief_hooks, shared_hooks
from trainer.hooks.console import Console
from trainer.hooks.export import check_export, export_notes
from trainer.hooks.newest_group import StopIfReplaced
from trainer.hooks.progress import progress_writers
from trainer.inputs import (
    Inputs,
    check_batches,
    data_errors_explained,
    open_inputs,
)
from trainer.learner import Learner
from trainer.preflight import check_model_dir, disk_errors_explained, finished_result
from trainer.resume import restore_together, train_recovering, warn_if_begun_before
from trainer.run_files import Document, RunFiles, point_latest_to
from trainer.run_record.recorder import Recorder
from trainer.run_record.report_upload import uploading_reports
from trainer.session import build_session
from trainer.task_spec import TaskSpec

log = logging.getLogger(__name__)

# Ops that a worker runs at the same time at least, if other workers are on other hosts. With one
# thread all-reduces wait for the ops of the backward pass: a step took 1.5 times as long.
_OPS_WITH_NETWORK = 4


def run(spec: TaskSpec, signals: StopSignals | None = None) -> int:
    """Runs one task to its end; returns its exit code. `signals`: handles stop signals.

    Raises NonFiniteLossError if training diverged, and a UsageError for a user's mistake.
    """
    task = "worker-0" if spec.cluster is None else str(spec.cluster.task).replace(" ", "-")
    with (
        signals or StopSignals() as signals,
        Recorder(spec.model_dir, task) as recorder,
        contextlib.ExitStack() as at_end,
    ):
        if spec.is_checked:  # Otherwise this task may refuse the directory.
            recorder.open()
        # 1. Check what is known without TensorFlow's runtime.
        _check_cluster(spec)
        # 2. Configure TensorFlow, before it touches a device. Evaluators and servers end here.
        _configure_tensorflow(spec)
        if spec.recipe.config.jit_compile is not False:
            at_end.enter_context(kept_programs(spec.model_dir, spec.num_threads))
        if spec.log_device_placement:
            _write_placement_to_file(spec)
        if spec.cluster and spec.cluster.task.job == "evaluator":
            lines = "evaluator/metrics.jsonl"
            # So that a second evaluator is refused.
            with (
                held(port_of(spec.cluster.address)),
                uploading_reports(spec.model_dir, [lines, "tensorboard/eval"], resumes=lines),
            ):
                recorder.open()
                return follow(spec, signals, recorder.stopwatch)
        num_gpus = use_gpus(spec.num_gpus if spec.computes else 0)
        _limit_silence(spec)
        if spec.serves:
            _copy_data(spec)
            _serve(spec, signals, recorder, num_gpus)
        # 3. Open the data, before other tasks wait for this one.
        with _answering_servers(spec, num_gpus):
            inputs = open_inputs(spec.recipe, spec.num_threads, copies_all=spec.strategy == "ps")
            check_model_dir(spec.model_dir)
        # 4. Connect, before the first variable.
        try:
            executor = _connect(spec, num_gpus)
        except PeerLostError as error:
            log.error("%s", error)
            return EXIT_RESTART
        executor.stopwatch = recorder.stopwatch
        started = time.monotonic()
        with _supervised(spec, signals, executor, recorder) as outcome:
            # 5. Build the model, the optimizer and the checkpointer.
            parts = _build(spec, inputs, executor)
            # 6. Resume. From here on the files of a former run are overwritten.
            if spec.is_chief and not spec.is_checked:  # Otherwise its launcher sees to it.
                wait_secs = run_lock.longest_wait_secs(spec.grace_secs)
                lock = run_lock.locked(spec.model_dir, wait_secs, log.warning)
                has_waited = at_end.enter_context(lock)
                if has_waited and finished_result(spec.model_dir, spec.recipe.config):
                    log.warning("%s is finished.", spec.model_dir)
                    outcome.exit_code = EXIT_DONE
                    return EXIT_DONE
            saved = _resume(spec, parts)
            recorder.open(makes_directory=True)
            # 7. Train.
            config = spec.recipe.config
            console = None
            if spec.is_chief:
                console = Console(config.train_steps, executor.pace, is_quiet=spec.is_quiet)
            hooks = [recorder, *_begin(spec, parts, console, saved)]
            if spec.is_chief and spec.generation is not None:
                hooks.insert(0, StopIfReplaced(spec.model_dir, spec.generation))
            if saved:  # The former process may have ended at that step before it called them.
                hooks.append(CatchUp(tuple(hooks)))
            with (
                _failure_recorded(spec, parts, started),
                _uploading(spec, parts),
                _complete_steps_saved(spec, parts, signals),
            ):
                step = train_recovering(
                    executor,
                    parts.learner,
                    parts.checkpointer,
                    hooks,
                    parts.inputs.train.order,
                    config,
                )
            outcome.exit_code = _record_end(spec, parts, hooks, console, step, started)
            # 8. Close: `_supervised` does it when this block ends, also after an error.
        return EXIT_RESTART if outcome.exit_code is None else outcome.exit_code


@dataclass
class _Outcome:
    """The exit code of this task once everything is trained and saved; None before."""

    exit_code: int | None = None


def _check_cluster(spec: TaskSpec) -> None:
    if spec.cluster is None:
        return
    if spec.has_evaluator and spec.recipe.config.early_stopping.patience:
        raise ConfigError(
            "config.early_stopping needs a run that evaluates, but TF_CONFIG names an evaluator, "
            "whose results come too late for the tasks that train. Leave one of the two out."
        )
    check_own_address(spec.cluster)


def _configure_tensorflow(spec: TaskSpec) -> None:
    num_ops = spec.num_threads
    if spec.strategy == "multiworker" and spec.cluster and spec.cluster.num_hosts > 1:
        num_ops = max(num_ops or num_cores(), _OPS_WITH_NETWORK)
    if spec.num_threads:
        tf.config.threading.set_intra_op_parallelism_threads(spec.num_threads)
    if num_ops:
        tf.config.threading.set_inter_op_parallelism_threads(num_ops)
    tf.config.set_soft_device_placement(True)
    tf.debugging.set_log_device_placement(spec.log_device_placement)


def _limit_silence(spec: TaskSpec) -> None:
    if spec.cluster and spec.stall_timeout_secs:
        # The kernel repeats packets at intervals that double, so a connection may not outlive a
        # silence of half the limit. Within that time a silent task is considered lost, by the chief
        # or another worker after 0.5 of --stall_timeout_secs, by a worker that serves after 0.65.
        limit_silence(spec.stall_timeout_secs * (1.5 if spec.serves else 1.0))


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


def _copy_data(spec: TaskSpec) -> None:
    """Copies data at s3:// to this machine: the graphs of a worker read files."""
    assert spec.cluster is not None
    if spec.cluster.task.job == "worker" and is_s3(data_dir(spec.recipe.config)):
        open_inputs(spec.recipe, copies_all=True)


def _serve(spec: TaskSpec, signals: StopSignals, recorder: Recorder, num_gpus: int) -> NoReturn:
    cluster = spec.cluster
    assert cluster is not None

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
        versions=versions(),
        # Later than the chief, which ends the run if a ps is silent for all tasks.
        silence_secs=0.65 * spec.stall_timeout_secs,
        on_gone=end_without_chief,
        on_end=end,
    )


def _answering_servers(spec: TaskSpec, num_gpus: int) -> contextlib.AbstractContextManager[None]:
    """Under ps, opens the chief's port early, so that servers that wait for the chief see it."""
    if spec.cluster is not None and "ps" in spec.cluster.jobs:
        if not spec.cluster.is_server:
            return held(port_of(spec.cluster.address))
        start_server(spec.cluster, spec.num_threads, num_gpus)
    return contextlib.nullcontext()


def _connect(spec: TaskSpec, num_gpus: int) -> Executor:
    cluster, wire_dtype = spec.cluster, spec.wire_dtype
    if cluster is None:
        return MirroredExecutor.on(replica_devices(spec.replicas, num_gpus))

    def end_unconnected(message: str) -> None:
        log.error("%s: ending. Start this task again when all tasks answer.", message)
        os._exit(EXIT_RESTART)

    def watched(cluster: Cluster, processes: Processes) -> contextlib.AbstractContextManager[None]:
        return connecting(cluster, spec.stall_timeout_secs / 2, end_unconnected, processes)

    if spec.strategy == "multiworker":
        return MultiWorkerExecutor.connect(
            cluster, spec.communication, watched, wire_dtype=wire_dtype, bucket_mb=spec.bucket_mb
        )
    types = {"wire_dtype": wire_dtype, "read_dtype": spec.read_dtype}
    if to_aggregate := spec.replicas_to_aggregate:
        return SynchronousExecutor.connect(
            cluster, versions(), watched, replicas_to_aggregate=to_aggregate, **types
        )
    return AsynchronousExecutor.connect(
        cluster, versions(), watched, max_staleness=spec.max_staleness, **types
    )


@contextlib.contextmanager
def _supervised(
    spec: TaskSpec, signals: StopSignals, executor: Executor, recorder: Recorder
) -> Iterator[_Outcome]:
    """Stops on signals, ends this process if nothing moves, and closes the executor in the end.

    A lost peer ends the context without an error, and without an exit code in the outcome.
    """
    outcome = _Outcome()

    def end_stalled(message: str) -> None:
        if outcome.exit_code is not None:
            log.warning("%s; training was complete and saved before.", message)
            os._exit(outcome.exit_code)
        log.error("%s: ending. The last checkpoint is complete; restart to resume.", message)
        recorder.close_stalled()
        # Without the step: it is on devices that may not answer.
        _write_result(spec, {"step": None, "exit_code": EXIT_RESTART, "why": message})
        os._exit(EXIT_RESTART)

    def end_without_peer(message: str) -> None:
        if outcome.exit_code is None and executor.abandon_peers(message):
            log.error("%s.", message)
            time.sleep(spec.grace_secs)  # The main thread saves and ends meanwhile.
        end_stalled(message)

    signals.on_stop(executor.request_stop, spec.grace_secs)
    if spec.stall_timeout_secs:
        # Half the time: the name of a silent peer explains more than "nothing moved".
        executor.watch_peers(spec.stall_timeout_secs / 2, end_without_peer)
    with Watchdog(spec.stall_timeout_secs, end_stalled) as watchdog:
        executor.on_progress = watchdog.moved
        try:
            yield outcome
        except BaseException as error:
            # Not only PeerLostError: a hook reads variables, too.
            is_lost = loss_of(error) is not None
            if is_lost:
                said = first_line(error)
                log.error("%s. The last checkpoint is complete; restart to resume.", said)
            # Servers also stay for a chief that starts when another run has ended.
            executor.close_after_error(lost=is_lost or isinstance(error, run_lock.LockedError))
            if is_lost:
                return
            raise
        assert outcome.exit_code is not None
        try:
            executor.close(outcome.exit_code)
        except PeerLostError as error:
            # A peer that got the last message first may have ended: nothing for a user to do.
            log.info("%s; training was complete and saved before.", error)


def _build(spec: TaskSpec, inputs: Inputs, executor: Executor) -> Parts:
    # Before the model is built: with other settings of Keras on this host, building may fail.
    _check_agreement(spec, executor)
    if spec.is_chief and not spec.is_checked:
        log_keras_settings()
    check_replicas(spec.recipe.config, executor.replicas_per_step)
    inputs, specs, learner = build_session(spec.recipe, inputs, executor.build)
    check_for_strategy(
        learner,
        spec.recipe,
        strategy=spec.strategy,
        num_workers=executor.num_replicas,
        read_dtype=spec.read_dtype,
    )
    choose_compilation(learner, spec.recipe, inputs.train, is_cluster=spec.cluster is not None)
    if not spec.is_checked:
        check_batches(inputs, learner, spec.recipe)
        check_export(spec.recipe, learner.model, specs)
    train = dataclasses.replace(inputs.train, gives_seeds=learner.needs_seeds)
    inputs = dataclasses.replace(inputs, train=train)
    checkpointer = build_checkpointer(
        spec.recipe,
        spec.model_dir,
        inputs,
        learner,
        executor.io_device,
        is_shared=spec.generation is not None,
    )
    check_standby(checkpointer, spec.recipe.path, spec.ps_standby)
    checkpointer.on_progress = executor.on_progress
    return Parts(spec.recipe, spec.model_dir, inputs, specs, executor, learner, checkpointer)


def _check_agreement(spec: TaskSpec, executor: Executor) -> None:
    ours = {
        **versions(),
        **process_settings(),
        **shared_settings(spec.recipe, wire_dtype=spec.wire_dtype, bucket_mb=spec.bucket_mb),
        # Tasks that do not evaluate would wait for the others without end.
        "the evaluator of TF_CONFIG": "an evaluator" if spec.has_evaluator else "none",
    }
    if not _differs(executor, dict(ours)):
        return
    # If the names differ too, only the names that every task has can be compared.
    if _differs(executor, list(ours)):
        ours = dict(versions())
    different = [name for name, value in ours.items() if _differs(executor, [name, value])]
    listed = ", ".join(f"{name} ({ours[name]} here)" for name in different)
    raise ClusterError(
        f"The tasks of this run differ in {listed}. Give all of them the same command, cluster, "
        "config file and code, and install the same versions."
    )


def _differs(executor: Executor, value: object) -> bool:
    """Returns True if tasks that run the loop have different values. All must call it together."""
    return len(set(executor.gathered(as_number(value)))) > 1


def _resume(spec: TaskSpec, parts: Parts) -> Saved | None:
    executor = parts.executor
    files = RunFiles(spec.model_dir)
    # Without it this is another run: whoever has deleted the directory wants to begin anew.
    if exists(files.config):
        save_left_step(executor, parts.learner, parts.checkpointer)
    saved = restore_together(executor, parts.checkpointer, parts.learner)
    if spec.is_chief:
        with disk_errors_explained(spec.model_dir):
            remove_claims(parts.checkpointer)
    if spec.is_chief and not saved:
        warn_if_begun_before(files)
    recorded = files.recorded("all_reduce") if saved and spec.is_chief else {}
    all_reduce = executor.choose_buckets(parts.learner, recorded)
    if spec.is_chief:
        with disk_errors_explained(spec.model_dir):
            files.write_config(
                {**_config_document(spec, parts.inputs, parts.learner), "all_reduce": all_reduce}
            )
            files.remove_result()
        if spec.is_latest:
            point_latest_to(spec.model_dir)
    with data_errors_explained(parts.inputs):  # Examples to cache are parsed here.
        position = saved.position if saved else Position()
        executor.start(parts.learner, parts.inputs.train, parts.inputs.evaluation, position)
    executor.restore_worker_stats(saved.counts if saved else {})
    executor.publish(
        parts.checkpointer.variables,
        parts.checkpointer.run_identity,
        has_standby=spec.ps_standby > 0,
    )
    if spec.is_chief and not saved and spec.recipe.config.recover_from_nan:
        parts.checkpointer.save(0, Position(), executor.worker_stats())  # To go back to.
    return saved


def _config_document(spec: TaskSpec, inputs: Inputs, learner: Learner) -> Document:
    config = spec.recipe.config
    return {
        "strategy": spec.strategy,
        "recipe": absolute(spec.recipe.path),
        "data_dir": absolute_path(data_dir(spec.recipe.config)),
        "config": json.loads(to_json(config)),
        "best_is_lowest": learner.objective.is_better_lower(config.best_metric),
        "wire_dtype": spec.wire_dtype,
        "read_dtype": spec.read_dtype,
        "flags": list(spec.flags),
        "cluster": None if spec.cluster is None else json.loads(spec.cluster.tf_config()),
        "train_examples": inputs.train.split.num_examples,
        "eval_examples": inputs.evaluation.split.num_examples,
        "records_skipped": inputs.records_skipped,
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        },
        "process_settings": process_settings(),
    }


def _begin(
    spec: TaskSpec, parts: Parts, console: Console | None, saved: Saved | None
) -> list[Hook]:
    if console is None:
        return shared_hooks(parts, evaluates=not spec.has_evaluator)
    config, inputs = spec.recipe.config, parts.inputs
    num_epochs = config.train_steps * config.batch_size / inputs.train.split.num_examples
    if spec.is_verbose:
        console.say(f"config {spec.recipe.path}: {to_json(config)}")
    console.say(
        f"{spec.strategy}: {parts.executor.num_replicas} replica(s), batch {config.batch_size:,}, "
        f"{config.train_steps:,} steps ({num_epochs:,.1f} epochs)"
    )
    console.say(
        f"{data_dir(config)}: {inputs.train.split.num_examples:,} training and "
        f"{inputs.evaluation.split.num_examples:,} evaluation examples"
    )
    console.say(
        f"{spec.recipe.path}: {parts.learner.model.count_params():,} parameters, "
        f"{type(parts.learner.optimizer).__name__}; the whole config is in "
        f"{shown(RunFiles(spec.model_dir).config)}"
    )
    if inputs.note:
        console.say(inputs.note)
    if spec.has_evaluator:
        console.say("the evaluator task evaluates; this one does not")
    if spec.is_verbose and (table := parts.executor.placement_table()):
        console.say(table)
    if all_reduce := RunFiles(spec.model_dir).recorded("all_reduce"):
        items = ", ".join(f"{name} {value:g}" for name, value in all_reduce.items())
        console.say(f"all-reduce: {items}")
    if saved and saved.step:
        console.say(f"resuming from step {saved.step:,}")
        if changed := changed_fields(saved.config, config):
            console.say(f"changed since that step: {changed}")
    elif parts.learner.origin:
        console.say(parts.learner.origin)
    notes = export_notes(parts.learner.model, spec.recipe.path) if config.export else []
    for note in [*parts.learner.notes, *notes]:
        console.say(f"note: {note}")
    document = _config_document(spec, inputs, parts.learner)
    progress = progress_writers(spec.metrics_address, spec.model_dir, config.train_steps)
    return chief_hooks(
        parts,
        console,
        document,
        progress,
        evaluates=not spec.has_evaluator,
        standby_every_steps=spec.ps_standby,
    )


@contextlib.contextmanager
def _uploading(spec: TaskSpec, parts: Parts) -> Iterator[None]:
    """Uploads reports while the run writes them, if --model_dir is at s3://."""
    if not spec.is_chief:
        yield
        return
    lines = "metrics.jsonl"
    with uploading_reports(spec.model_dir, [lines, "tensorboard"], resumes=lines) as sync:
        parts.checkpointer.before_mark = sync
        yield


@contextlib.contextmanager
def _complete_steps_saved(spec: TaskSpec, parts: Parts, signals: StopSignals) -> Iterator[None]:
    """Saves the last complete step if an error ends training.

    Not if the loss is not finite, if `ps` has lost a server (the next chief looks what is left), or
    after a second Ctrl-C in a notebook. Under multiworker a launcher says with SIGUSR1 that a
    worker has died.
    """
    executor, is_multiworker = parts.executor, spec.strategy == "multiworker"
    if is_multiworker:
        signals.on_peer_lost(lambda: executor.abandon_peers("another worker has died"))
    try:
        yield
    except BaseException as error:
        is_lost = loss_of(error) is not None
        if is_lost:
            log.warning("%s.", first_line(error))
        ends_at_once = isinstance(error, KeyboardInterrupt) and executor.stop_requested
        has_no_state = isinstance(error, NonFiniteLossError) or (is_lost and spec.strategy == "ps")
        if not (ends_at_once or has_no_state):
            save_last_complete_step(executor, parts.learner, parts.checkpointer, spec.cluster)
        raise
    finally:
        if is_multiworker:
            signals.on_peer_lost(None)


@contextlib.contextmanager
def _failure_recorded(spec: TaskSpec, parts: Parts, started: float) -> Iterator[None]:
    """Writes an error to result.json, with the file and offset if the data caused it.

    On leaving, also finishes a checkpoint that is being written.
    """
    try:
        try:
            yield
        except DataFaultError as error:
            with data_errors_explained(parts.inputs):
                raise error.__cause__ or error from None
    except BaseException as error:
        is_lost = loss_of(error) is not None
        exit_code = error.exit_code if isinstance(error, TrainerError) else EXIT_BUG
        failed = {
            "step": None if is_lost else int(parts.learner.step.numpy()),
            "seconds": round(time.monotonic() - started, 3),
            "exit_code": EXIT_RESTART if is_lost else exit_code,
            "why": first_line(error),
        }
        # An error of this does not matter. A worker that fails says why: the chief only loses it.
        files = RunFiles(spec.model_dir)
        if not is_lost or (spec.is_chief and files.read_result() is None):
            files.write_result(failed)
        raise
    finally:
        parts.checkpointer.wait()


def _record_end(
    spec: TaskSpec,
    parts: Parts,
    hooks: Sequence[Hook],
    console: Console | None,
    step: int,
    started: float,
) -> int:
    """Writes result.json; returns the exit code, the same in all tasks that run the loop."""
    config, executor = spec.recipe.config, parts.executor
    stopped_early = next((hook.done for hook in hooks if hook.done), "")
    is_complete = step >= config.train_steps or bool(stopped_early)
    failures = [hook.failure for hook in hooks if hook.failure]
    exit_code = max((hook.failure_exit_code for hook in hooks if hook.failure), default=EXIT_DONE)
    if not is_complete:
        exit_code = EXIT_RESTART
    if spec.is_chief and not parts.checkpointer.has_saved(step):
        failures.insert(0, f"Step {step:,} could not be saved")
        exit_code = EXIT_RESTART
    reason = (stopped_early or "done") if is_complete else "asked to stop"
    result: dict[str, Any] = {"eval": {}}  # JSON values.
    for hook in hooks:
        result |= hook.result()
    result |= {
        "step": step,
        "examples": executor.position.num_examples(parts.inputs.train.order),
        "seconds": round(time.monotonic() - started, 3),
        "exit_code": exit_code,
        "why": "; ".join(failures) or reason,
    }
    if stopped_early:
        result["stopped_early_by"] = dataclasses.asdict(config.early_stopping)
    if parts.inputs.records_skipped is not None:
        result["records_skipped"] = parts.inputs.records_skipped
    if skips := executor.position.skipped:
        result |= {"nan_recoveries": len(skips), "examples_skipped": sum(skips)}
    result |= {name: dict(by_worker) for name, by_worker in executor.worker_stats().items()}
    if failure := _write_result(spec, result):
        failures.append(failure)
        exit_code = EXIT_RESTART
    if console:
        measured = "  ".join(f"{name} {value:.4f}" for name, value in result["eval"].items())
        line = f"{result['why']}: step {step:,}  {measured}  {result['seconds']:.1f} s"
        console.say(line, important=True)
        console.say(shown(RunFiles(spec.model_dir).result))
    for failure in failures:
        log.error("%s. Restart when the cause is removed, to resume from what was saved.", failure)
    # Only the chief writes, so only the chief can fail to; the other tasks end like the chief.
    return executor.gathered(exit_code)[0]


def _write_result(spec: TaskSpec, result: Document) -> str:
    return RunFiles(spec.model_dir).write_result(result) if spec.is_chief else ""
