"""`python -m trainer.runs [DIR]`: lists the runs under a directory, by default under runs/.

    python -m trainer.runs runs --sort=accuracy --reverse
    python -m trainer.runs runs --json

For each run: its last step, the best value of its `best_metric`, its training time, how it ended,
and the fields of the config in which the listed runs differ. The exit code is that of the run's
last process; "-" if it has not ended by itself.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
from absl import flags

from trainer.config import ConfigError
from trainer.exit_codes import EXIT_DONE
from trainer.run_files import Document, RunFileError, clock
from trainer.run_record.summary import differences, summary
from trainer.run_record.tools import run_tool


def runs_under(directory: str) -> list[Document]:
    """A summary of each run under `directory`, in the order of their names.

    A run whose config.json is damaged is named on standard error, and left out.
    """
    found = []
    for parent, children, names in os.walk(directory):
        if "config.json" in names:
            children.clear()  # A run has no runs inside.
            try:
                found.append(summary(parent))
            except RunFileError as error:
                print(f"left out: {error}", file=sys.stderr)
        children.sort()
    return found


def ordered(runs: Sequence[Document], key: str, *, reverse: bool) -> list[Document]:
    """`runs` sorted by `key`; a run that lacks the value comes last.

    Raises ConfigError if no run has it.
    """
    name = "run" if key == "name" else key

    def value_of(run: Document) -> Any:  # Any: a JSON value.
        if name == run["best_metric"]:
            return run["best"]
        return next((at[name] for at in (run, run["eval"], run["config"]) if name in at), None)

    values = [value_of(run) for run in runs]
    if all(value is None for value in values):
        raise ConfigError(f"--sort={key}: no run has it. Type --sort=loss, for example.")
    with_value = [i for i, value in enumerate(values) if value is not None]
    # Fields of one name may have several types.
    with_value.sort(key=lambda i: (isinstance(values[i], str), values[i]), reverse=reverse)
    without = [i for i, value in enumerate(values) if value is None]
    return [runs[i] for i in [*with_value, *without]]


def define_flags() -> None:
    """Declares the flags of the command."""
    flags.DEFINE_boolean("json", False, "Print JSON.")
    flags.DEFINE_string(
        "sort",
        "started",
        "What to sort by: name, started (the last start), step, seconds, exit_code, strategy, a "
        "metric such as loss, or a field of the config such as learning_rate.",
    )
    flags.DEFINE_boolean("reverse", False, "Sort from the largest to the smallest.")


def main(argv: Sequence[str]) -> int:
    """Prints the list; returns the exit code."""
    if len(argv) > 2:
        raise ConfigError(f"trainer.runs lists one directory. Received: {' '.join(argv[1:])}.")
    directory = argv[1] if len(argv) == 2 else "runs"
    if not os.path.isdir(directory):
        raise ConfigError(f"There is no directory {directory}. Give the directory of your runs.")
    runs = runs_under(directory)
    if runs:
        runs = ordered(runs, flags.FLAGS.sort, reverse=flags.FLAGS.reverse)
    if flags.FLAGS.json:
        print(json.dumps(runs, indent=2))
    elif not runs:
        print(f"There is no run under {directory}.", file=sys.stderr)
    else:
        _print_table(runs, directory)
    return EXIT_DONE


def _print_table(runs: Sequence[Document], directory: str) -> None:
    different = differences(runs)
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("strategy")
    for title in ("step", "best", "time", "exit"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("differs in", overflow="fold")
    for index, run in enumerate(runs):
        best = "-" if run["best"] is None else f"{run['best_metric']} {run['best']:.4f}"
        table.add_row(
            os.path.relpath(run["run"], directory),
            run["strategy"],
            f"{run['step']:,}/{run['train_steps']:,}",
            best,
            clock(run["seconds"]),
            "-" if run["exit_code"] is None else str(run["exit_code"]),
            " ".join(f"{name}={values[index]}" for name, values in different.items()),
        )
    # In a pipe lines are not cut: the program that reads them has no width.
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(table)


if __name__ == "__main__":
    run_tool(main, define_flags)
