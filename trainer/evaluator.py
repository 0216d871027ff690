"""The `evaluator` task: it follows the checkpoints of a run, from outside the training cluster.

    exit_code = follow(plan, signals)

Where `TF_CONFIG` names an evaluator the tasks that train do not evaluate. This one takes the newest
checkpoint whenever there is a new one, evaluates it on its own devices, and keeps the best. It ends
when it has evaluated the last checkpoint of a run that is done.

    MODEL_DIR/evaluator/metrics.jsonl   the "eval" reports; TensorBoard has them where it always has
    MODEL_DIR/evaluator/result.json     written last
    MODEL_DIR/checkpoints/best-*
"""

import logging
import os
import threading
from collections.abc import Mapping

from strategies.base import Position
from strategies.mirrored import MirroredExecutor, replica_devices, use_gpus
from strategies.peers import watch_chief
from trainer.build import build_checkpointer, build_json_lines, build_learner
from trainer.checkpoint import ModelDirError, Saved
from trainer.config import Config
from trainer.exits import EXIT_DONE, EXIT_RESTART, first_line
from trainer.hooks import Evaluate
from trainer.inputs import check_batches, open_inputs
from trainer.plan import Plan
from trainer.preflight import check_model_dir, finished_result
from trainer.signals import StopSignals
from trainer.storage import STORAGE_ERRORS
from trainer.writers import Console, Lossy, TensorBoard, write_json

log = logging.getLogger(__name__)

_POLL_SECS = 1.0


def follow(plan: Plan, signals: StopSignals) -> int:
    """Evaluates checkpoints until the last one of the run; returns the exit code.

    Raises:
        ConfigError, DataError, ModelDirError: a user's mistake.
    """
    config = plan.recipe.config
    inputs = open_inputs(plan.recipe, plan.num_threads)
    directory = f"{plan.model_dir}/evaluator"
    check_model_dir(directory)
    stop = threading.Event()
    signals.on_stop(stop.set, plan.grace_secs)
    assert plan.cluster is not None, "an evaluator is a task of a cluster"
    if plan.chief_timeout_secs is not None:
        watch_chief(
            plan.cluster,
            plan.chief_timeout_secs,
            lambda message: _end_unless_done(message, plan.model_dir, config),
        )
    executor = MirroredExecutor.on(replica_devices(1, use_gpus(plan.num_gpus)))
    learner = executor.build(lambda: build_learner(plan.recipe))
    check_batches(inputs, learner, plan.recipe)
    executor.start_evaluation(learner, inputs.evaluation)
    checkpointer = build_checkpointer(plan.recipe, plan.model_dir, inputs, learner)
    console = Console(config.train_steps)
    path = f"{directory}/metrics.jsonl"
    json_lines = Lossy(build_json_lines(path, plan.recipe, inputs), path)
    tensorboard = f"{plan.model_dir}/tensorboard"
    tried, evaluated = Saved(-1, Position()), -1
    evaluate = Evaluate(
        executor,
        learner,
        [console, json_lines, Lossy(TensorBoard(tensorboard), tensorboard)],
        every_steps=0,
        last_step=config.train_steps,
        best_metric=config.best_metric,
        checkpointer=checkpointer,
        position=lambda: tried.position,
    )
    console.say(f"{plan.cluster.task}: evaluates the checkpoints of {plan.model_dir}")
    while not stop.is_set():
        # Before the look at the checkpoints: a run that is done has saved its last one before.
        result = finished_result(plan.model_dir, config)
        newest = checkpointer.newest()
        if newest is not None and newest.step != tried.step:
            tried = newest
            # Else it is broken; or the chief has removed it, and there is a newer one.
            if checkpointer.restore_step(tried.step):
                # What is evaluated again replaces what a former evaluator said of it.
                json_lines.begin(tried.step - 1)
                evaluate.act(tried.step)
                evaluated = tried.step
        elif result is None:
            stop.wait(_POLL_SECS)
        elif result["step"] == evaluated:
            checkpointer.wait()
            try:
                _write_result(directory, evaluated, evaluate.latest)
            except STORAGE_ERRORS as error:
                log.error(
                    "%s/result.json could not be written: %s. Start me again when the disk has "
                    "room.",
                    directory,
                    first_line(error),
                )
                return EXIT_RESTART
            console.say(f"done: step {evaluated:,} was the last; {directory}/result.json")
            return EXIT_DONE
        else:
            raise ModelDirError(
                f"The run in {plan.model_dir} is done with step {result['step']}, but the newest "
                f"checkpoint that could be read is of step {max(evaluated, 0)}. The evaluator must "
                "see the same directory as the chief, and its last checkpoint must be whole."
            )
    checkpointer.wait()
    return EXIT_RESTART


def _end_unless_done(message: str, model_dir: str, config: Config) -> None:
    if finished_result(model_dir, config) is None:
        log.error("%s: ending. Start me again when training goes on.", message)
        os._exit(EXIT_RESTART)


def _write_result(directory: str, step: int, latest: Mapping[str, float]) -> None:
    document = {"step": step, "eval": latest, "exit_code": EXIT_DONE, "why": "done"}
    write_json(f"{directory}/result.json", document)
