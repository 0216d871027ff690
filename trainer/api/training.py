"""`trainer.train`: the command `python -m trainer` as a function.

    result = train("configs/digits.py", strategy="mirrored", train_steps=200)
    result = train("configs/digits.py", strategy="ps", workers=3)
    result = train(Config(dataset="digits"), build_model=build_model)
    result = train(model_dir="runs/latest", train_steps=400)        # continues a run

`mirrored` trains in this process; multiworker and ps start a cluster on this machine.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from data.system.errors import UsageError
from data.system.files import exists, expanded, is_url
from trainer import flags
from trainer.api.arguments import parsed, recipe_named, split_arguments, words_and_values
from trainer.api.command import run_command
from trainer.api.result import Result
from trainer.config import Config, flatten, load_recipe
from trainer.config_checks import check
from trainer.config_file import forget_modules
from trainer.run_files import RunFiles


def train(config: str | Path | Config | None = None, **arguments: object) -> Result:
    """Trains, and returns what the run has left behind.

    `config` is a config file or module, as for --config, or a Config object. With `model_dir`
    alone, the run in it is continued with its own config, strategy and flags.

    `arguments` are flags of `python -m trainer`, and fields of the config: train_steps=200,
    export=False, data={"lanes": 8}. They are checked as on the command line. With a Config object,
    the functions that a config file may define are arguments too: build_model, parse, loss, ...
    (trainer/config.py). A Config object is for `mirrored`: other processes could not import it.

    A run in this process stops at a step when it is interrupted (Ctrl-C, or the stop button of a
    notebook), saves its state, and raises RunFailed with exit_code 75.

    Raises:
        UsageError: a mistake in the arguments, the config, the data or the model.
        RunFailed: training diverged (exit_code 1), or stopped and can be continued (75).
    """
    forget_modules()
    functions, others = split_arguments(arguments)
    with contextlib.ExitStack() as stack:
        if isinstance(config, Config):
            check(config)
            base = config
            target: str | None = stack.enter_context(recipe_named(config, functions))
        elif functions:
            raise UsageError(
                f"train() got the function(s) {', '.join(functions)}, which belong to a Config "
                f"object, but config is {config!r}. Define them in the config file, or give a "
                "Config object: trainer.train(trainer.Config(...), build_model=build_model)."
            )
        else:
            target = None if config is None else os.fspath(config)
            base = _config_of(target, others)
        words, values = words_and_values(others, base)
        if target is not None:
            words.insert(0, f"--config={target}")
        stack.enter_context(parsed(words, values))
        # With --max_restarts a launcher supervises the process.
        if flags.STRATEGY.value == "mirrored" and not flags.MAX_RESTARTS.present:
            from trainer.api.here import run_here

            return run_here(functions, config if isinstance(config, Config) else None)
        if isinstance(config, Config):
            raise UsageError(
                f"config is a {type(config).__name__} object, but strategy="
                f"{flags.STRATEGY.value!r} needs a config file: each process of the cluster "
                "imports it. Write get_config() and the functions to a file, and type, for "
                f"example: trainer.train('my_model.py', strategy={flags.STRATEGY.value!r})."
            )
        # A continued run may have other values than the config file.
        fields = flatten(base)
        changed = {n: v for n, v in values.items() if target is None or v != fields[n]}
        if changed:
            name, value = next(iter(changed.items()))
            raise UsageError(
                f"{name}={value!r} cannot be given to the processes of a cluster, which get text. "
                f"Set it in the config file: config.{name} = {value!r}, in get_config()."
            )
        return run_command(words)


def _config_of(target: str | None, arguments: Mapping[str, object]) -> Config:
    """The config with the fields that arguments may name."""
    model_dir = expanded(str(arguments.get("model_dir") or ""))
    if target is None and model_dir and not is_url(model_dir):
        files = RunFiles(model_dir)
        if exists(files.config):
            document = files.read_config()
            known = Path(document["recipe"]).is_file()
            return load_recipe(document["recipe"]).config if known else Config()
    return Config() if target is None else load_recipe(target).config
