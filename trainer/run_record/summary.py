"""Sums up a run from its files: its settings, its progress, its best metric.

summary("runs/a")["best"]
differences([summary("runs/a"), summary("runs/b")])     # {"learning_rate": [0.1, 0.2]}
"""

import bisect
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import flatten_json
from trainer.run_files import NO_METRICS, Document, RunFiles
from trainer.run_record.goodput import first_steps


def summary(model_dir: str, reports: Sequence[Document] | None = None) -> Document:
    """Returns a summary of the run in `model_dir`. Values that are not known are None.

    `reports` are all reports of the run, if the caller has read them.
    """
    files = RunFiles(model_dir)
    document = files.read_config()
    config = flatten_json(document["config"])
    if reports is None:
        reports = files.read_reports()
    result: Mapping[str, Any] = files.read_result() or {}
    name = config.get("best_metric", "loss")  # Runs of early versions lack it.
    values = [r[name] for r in reports if r["split"] == "eval" and r.get(name) is not None]
    is_lowest = document.get("best_is_lowest", name == "loss")
    best = (min if is_lowest else max)(values, default=result.get("eval", {}).get(name))
    step = result.get("step")
    if step is None:
        step = max((report["step"] for report in reports), default=0)
    return {
        "run": model_dir,
        "recipe": document["recipe"],
        "strategy": document["strategy"],
        "step": step,
        "train_steps": config["train_steps"],
        "best_metric": name,
        "best": best,
        "eval": result.get("eval") or latest_evaluation(reports),
        "seconds": round(_seconds(reports, first_steps(model_dir)), 1),
        "exit_code": result.get("exit_code"),
        "why": result.get("why"),
        "started": os.path.getmtime(files.config) if os.path.exists(files.config) else None,
        "config": config,
        "changed": document.get("changed"),  # Runs of early versions lack it.
    }


def latest_evaluation(reports: Sequence[Document]) -> Document:
    """The metrics of the last evaluation in `reports`; empty if there is none."""
    evaluations = [report for report in reports if report["split"] == "eval"]
    latest = max(evaluations, key=lambda report: int(report["step"]), default={})
    return {name: value for name, value in latest.items() if name not in NO_METRICS}


def _seconds(reports: Sequence[Document], first_steps: Sequence[int]) -> float:
    """The training time in all processes of a run: each counts its seconds from 0.

    They began at `first_steps`. Where that was not recorded, a process begins where seconds fall.
    """
    begins: list[int] = []  # Of the processes that have reports: others are removed.
    for step in first_steps:
        begins = [*begins[: bisect.bisect_left(begins, step)], step]
    trained = [report for report in reports if report["split"] == "train"]
    total = 0.0
    for _, group in itertools.groupby(trained, lambda r: bisect.bisect_left(begins, r["step"])):
        seconds: list[float] = [report["seconds"] for report in group]
        ends = [this for this, following in itertools.pairwise(seconds) if following < this]
        total += sum(ends) + seconds[-1]
    return total


def differences(runs: Sequence[Document]) -> dict[str, list[Any]]:  # Any: JSON values.
    """Returns the config fields that differ between `runs`, except data_dir, with all values."""
    names = dict.fromkeys(name for run in runs for name in run["config"])
    values = {name: [run["config"].get(name) for run in runs] for name in names}
    return {
        name: found
        for name, found in values.items()
        if name != "data_dir" and any(value != found[0] for value in found)
    }
