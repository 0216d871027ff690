"""The trackers of a run: those that its config names, and the writers of its config file.

writers = build_trackers(recipe, "runs/a", document, is_complete=lambda: True)
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer.config import Recipe
from trainer.config_file import errors_explained
from trainer.hooks.trackers.background import Background
from trainer.hooks.trackers.mlflow import MLflow
from trainer.hooks.trackers.names import names_of
from trainer.hooks.trackers.wandb import WandB
from trainer.hooks.writers import Writer
from trainer.step.options import ConfigError


def build_trackers(
    recipe: Recipe,
    model_dir: str,
    document: Mapping[str, Any],  # config.json: JSON values.
    *,
    is_complete: Callable[[], bool],
) -> list[Writer]:
    """The trackers of the config, and the writers of `build_writers`, each in the background.

    `is_complete` is asked at the end: True if training is complete.

    Raises ConfigError if build_writers fails, or does not return writers.
    """
    kinds = {"mlflow": MLflow, "wandb": WandB}
    writers: list[Writer] = [
        Background(kinds[name](model_dir, document, is_complete), name)
        for name in names_of(recipe.config.trackers)
    ]
    return writers + [Background(w, type(w).__name__) for w in _writers_of_user(recipe, model_dir)]


def _writers_of_user(recipe: Recipe, model_dir: str) -> list[Writer]:
    if recipe.build_writers is None:
        return []
    what = f"build_writers(config, model_dir) of {recipe.path}"
    with errors_explained(what):
        returned = recipe.build_writers(recipe.config, model_dir)
        writers = list(returned) if isinstance(returned, Iterable) else [returned]
    for writer in writers:
        if not isinstance(writer, Writer):
            raise ConfigError(
                f"{what} must return a list of trainer.Writer, but one is {writer!r}. Derive its "
                "class from trainer.Writer, and define write(self, step, split, values)."
            )
    return writers
