"""The page of one run or several: what it shows, put into the template page.html.

    text = render([RunSeries("runs/a")], {"runs/a": classified("runs/a")})

The page is one file. It has no script and loads nothing.
"""

import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Any  # Any: JSON values.

import jinja2
from markupsafe import Markup

from data.system.stopwatch import CAUSES
from trainer.hooks.input_limit import limit_of
from trainer.report.drawing import Curve, Points, bars, cause_class, plot, strip
from trainer.report.examples import Classified
from trainer.report.series import RunSeries
from trainer.run_files import clock
from trainer.run_record.goodput import TaskTime
from trainer.run_record.summary import differences

# A line has one of 8 colours and one of 3 patterns, so equal curves on top of each other are seen.
_NUM_COLOURS, _NUM_LINES = 8, 24
_MOST_CLASSES = 20  # In a confusion matrix: the classes with the most mistakes.
_MOST_EVALUATIONS = 100  # More of them would hide the causes below their lines.
_MEANINGS = {
    "start": "before training",
    "graph": "tracing, compiling, first steps",
    "input wait": "waiting for data",
    "compute": "steps",
    "sum wait": "waiting for other workers",
    "evaluate": "evaluation",
    "checkpoint": "saving, export",
    "lost steps": "done again, or lost",
    "dead": "no process",
    "stalled": "no progress",
}


def render(runs: Sequence[RunSeries], classifiers: Mapping[str, Classified | str]) -> str:
    """Returns the page as HTML.

    `classifiers`: by directory, the results of each run's model, or why there are none.
    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = importlib.resources.files("trainer.report").joinpath("page.html").read_text()
    versions = [dict(run.config.get("versions") or {}) for run in runs]
    names = sorted({name for found in versions for name in found})
    return environment.from_string(source).render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=runs,
        plots=_plots(runs),
        pages=[_run_page(run, classifiers[run.model_dir]) for run in runs],
        most_evaluations=_MOST_EVALUATIONS,
        causes=[(cause, cause_class(cause), _MEANINGS[cause]) for cause in CAUSES],
        num_colours=_NUM_COLOURS,
        num_lines=_NUM_LINES,
        differences=differences([run.summary for run in runs]) if len(runs) > 1 else {},
        versions=[(name, [found.get(name, "-") for found in versions]) for name in names],
        safe=Markup,
    )


def _plots(runs: Sequence[RunSeries]) -> list[tuple[str, str]]:
    plots = []
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    for name in sorted(names, key=lambda name: name != "loss"):
        for is_time in (False, True):
            curves = [
                Curve(run.curve(split, name, over_time=is_time), f"s{i % _NUM_LINES} {split}")
                for i, run in enumerate(runs)
                for split in ("train", "eval")
            ]
            plots.append(_titled(name, curves, is_time=is_time))
    for name, title, is_time in (
        ("learning_rate", "learning rate", False),
        ("examples_per_sec", "examples/s (steps alone)", True),
    ):
        curves = _only([run.curve("train", name, over_time=is_time) for run in runs])
        plots.append(_titled(title, curves, is_time=is_time))
    return [(title, svg) for title, svg in plots if svg]


def _only(found: Sequence[Points]) -> list[Curve]:
    """Curves that differ in their colours and lines, not in the split."""
    return [Curve(points, f"s{i % _NUM_LINES} train only") for i, points in enumerate(found)]


def _titled(name: str, curves: Sequence[Curve], *, is_time: bool = False) -> tuple[str, str]:
    """The title of a plot and its SVG, which is empty if no curve has a point."""
    title = f"{name} over {'time' if is_time else 'steps'}"
    return title, plot(title, curves, is_time=is_time)


def _run_page(run: RunSeries, found: Classified | str) -> dict[str, Any]:
    """The sections of one run."""
    limit = limit_of(run.of("train"))
    curves = {"share of each worker": run.share_curve, "mean staleness": run.staleness_curve}
    return {
        "run": run,
        "input_limit": limit.text if limit else "",
        "rows": [_row(task, run) for task in run.tasks],
        "worker_plots": [
            _titled(title, _only(list(map(curve, run.workers)))) for title, curve in curves.items()
        ],
        "worker_rows": _worker_rows(run),
        "restarts": run.restarts(),
        "resizes": run.resizes(),
        "classifier": found,
        "confusion": None if isinstance(found, str) else _confusion(found),
    }


def _row(task: TaskTime, run: RunSeries) -> dict[str, object]:
    """A task in the tables of goodput; `cells` are the seconds and the share of each cause."""
    total = max(task.total_secs, 1e-9)
    shares = {cause: max(0.0, task.seconds[cause]) / total for cause in CAUSES}
    marks: list[tuple[str, float]] = []
    if run.chief is task and len(times := run.times("eval")) <= _MOST_EVALUATIONS:
        marks = [("mark-eval", run.began + time) for time in times]
    marks += [("mark-start", start) for start in task.starts[1:]]
    return {
        "name": task.name,
        "total": clock(total),
        "goodput": f"{task.goodput:.1%}",
        "cells": [
            (f"{task.seconds[cause]:,.1f}", f"{share:.1%}" if share >= 0.0005 else "-")
            for cause, share in shares.items()
        ],
        "bar": bars([(cause_class(cause), share) for cause, share in shares.items()]),
        "strip": strip(task.pieces, run.began, run.ended, marks),
    }


def _worker_rows(run: RunSeries) -> list[tuple[str, list[str]]]:
    last = run.of("train")[-1] if run.of("train") else {}
    counts = {**last, **run.result}
    found = []
    for worker in run.workers:
        cells = []
        for name in ("worker_steps", "worker_share", "worker_dropped", "worker_repeated"):
            value = counts.get(name, {}).get(worker)
            if value is None:
                cells.append("-")
            else:
                cells.append(f"{value:.1%}" if name == "worker_share" else f"{value:,}")
        ages = {int(age): n for age, n in counts.get("staleness", {}).get(worker, {}).items()}
        text = ", ".join(f"{age}: {number:,}" for age, number in sorted(ages.items())[:12])
        cells.append(text + (", ..." if len(ages) > 12 else "") or "-")
        found.append((worker, cells))
    return found


def _confusion(found: Classified) -> dict[str, object]:
    """The confusion matrix. Classes are shown by their names, or by their numbers."""
    counts = found.confusion
    sums = [sum(row) for row in counts]
    classes = list(range(len(counts)))
    names = found.class_names or [str(i) for i in classes]
    accuracies = [(names[i], sums[i], counts[i][i] / sums[i]) for i in classes if sums[i]]
    if is_cut := len(classes) > _MOST_CLASSES:
        worst = sorted(classes, key=lambda i: counts[i][i] - sums[i])[:_MOST_CLASSES]
        classes = sorted(worst)
    return {
        "names": names,
        "classes": [names[i] for i in classes],
        "rows": [
            (names[i], [(f"{counts[i][j]:,}", counts[i][j] / max(1, sums[i])) for j in classes])
            for i in classes
        ],
        "accuracies": accuracies,
        "is_cut": is_cut,
    }
