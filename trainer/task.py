"""One task of a run, from a checked command line to its exit code.

    spec = TaskSpec(strategy="mirrored", recipe=recipe, cluster=None, model_dir="runs/a")
    exit_code = run(spec)

`run` is the whole life of a task, in eight numbered steps. The order is given by TensorFlow and by
the user: mistakes in the cluster and the data are found before this task connects (mistakes in the
model: in step 5), devices are configured before the first op, and the executor is connected before
the first variable.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from data.system.background import in_background
from strategies.base import Executor
from strategies.lost_peers import PeerLostError, loss_of
from strategies.position import Position
from trainer import reporting
from trainer.checkpoints.finite import NonFiniteLossError
from trainer.checkpoints.last_step import save_last_complete_step
from trainer.checkpoints.marks import Saved
from trainer.connecting import Role, configured_tensorflow
from trainer.exit_codes import EXIT_DONE, EXIT_RESTART, first_line
from trainer.guards import run_lock
from trainer.guards.signals import StopSignals
from trainer.guards.watchdog import Watchdog
from trainer.hooks.building import Parts
from trainer.inputs import data_errors_explained, open_inputs
from trainer.model_dir import check_model_dir, disk_errors_explained, finished_result
from trainer.resume import restore_newest, train_recovering
from trainer.run_files import RunFiles, point_latest_to, progress_of
from trainer.run_record.recorder import Recorder
from trainer.session import build_parts
from trainer.task_spec import TaskSpec

log = logging.getLogger(__name__)


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
        role = _role_of(spec)
        role.prepare()
        # 2. Configure TensorFlow, before it touches a device. Evaluators and servers end here.
        at_end.enter_context(configured_tensorflow(spec))
        if (exit_code := role.run_other(signals, recorder)) is not None:
            return exit_code
        num_gpus = role.use_gpus()
        # 3. Open the data, before other tasks wait for this one.
        with role.answering(num_gpus):
            inputs = open_inputs(spec.recipe, spec.num_threads, copies_all=spec.strategy == "ps")
            check_model_dir(spec.model_dir)
        # 4. Connect, before the first variable.
        try:
            executor = role.connect(num_gpus)
        except PeerLostError as error:
            log.error("%s", error)
            return EXIT_RESTART
        executor.stopwatch = recorder.stopwatch
        started = time.monotonic()
        with _supervised(spec, signals, executor, recorder) as outcome:
            # 5. Build the model, the optimizer and the checkpointer. Before, the settings of Keras
            #    are compared: with other settings on this host, building may fail.
            role.check_agreement(executor)
            parts = build_parts(spec, inputs, executor)
            # 6. Resume. From here on the files of a former run are overwritten.
            if spec.is_chief and not spec.is_checked:  # Otherwise its launcher sees to it.
                wait_secs = run_lock.longest_wait_secs(spec.grace_secs)
                lock = run_lock.locked(spec.model_dir, wait_secs, log.warning)
                has_waited = at_end.enter_context(lock)
                if has_waited and finished_result(spec.model_dir, spec.recipe.config):
                    log.warning("%s is finished.", spec.model_dir)
                    outcome.exit_code = EXIT_DONE
                    return EXIT_DONE
            saved = _resume(parts)
            recorder.open(makes_directory=True)
            # 7. Train.
            hooks, console = reporting.hooks_of(parts, recorder, saved)
            with (
                reporting.failure_recorded(parts, started),
                reporting.uploading(parts),
                _complete_steps_saved(parts, role, signals),
            ):
                step = train_recovering(parts, hooks)
            outcome.exit_code = reporting.record_end(parts, hooks, console, step, started)
            # 8. Close: `_supervised` does it when this block ends, also after an error.
        return EXIT_RESTART if outcome.exit_code is None else outcome.exit_code


def _role_of(spec: TaskSpec) -> Role:
    if spec.cluster is None:
        return Role(spec)
    from trainer.in_cluster import ClusterRole  # One process needs nothing of it.

    return ClusterRole(spec)


@dataclass
class _Outcome:
    """The exit code of this task once everything is trained and saved; None before."""

    exit_code: int | None = None


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
        log.error("%s: ending.", message)
        log.error("%s", _what_a_restart_does(spec))
        recorder.close_stalled()
        # Without the step: it is on devices that may not answer.
        result = {"step": None, "exit_code": EXIT_RESTART, "why": message}
        if spec.is_chief:
            RunFiles(spec.model_dir).write_result(result)
        os._exit(EXIT_RESTART)

    peers = executor.peers

    def end_without_peer(message: str) -> None:
        if outcome.exit_code is None and peers:
            ends_at = time.monotonic() + spec.grace_secs
            # In the background: NCCL may not return from it.
            abandoned = in_background(lambda: peers.abandon(message))
            with contextlib.suppress(TimeoutError):
                if not abandoned.result(spec.grace_secs):
                    end_stalled(message)
                log.error("%s.", message)
                # The main thread saves and ends meanwhile.
                time.sleep(max(0.0, ends_at - time.monotonic()))
            message += "; the last complete step was not saved within --grace_secs"
        end_stalled(message)

    signals.on_stop(executor.request_stop, spec.grace_secs)
    if peers and spec.stall_timeout_secs:
        # Half the time: the name of a silent peer explains more than "nothing moved".
        peers.watch(spec.stall_timeout_secs / 2, end_without_peer)
    with Watchdog(spec.stall_timeout_secs, end_stalled) as watchdog:
        executor.on_progress = watchdog.moved
        try:
            yield outcome
        except BaseException as error:
            # Not only PeerLostError: a hook reads variables, too.
            is_lost = loss_of(error) is not None
            if is_lost:
                log.error("%s.", first_line(error))
                log.error("%s", _what_a_restart_does(spec))
            # Servers also stay for a chief that starts when another run has ended.
            if executor.recovery and not (is_lost or isinstance(error, run_lock.LockedError)):
                executor.close()
            if is_lost:
                return
            raise
        assert outcome.exit_code is not None
        try:
            executor.close(outcome.exit_code)
        except PeerLostError as error:
            # A peer that got the last message first may have ended: nothing for a user to do.
            log.info("%s; training was complete and saved before.", error)


def _what_a_restart_does(spec: TaskSpec) -> str:
    """Only the chief writes checkpoints, and so knows of each; a file system may not answer."""
    if not spec.is_chief:
        return "Restart to resume."
    saved_step, _ = progress_of(spec.model_dir)
    if not saved_step:
        return "No step has been saved: a restart begins at step 0."
    return "The last checkpoint is complete; restart to resume."


def _resume(parts: Parts) -> Saved | None:
    spec, executor, recovery = parts.spec, parts.executor, parts.executor.recovery
    files = RunFiles(spec.model_dir)
    saved = restore_newest(parts)
    if parts.learner.tables and not saved:
        parts.learner.tables.check_rows()
    recorded = files.recorded("all_reduce") if saved and spec.is_chief else {}
    with data_errors_explained(parts.inputs):  # Examples to cache are parsed here.
        position = saved.position if saved else Position()
        all_reduce = executor.start(
            parts.learner, parts.inputs.train, parts.inputs.evaluation, position, recorded
        )
    if spec.is_chief:
        with disk_errors_explained(spec.model_dir):
            document = reporting.config_document(parts)
            files.write_config({**document, "all_reduce": dict(all_reduce)})
            files.remove_result()
        if spec.is_latest:
            point_latest_to(spec.model_dir)
    executor.counts_before = saved.counts if saved else {}
    if recovery:
        variables, identity = parts.checkpointer.variables, parts.checkpointer.run_identity
        recovery.publish(variables, identity, has_standby=spec.ps_standby > 0)
    if spec.is_chief and not saved and spec.recipe.config.recover_from_nan:
        parts.checkpointer.save(0, Position(), executor.worker_stats())  # To go back to.
    return saved


@contextlib.contextmanager
def _complete_steps_saved(parts: Parts, role: Role, signals: StopSignals) -> Iterator[None]:
    """Saves the last complete step if an error ends training.

    Saves nothing if the loss is not finite, after a second Ctrl-C in a notebook, or if `ps` has
    lost a server: the next chief reads the step from the servers that are left. Under multiworker
    a launcher says with SIGUSR1 that a worker has died.
    """
    spec, executor, peers = parts.spec, parts.executor, parts.executor.peers
    if peers and spec.strategy == "multiworker":
        signals.on_peer_lost(lambda: peers.abandon("another worker has died"))
    try:
        yield
    except BaseException as error:
        is_lost = loss_of(error) is not None
        if is_lost:
            log.warning("%s.", first_line(error))
        ends_at_once = isinstance(error, KeyboardInterrupt) and executor.stop_requested
        is_on_servers = is_lost and executor.recovery is not None
        if not (ends_at_once or is_on_servers or isinstance(error, NonFiniteLossError)):
            state = parts.learner, parts.checkpointer
            save_last_complete_step(executor, *state, role.write_last)
        raise
    finally:
        if spec.strategy == "multiworker":
            signals.on_peer_lost(None)
