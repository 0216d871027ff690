"""The `evaluator` task: evaluates the checkpoints of a run, outside the training cluster.

    exit_code = follow(spec, cluster, signals, recorder)

If `TF_CONFIG` names an evaluator, the tasks that train do not evaluate. The evaluator evaluates
each new checkpoint on its own devices, and keeps the best. It ends when it has evaluated the last
checkpoint of a complete run.

    MODEL_DIR/evaluator/metrics.jsonl   the "eval" reports; TensorBoard's are in the usual place
    MODEL_DIR/evaluator/result.json     written last
    MODEL_DIR/checkpoints/best-*
"""

import contextlib
import logging
import os
import threading

from data.system.files import make_dirs, remove_tree
from data.system.stopwatch import Stopwatch
from strategies.cluster.peers import port_of
from strategies.cluster.ports import held
from strategies.cluster.tf_config import Cluster
from strategies.cluster.watching import watch_chief
from strategies.gpus import replica_devices, use_gpus
from strategies.mirrored import MirroredExecutor
from strategies.position import Position
from trainer.batch_checks import check_batches
from trainer.build import build_checkpointer
from trainer.checkpoints.checkpointer import ModelDirError
from trainer.checkpoints.file_checks import STORAGE_ERRORS
from trainer.checkpoints.marks import Saved
from trainer.compilation import choose_compilation
from trainer.config import Config
from trainer.exit_codes import EXIT_DONE, EXIT_RESTART
from trainer.guards.signals import StopSignals
from trainer.hooks.building import build_json_lines
from trainer.hooks.console import Console
from trainer.hooks.evaluate import Evaluate
from trainer.hooks.writers import TensorBoard
from trainer.inputs import data_errors_explained, open_inputs
from trainer.model_dir import check_model_dir, finished_result
from trainer.run_files import RunFiles, local_dir
from trainer.run_record.recorder import Recorder
from trainer.run_record.report_upload import uploading_reports
from trainer.session import build_session
from trainer.task_spec import TaskSpec

log = logging.getLogger(__name__)

_POLL_SECS = 1.0


def follow(spec: TaskSpec, cluster: Cluster, signals: StopSignals, recorder: Recorder) -> int:
    """Evaluates checkpoints until the last one of the run; returns the exit code.

    On the stopwatch of `recorder`, waiting for the next checkpoint is "input wait".
    """
    lines = "evaluator/metrics.jsonl"
    with (
        held(port_of(cluster.address)),  # So that a second evaluator is refused.
        uploading_reports(spec.model_dir, [lines, "tensorboard/eval"], resumes=lines),
    ):
        recorder.open()
        return _follow(spec, cluster, signals, recorder.stopwatch)


def _is_done(model_dir: str, config: Config) -> bool:
    """Returns True if the run is complete; False also if its storage does not say so now."""
    try:
        return finished_result(model_dir, config) is not None
    except STORAGE_ERRORS as error:
        log.warning("%s cannot be read: %s", model_dir, error)
        return False


def _follow(spec: TaskSpec, cluster: Cluster, signals: StopSignals, stopwatch: Stopwatch) -> int:
    config = spec.recipe.config
    opened = open_inputs(spec.recipe, spec.num_threads)
    run = RunFiles(spec.model_dir)
    files = RunFiles(run.evaluator)
    check_model_dir(run.evaluator)
    make_dirs(run.evaluator)
    stop = threading.Event()
    signals.on_stop(stop.set, spec.grace_secs)

    def end_unless_done(message: str) -> None:
        if not _is_done(spec.model_dir, config):
            log.error("%s: ending. Restart this task when training continues.", message)
            os._exit(EXIT_RESTART)

    if spec.chief_timeout_secs is not None:
        watch_chief(cluster, spec.chief_timeout_secs, end_unless_done)
    executor = MirroredExecutor.on(replica_devices(1, use_gpus(spec.num_gpus)))
    executor.stopwatch = stopwatch
    inputs, _, learner = build_session(spec.recipe, opened, executor.build)
    choose_compilation(learner, spec.recipe, inputs.train, is_cluster=False)
    check_batches(inputs, learner, spec.recipe, executor.strategy)
    executor.start_evaluation(learner, inputs.evaluation)
    checkpointer = build_checkpointer(
        spec.recipe, spec.model_dir, inputs, learner, is_evaluator=True
    )
    with contextlib.suppress(*STORAGE_ERRORS):
        remove_tree(checkpointer.staging)  # Of an evaluator that was killed.
    console = Console(config.train_steps, is_quiet=spec.is_quiet)
    appended = RunFiles(local_dir(spec.model_dir))
    json_lines = build_json_lines(RunFiles(appended.evaluator).metrics, inputs)
    tried, evaluated = Saved(-1, Position()), -1
    evaluate = Evaluate(
        executor,
        learner,
        [console, json_lines, TensorBoard(appended.tensorboard)],
        every_steps=0,
        last_step=config.train_steps,
        best_metric=config.best_metric,
        checkpointer=checkpointer,
        position=lambda: tried.position,
    )
    console.say(f"{cluster.task}: evaluates the checkpoints of {spec.model_dir}")
    stopwatch.begin(None, "input wait")
    while not stop.is_set():
        # Read before the checkpoints: a complete run saved its last checkpoint before its result.
        result = finished_result(spec.model_dir, config)
        newest = checkpointer.newest()
        if newest is not None and newest.step != tried.step:
            tried = newest
            # False if it is damaged, or if the chief removed it because there is a newer one.
            if checkpointer.restore_step(tried.step):
                # A repeated evaluation replaces the report of a former evaluator.
                json_lines.begin(tried.step - 1)
                with data_errors_explained(inputs):
                    evaluate.act(tried.step)
                evaluated = tried.step
        elif result is None:
            stop.wait(_POLL_SECS)
        elif result["step"] == evaluated:
            checkpointer.wait()
            document = {"step": evaluated, "eval": evaluate.latest}
            if failure := files.write_result({**document, "exit_code": EXIT_DONE, "why": "done"}):
                log.error("%s. Restart this task when the cause is removed.", failure)
                return EXIT_RESTART
            console.say(f"done: step {evaluated:,} was the last; {files.result}", important=True)
            return EXIT_DONE
        else:
            raise ModelDirError(
                f"The run in {spec.model_dir} is done with step {result['step']}, but the newest "
                f"checkpoint that could be read is of step {max(evaluated, 0)}. The evaluator must "
                "see the same directory as the chief, and its last checkpoint must be complete."
            )
    checkpointer.wait()
    return EXIT_RESTART
