"""What is checked before a task trains, with TensorFlow, as the flags say.

    exit_code = check_before_launch(recipe, cluster)        # READY: the tasks can be started

TensorFlow, and what imports it, is imported in the functions: a launcher calls them in a fork, and
its own process stays without TensorFlow.
"""

from typing import TYPE_CHECKING

from strategies.cluster.tf_config import Cluster
from trainer import flags, tf_setup
from trainer.config import Recipe, to_json
from trainer.config_checks import check_replicas
from trainer.exit_codes import EXIT_DONE
from trainer.flags.model_dir import model_dir_of
from trainer.flags.spec import num_workers

if TYPE_CHECKING:
    from trainer.preflight import Findings

# Exit code of `check_before_launch` if the cluster must be launched: unlikely from a user's code.
READY = 113


def check_before_launch(recipe: Recipe, cluster: Cluster) -> int:
    """Finds all mistakes that can be found before tasks are started; returns READY, or the end."""
    model_dir = model_dir_of(recipe)
    set_train_steps(recipe)
    if says_finished(recipe, model_dir):
        return EXIT_DONE
    if flags.CHECK.value:
        return check(recipe, model_dir, cluster)
    from trainer import preflight

    if flags.MIN_WORKERS.present:  # Otherwise the task finds it, before it trains.
        num_replicas = preflight.num_replicas_here(flags.NUM_GPUS.value)
        check_replicas(recipe.config, num_workers(cluster) * num_replicas)
    _preflight(recipe, model_dir, cluster)
    preflight.check_model_dir(model_dir)
    return READY


def set_train_steps(recipe: Recipe) -> None:
    """Sets train_steps to that of --epochs, if it is given: this needs the data."""
    if flags.EPOCHS.value is not None:
        tf_setup.import_tensorflow()
        from trainer.inputs import num_steps_of

        recipe.config.train_steps = num_steps_of(recipe, flags.EPOCHS.value)


def says_finished(recipe: Recipe, model_dir: str) -> bool:
    """Returns True, and prints the result, if the run in `model_dir` is finished."""
    tf_setup.import_tensorflow()
    from trainer import preflight

    result = preflight.finished_result(model_dir, recipe.config)
    if result is None:
        return False
    preflight.preflight(recipe, model_dir)  # The finished run may be of another config.
    values = {name: value for name, value in result["eval"].items() if isinstance(value, float)}
    measured = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
    print(
        f"{model_dir} is finished: step {result['step']:,}  {measured}. To train further, raise "
        "--train_steps; to train anew, give another --model_dir."
    )
    return True


def check(recipe: Recipe, model_dir: str, cluster: Cluster | None) -> int:
    """Prints what would be trained, for --check; returns the exit code."""
    workers, num_ps = num_workers(cluster), cluster.num("ps") if cluster else 0
    if not num_ps:
        check_replicas(recipe.config, flags.REPLICAS.value or workers)
    found = _preflight(recipe, model_dir, cluster)
    if flags.VERBOSE.value:
        print(f"config {recipe.path}: {to_json(recipe.config)}")
    print(found.describe(num_ps, workers if flags.SYNC_REPLICAS.value else 0))
    return EXIT_DONE


def _preflight(recipe: Recipe, model_dir: str, cluster: Cluster | None) -> "Findings":
    from trainer.build import check_for_strategy, check_standby
    from trainer.preflight import preflight

    found = preflight(recipe, model_dir)
    check_for_strategy(
        found.learner,
        recipe,
        strategy=flags.STRATEGY.value,
        num_workers=num_workers(cluster),
        read_dtype=flags.READ_DTYPE.value,
    )
    check_standby(found.checkpointer, recipe.path, flags.PS_STANDBY.value)
    return found
