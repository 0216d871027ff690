"""`python -m trainer.runs [DIR]`: lists the runs under a directory, by default under runs/.

    python -m trainer.runs runs --sort=accuracy --reverse
    python -m trainer.runs runs --fields=loss,learning_rate
    python -m trainer.runs runs --json

One line for each run: the best value of its `best_metric`, or the value that the list is sorted by,
its last step, its training time, how it ended, and the fields that differ from its config file.
The exit code is that of the run's last process; "-" if it has not ended by itself.
"""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any  # JSON values.

from absl import flags

from trainer.config import ConfigError
from trainer.exit_codes import EXIT_DONE
from trainer.run_files import Document, RunFileError, clock, four_digits, json_text
from trainer.run_record.summary import differences, summary
from trainer.run_record.tools import run_tool

_TITLES = {"seconds": "time", "exit_code": "exit", "differs": "changed"}
_LEAST_DIFFERS = 12  # Characters of the last column.


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


def value_of(run: Document, name: str) -> Any:
    """Returns a key of the summary, a metric or a field of the config; None if it is missing."""
    if name == run["best_metric"]:
        return run["best"]
    name = "run" if name == "name" else name
    return next((at[name] for at in (run, run["eval"], run["config"]) if name in at), None)


def ordered(runs: Sequence[Document], key: str, *, reverse: bool) -> list[Document]:
    """`runs` sorted by `key`; a run that lacks the value, a number or text, comes last.

    Raises ConfigError if no run has it.
    """
    values = [(value_of(run, key), run) for run in runs]
    found = [(value, run) for value, run in values if isinstance(value, (int, float, str))]
    if not found:
        raise ConfigError(
            f"--sort={key}: no run has such a number or text. Type --sort=loss, for example."
        )
    others = [run for value, run in values if not isinstance(value, (int, float, str))]
    # Fields of one name may have several types.
    found.sort(key=lambda pair: (isinstance(pair[0], str), pair[0]), reverse=reverse)
    return [run for _, run in found] + others


def default_fields(runs: Sequence[Document], key: str) -> list[str]:
    """The columns of a list that is sorted by `key`."""
    is_metric = any(key == run["best_metric"] or key in run["eval"] for run in runs)
    fields = ["run", key if is_metric else "best", "step", "seconds", "exit_code"]
    if key not in ("name", "started", *fields):
        fields.insert(1, key)
    if len({run["strategy"] for run in runs}) > 1 and "strategy" not in fields:
        fields.append("strategy")
    return [*fields, "differs"]


def table(runs: Sequence[Document], fields: Sequence[str], width: int | None) -> list[str]:
    """Returns a title, a rule, and a line for each run; all at most `width` long, if it is given.

    Columns for which there is no room are left out, the last ones first; a last line names them.
    """
    columns = [_column(runs, name, fields) for name in fields]
    sizes = [max(map(len, column)) for column in columns]
    # The width up to the end of each column. The last one may be cut if it has the changes.
    least = [
        min(size, _LEAST_DIFFERS) if name == "differs" else size
        for name, size in zip(fields, sizes, strict=True)
    ]
    ends = [sum(sizes[:place]) + 2 * place + size for place, size in enumerate(least)]
    num_shown = max(1, sum(width is None or end <= width for end in ends))
    for place, size in enumerate(sizes):
        pad = str.ljust if fields[place] in ("run", "strategy", "differs") else str.rjust
        columns[place] = [pad(cell, size) for cell in columns[place]]
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns[:num_shown], strict=True)]
    if width is not None and fields[num_shown - 1] == "differs":
        lines = [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]
    lines.insert(1, "─" * max(map(len, lines)))
    if left_out := fields[num_shown:]:
        lines.append(f"Left out for the width: {','.join(left_out)}. --fields chooses columns.")
    return lines


def _column(runs: Sequence[Document], name: str, fields: Sequence[str]) -> list[str]:
    if name == "differs":
        of_recipe = {
            recipe: list(differences([run for run in runs if run["recipe"] == recipe]))
            for recipe in {run["recipe"] for run in runs if run["changed"] is None}
        }
        cells = [_differs(run, of_recipe.get(run["recipe"], ()), fields) for run in runs]
    else:
        cells = [_cell(run, name) for run in runs]
    title = _TITLES.get(name, name)
    metrics = {run["best_metric"] for run in runs}
    if name == "best" and len(metrics) == 1:
        title = f"best {metrics.pop()}"
    elif name == "best":
        pairs = zip(runs, cells, strict=True)
        cells = [cell if cell == "-" else f"{run['best_metric']} {cell}" for run, cell in pairs]
    return [title, *cells]


def _cell(run: Document, name: str) -> str:
    value = value_of(run, name)
    if value is None:
        return "-"
    if name == "step":
        return f"{value:,}/{run['train_steps']:,}"
    if name == "seconds":
        return clock(value)
    if name == "started":
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
    is_metric = isinstance(value, float) and name not in run["config"]
    return four_digits(value) if is_metric else str(value)


def _differs(run: Document, of_recipe: Sequence[str], fields: Sequence[str]) -> str:
    """The fields of `run` that the command line has changed, and their values.

    If the run has no record of them: `of_recipe`, in which the runs of its config file differ.
    Fields that are in other columns (`fields`), or in the run's name, are left out.
    """
    names = of_recipe if run["changed"] is None else run["changed"]
    shown = {*fields, "data_dir", *(["train_steps"] if "step" in fields else [])}
    words = [f"{name}={run['config'].get(name)}" for name in names if name not in shown]
    return " ".join(word for word in words if f"-{word}-" not in run["run"])


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
    flags.DEFINE_list(
        "fields",
        None,
        "The columns after the name of the run: best, differs, or what --sort takes. By default "
        "what fits the width of the terminal.",
    )


def main(argv: Sequence[str]) -> int:
    """Prints the list; returns the exit code."""
    if len(argv) > 2:
        raise ConfigError(f"trainer.runs lists one directory. Received: {' '.join(argv[1:])}.")
    directory = argv[1] if len(argv) == 2 else "runs"
    if not os.path.isdir(directory):
        raise ConfigError(f"There is no directory {directory}. Give the directory of your runs.")
    if flags.FLAGS.json and flags.FLAGS.fields:
        raise ConfigError("--json prints all fields. Leave --fields out.")
    runs = runs_under(directory)
    if runs:
        runs = ordered(runs, flags.FLAGS.sort, reverse=flags.FLAGS.reverse)
    if flags.FLAGS.json:
        print(json_text(runs, indent=2))
    elif not runs:
        print(f"There is no run under {directory}.", file=sys.stderr)
    else:
        _print_table(runs, directory)
    return EXIT_DONE


def _print_table(runs: Sequence[Document], directory: str) -> None:
    given = flags.FLAGS.fields
    for name in given or ():
        if name not in ("best", "differs") and all(value_of(run, name) is None for run in runs):
            raise ConfigError(f"--fields={name}: no run has it. Type --fields=loss, for example.")
    fields = ["run", *given] if given else default_fields(runs, flags.FLAGS.sort)
    # In a pipe lines are not cut: the program that reads them has no width.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    named = [{**run, "run": os.path.relpath(run["run"], directory)} for run in runs]
    print("\n".join(table(named, fields, width)))


if __name__ == "__main__":
    run_tool(main, define_flags)
