"""`--model_dir=RUN` alone continues RUN: its config file, config and flags come from config.json.

    settings = settings_of_run(argv)            # before the flags are parsed
    print_next(exit_code, "runs/a")             # after a run: what to type

Flags on the command line take precedence. With --config nothing is taken from config.json.
"""

import contextlib
import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from data.system.files import exists, is_url, shown
from trainer.config import PYTHON_CONFIG, ConfigError, flatten_as, load_recipe
from trainer.config_file import split_target
from trainer.exit_codes import EXIT_DONE, EXIT_RESTART
from trainer.flags import HOSTS, LOCAL, LOCAL_OR_HOSTS, SCOPES
from trainer.run_files import Document, RunFiles

if TYPE_CHECKING:
    from strategies.cluster.tf_config import Cluster


class Settings(NamedTuple):
    """What a run was started with: its config file, the fields of its config, and its flags."""

    config: str
    fields: dict[str, object]
    flags: list[str]


def _values_in(argv: Sequence[str]) -> dict[str, str]:
    """Returns the flags of a command line that is not parsed yet: name -> value, or ""."""
    values = {}
    for argument, following in itertools.zip_longest(argv[1:], argv[2:], fillvalue=""):
        if argument.startswith("-"):
            name, equals, value = argument.lstrip("-").partition("=")
            values[name] = value if equals else following
    return values


def settings_of_run(argv: Sequence[str]) -> Settings | None:
    """Returns the settings of the run in --model_dir, if it exists and `argv` has no --config.

    Flags that `argv` has are left out. Raises ConfigError if the config file is gone.
    """
    given = _values_in(argv)
    model_dir = given.get("model_dir", "")
    if "config" in given or not model_dir or is_url(model_dir):
        return None
    files = RunFiles(model_dir)
    if not exists(files.config):
        return None
    document = files.read_config()
    words: list[str] = []
    if given.get("strategy", document["strategy"]) == document["strategy"]:
        of_strategy = document.get("flags", [f"--strategy={document['strategy']}"])
        if document["strategy"] != "mirrored":
            ignored = _ignored(given)
            of_strategy = [word for word in of_strategy if _name_of(word) not in ignored]
        words = [word for word in of_strategy if _name_of(word) not in given]
    return Settings(document["recipe"], _fields(document, model_dir), words)


def _name_of(word: str) -> str:
    return word.lstrip("-").partition("=")[0].removeprefix("no")


def _ignored(given: Mapping[str, str]) -> set[str]:
    """Returns the local flags that a described cluster, or that of a scheduler, would ignore."""
    # Not above: a run of one process does without it.
    from strategies.cluster.sources.finding import found_by_auto, is_described, size_flags

    descriptions = {"hosts", *(flag.name for flag in HOSTS.values())}
    has_cluster = is_described(os.environ) or not descriptions.isdisjoint(given)
    source = "hosts" if "hosts" in given else None
    if not has_cluster and given.get("cluster") != "local":
        source = found_by_auto(os.environ)
    if not (has_cluster or source):
        return set()
    local = {name for name, scope in SCOPES.items() if scope.where in (LOCAL, LOCAL_OR_HOSTS)}
    return local.difference(size_flags(source) if source else ())


def _fields(document: Document, model_dir: str) -> dict[str, object]:
    path = document["recipe"]
    if path == PYTHON_CONFIG:
        raise ConfigError(
            f"The run in {model_dir} was started from Python, with a Config object. Continue it "
            f"there: trainer.train(config, build_model=build_model, model_dir={model_dir!r})."
        )
    if not os.path.isfile(split_target(path)[0]):
        raise ConfigError(
            f"The run in {model_dir} was started with the config file {path}, which does not exist "
            "any more. Put it back, or name its new place with --config=FILE."
        )
    fields = flatten_as(load_recipe(path).config, document["config"])
    # Absolute: the run may have begun in another directory.
    return {**fields, "data_dir": document["data_dir"]}


def print_next(exit_code: int, model_dir: str, cluster: "Cluster | None" = None) -> None:
    """Prints what to type after a run, as its last line. `cluster` is one of several hosts."""
    if not is_url(model_dir) and not exists(RunFiles(model_dir).config):
        return  # Nothing was trained.
    run = shlex.quote(shown(model_dir))
    if exit_code == EXIT_DONE:
        tools = ("python -m trainer.evaluate ", "python -m trainer.report ")
        commands = (*tools, "tensorboard --logdir=")
        line = "next: " + "   or: ".join(command + run for command in commands)
    elif exit_code != EXIT_RESTART:
        return
    elif cluster is not None:
        line = "continue: start the same command again, in every task that has ended"
    elif is_url(model_dir):
        line = f"continue: start the same command again, with --model_dir={run}"
    else:
        line = f"continue: python -m trainer --model_dir={run}"
    with contextlib.suppress(OSError):  # A full disk, or nobody reads any more.
        print(line, flush=True)
