"""What was changed on the command line, as words of the name of a new directory under runs/.

    changes(recipe)         # ["batch_size=128", "momentum=0.9"]

Fields that say where things are, and how often they are written, are left out: they do not change
what is learnt.
"""

import os
import re

from trainer.config import Recipe, flatten, load_recipe

_MAX_WORDS, _MAX_BYTES = 3, 40
_OMITTED = re.compile(
    r"dataset|data_.*|data\..*_split|data\.(cache|prefetch).*|.*_every_steps|keep_checkpoints|"
    r"complete_checkpoint_every|steps_per_call|eval_batch_size|export|profile_.*|train_steps"
)
_UNSAFE = re.compile(r"[^\w.+=-]+")  # In a path, or in a shell.


def changes(recipe: Recipe) -> list[str]:
    """The fields that differ from those of the config file, as `field=value`; at most three.

    A value that is too long is left out: a part of it would be another value.
    """
    defaults = flatten(load_recipe(recipe.path).config)
    words = []
    for field, value in flatten(recipe.config).items():
        if value == defaults.get(field) or _OMITTED.fullmatch(field):
            continue
        text = f"{value:.12g}" if isinstance(value, float) else str(value)
        word = f"{field}={_UNSAFE.sub('_', text).strip('_')}"
        words.append(word if len(os.fsencode(word)) <= _MAX_BYTES else field)
    return words[:_MAX_WORDS]
