"""The directory of a run: that of --model_dir, or a new one under runs/.

    model_dir_of(recipe)    # "runs/digits-ps-batch_size=128-20261126-204142"

The name of a new directory says what was changed on the command line. Fields that say where things
are, and how often they are written, are left out: they do not change what is learnt.
"""

import os
import re
import time
from pathlib import Path

from trainer import flags
from trainer.config import Recipe, flatten, overridden_fields

# The variable with the default --model_dir that `trainer.train` chose for a cluster.
DEFAULT_DIR = "TRAINER_DEFAULT_DIR"
_MAX_WORDS, _MAX_BYTES = 3, 40
_OMITTED = re.compile(
    r"dataset|data_.*|data\..*_split|data\.(cache|prefetch).*|.*_every_steps|keep_checkpoints|"
    r"complete_checkpoint_every|steps_per_call|eval_batch_size|export|profile_.*|train_steps"
)
_UNSAFE = re.compile(r"[^\w.+=-]+")  # In a path, or in a shell.


def is_default_dir() -> bool:
    """Returns True if the user gave no --model_dir; a default of `trainer.train` does not count."""
    return flags.MODEL_DIR.value in (None, os.environ.get(DEFAULT_DIR))


def model_dir_of(recipe: Recipe) -> str:
    """The directory of --model_dir, or a new one under runs/."""
    if flags.MODEL_DIR.value is not None:
        given = str(flags.MODEL_DIR.value)
        # Not the link, which will point to another run while this one goes on.
        return os.path.realpath(given) if os.path.islink(given.rstrip("/")) else given
    name = Path(recipe.files[0]).stem if recipe.files else "python"
    words = [name, flags.STRATEGY.value, *changes(recipe)]
    return str(Path("runs") / "-".join([*words, time.strftime("%Y%m%d-%H%M%S")]))


def changes(recipe: Recipe) -> list[str]:
    """Returns the fields that differ from the config file, as `field=value`; at most three.

    A value that is too long is left out: a part of it would be another value.
    """
    words, values = [], flatten(recipe.config)
    for field in overridden_fields(recipe):
        if _OMITTED.fullmatch(field):
            continue
        value = values[field]
        text = f"{value:.12g}" if isinstance(value, float) else str(value)
        word = f"{field}={_UNSAFE.sub('_', text).strip('_')}"
        words.append(word if len(os.fsencode(word)) <= _MAX_BYTES else field)
    return words[:_MAX_WORDS]
