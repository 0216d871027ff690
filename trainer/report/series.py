"""The contents of a run's files: reports over steps and time, and facts for the tables.

    run = RunSeries("runs/a")
    run.curve("train", "loss", over_time=True)     # rows of (seconds, value)

No TensorFlow is imported for local paths.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from time import localtime, strftime

import numpy as np
import numpy.typing as npt

from data.system.files import join
from strategies.worker_stats import mean_staleness
from trainer.report.drawing import Points
from trainer.run_files import (
    FAILURES,
    NO_METRICS,
    RESTARTS,
    Document,
    clock,
    directory_of_logs,
    four_digits,
    json_objects,
)
from trainer.run_record.goodput import CHIEFS, TaskTime, goodput
from trainer.run_record.summary import summary
from trainer.run_record.tools import require_run

_MOST_SAMPLES = 1000


class RunSeries:
    """One run, read once.

    Attributes:
        config: The contents of config.json.
        summary: As in the list of `python -m trainer.runs`.
        result: The contents of result.json; empty if there is none.
        tasks: The time of each task; empty if it was not recorded.
        began, ended: When the first task began and the last one ended, in seconds since 1970; 0 if
            it was not recorded.
        chief: The task that writes the reports, if its time was recorded.
        workers: The workers of parameter servers, if the reports count their steps.
    """

    def __init__(self, model_dir: str) -> None:
        """Raises ConfigError if there is no run in `model_dir`, RunFileError if it is damaged."""
        files = require_run(model_dir)
        self.model_dir = model_dir
        self.name = os.path.basename(os.path.realpath(model_dir.rstrip("/")))
        self.config = files.read_config()
        # Read once; values of each worker are in no more reports than a plot shows.
        reports = files.read_reports(num_with_workers=_MOST_SAMPLES)
        self.summary = summary(model_dir, reports)
        self.result: Document = files.read_result() or {}
        self.tasks: Sequence[TaskTime] = goodput(model_dir)
        self.began = min((task.pieces[0].begin for task in self.tasks), default=0.0)
        self.ended = max((task.pieces[-1].end for task in self.tasks), default=0.0)
        self.chief = next((task for task in self.tasks if task.name in CHIEFS), None)
        self._by_split: dict[str, list[Document]] = {}
        for report in sorted(reports, key=lambda report: int(report["step"])):
            self._by_split.setdefault(report.get("split", ""), []).append(report)
        last: Document = self.of("train")[-1] if self.of("train") else {}
        self.workers = list(last.get("worker_steps", {}))
        self._sampled = [report for report in self.of("train") if "worker_steps" in report]

    def of(self, split: str) -> list[Document]:
        """The reports of a split, in the order of their steps."""
        return self._by_split.get(split, [])

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics in reports, the loss first."""
        names = {
            name: None
            for split in ("train", "eval")
            for report in self.of(split)[-1:]
            for name, value in report.items()
            if name not in NO_METRICS and not isinstance(value, dict)
        }
        return sorted(names, key=lambda name: name != "loss")

    def curve(self, split: str, name: str, *, over_time: bool) -> Points:
        """Returns the values of a metric over steps or over seconds: rows (x, y), with NaNs."""
        xs = self.times(split) if over_time else self._column(split, "step")
        return np.stack([xs, self._column(split, name)], axis=1)

    def times(self, split: str) -> npt.NDArray[np.float64]:
        """The seconds from the first start of the run to each report of a split."""
        steps, seconds = zip(*self._marks, strict=True)
        times: npt.NDArray[np.float64] = np.interp(self._column(split, "step"), steps, seconds)
        return times

    def _column(self, split: str, name: str) -> npt.NDArray[np.float64]:
        """The value `name` of each report of a split; NaN where it is missing."""
        return np.array([report.get(name) for report in self.of(split)], np.float64)

    @functools.cached_property
    def _marks(self) -> list[tuple[int, float]]:
        """(step, seconds) in ascending order; a step that was repeated has its last time."""
        found: list[tuple[int, float]] = []
        for step, time in self._all_marks():
            while found and found[-1][0] > step:
                found.pop()
            if not found or found[-1][0] < step:
                found.append((step, time))
        return found or [(0, 0.0)]

    def _all_marks(self) -> Iterator[tuple[int, float]]:
        if self.chief is not None:
            for piece in self.chief.pieces:
                if piece.first_step is not None and piece.last_step is not None:
                    yield piece.first_step, piece.begin - self.began
                    yield piece.last_step, piece.end - self.began
            return
        # Without recorded times: the seconds of training in all processes, each from 0.
        before = last = 0.0
        for report in self.of("train"):
            if report.get("seconds", last) < last:
                before += last
            last = report.get("seconds", last)
            yield int(report["step"]), before + last

    def share_curve(self, worker: str) -> Points:
        """The share of `worker` in the steps between two reports."""
        found: list[tuple[float, float]] = []
        before = all_before = 0
        for report in self._sampled:
            steps = report["worker_steps"]
            own, whole = steps.get(worker, 0), sum(steps.values())
            if whole > all_before:
                found.append((float(report["step"]), (own - before) / (whole - all_before)))
            before, all_before = own, whole
        return np.array(found, np.float64).reshape(-1, 2)

    def staleness_curve(self, worker: str) -> Points:
        """The mean staleness of the gradients of `worker` so far."""
        found = [
            (report["step"], mean_staleness(report.get("staleness", {}).get(worker, {})))
            for report in self._sampled
        ]
        return np.array(found, np.float64).reshape(-1, 2)

    def restarts(self) -> list[Document]:
        """The lines of restarts.jsonl."""
        return self._of_launcher(f"tasks/{RESTARTS}")

    def resizes(self) -> list[Document]:
        """The lines of failures.jsonl with a new number of workers."""
        return [line for line in self._of_launcher(FAILURES) if "workers_before" in line]

    def _of_launcher(self, name: str) -> list[Document]:
        """The lines of a file that a launcher wrote: on this machine, or else in the bucket."""
        here = str(directory_of_logs(self.model_dir).parent)
        found = (list(json_objects(join(place, name))) for place in (here, self.model_dir))
        return next(filter(None, found), [])

    def accounting(self) -> list[tuple[str, str]]:
        """Returns the rows of the table of data accounting: (text, number)."""

        def count(name: str) -> int:
            reported = [int(report.get(name, 0)) for report in self.of("train")]
            return int(self.result.get(name, max(reported, default=0)))

        examples, skipped = count("examples"), count("examples_skipped")
        size = self.config.get("train_examples")
        rows = [("examples in steps", f"{examples:,}")]
        if size:
            rows.append(("training examples", f"{size:,}"))
            passes, more = divmod(examples + skipped, size)
            each = f"each example {passes:,} times" if passes else f"{more:,} of them once"
            if more and passes:
                each += f", and {more:,} of them once more"
            if skipped:
                each += f", without the {skipped:,} that were skipped"
            rows.append(("in the order of the run", each))
        step, batch = self.summary["step"], self.summary["config"].get("batch_size")
        if batch and step:
            text = f"{step:,} x {batch:,} = {step * batch:,}"
            is_equal = step * batch == examples
            rows.append(("steps x batch size", f"{text}, as above" if is_equal else text))
        names = {
            "worker_repeated": "gradients whose examples were assigned again",
            "worker_dropped": "gradients dropped because they were too old",
        }
        for name, text in names.items():
            if self.result.get(name):
                rows.append((text, f"{sum(self.result[name].values()):,}"))
        if skipped:
            rows.append(("examples skipped after a NaN", f"{skipped:,}"))
        damaged = self.result.get("records_skipped") or self.config.get("records_skipped") or {}
        rows += [(f"damaged records left out of {k}", f"{v:,}") for k, v in damaged.items()]
        if number := self.config.get("eval_examples"):
            shown = {int(report.get("examples", 0)) for report in self.of("eval")}
            text = f"{number:,}"
            if shown:
                text += ", each once" if shown == {number} else f"; evaluated: {sorted(shown)}"
            rows.append(("evaluation examples", text))
        return rows

    def facts(self) -> dict[str, str]:
        """Returns the row of a run in the first table: title -> text."""
        found = self.summary
        value = found["best"]
        best = "-" if value is None else f"{found['best_metric']} {four_digits(value)}"
        seconds = self.ended - self.began if self.tasks else found["seconds"]
        ended = "-" if found["exit_code"] is None else f"{found['exit_code']} ({found['why']})"
        began = self.began or found["started"]
        peak = max((report.get("gpu_peak_bytes", 0) for report in self.of("train")), default=0)
        return {
            "strategy": str(found["strategy"]),
            "step": f"{found['step']:,} of {found['train_steps']:,}",
            "best": best,
            "time": clock(seconds),
            "exit code": ended,
            "began": strftime("%Y-%m-%d %H:%M", localtime(began)) if began else "-",
            "host": str(self.config.get("host") or "-"),
            "GPU memory": f"{peak / 2**30:.1f} GiB" if peak else "-",
        }
