"""The names and formats of the files that a run leaves in its --model_dir.

    RunFiles("runs/a").write_result({"step": 1000, "exit_code": 0, "why": "done"})
    saved, reported = progress_of("runs/a")

| name | contents | written by |
| --- | --- | --- |
| config.json | the config, the cluster, the data and the versions | task.py, before training |
| metrics.jsonl | one JSON object per report | hooks/writers.py |
| checkpoints/ | step-* and best-*, each with a checkpoint.json | checkpoints/ |
| tensorboard/ | train and eval | hooks/writers.py, hooks/inspect.py |
| export/ | model.keras and saved_model | hooks/ |
| result.json | last step, evaluation, exit code, reason | reporting.py, as training ends |
| report.html | the page of the run | run_record/report_upload.py, and trainer.report |
| evaluator/ | metrics.jsonl and result.json of an evaluator task | evaluator.py |
| tasks/ | one log per task of a local cluster | local/supervisor.py |
| failures.jsonl | why tasks of hosts ended; new numbers of workers | local/launch_report.py |
| membership/ | which hosts, or how many workers, train: --min_workers | local/membership.py |
| trackers.json | the ids of the run in trackers | hooks/trackers/ |
| tasks/restarts.jsonl | why tasks of a local cluster were restarted | local/launch_report.py |
| tasks/*.time.jsonl | where the time of each task went | run_record/recorder.py |
| compiled/ | the programs that XLA has compiled, for the next start | compiled_programs.py |
| .lock | a lock, and the last process that had it | guards/run_lock.py |
| placement.txt | the device of each op, if asked for; of a cluster in tasks/ | connecting.py |

A file with a line per report is a Writer in hooks/writers.py, and made in hooks/building.py;
`uploading` in reporting.py sends it to s3://; run_record/summary.py and report/series.py read it.

No TensorFlow is imported for local paths: the launcher reads these files too.

A damaged file never ends a process with a traceback. A message names it, and it is made anew if the
run can do without it; otherwise the message says what to do, and the exit code is 2.
"""

import contextlib
import functools
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from data.system.errors import UsageError
from data.system.files import (
    exists,
    is_dir,
    is_s3,
    is_url,
    join,
    make_dirs,
    names_in,
    num_bytes_of,
    open_file,
    read_text,
    remove_file,
    replace_file,
)
from data.system.object_store import UnavailableError

CHECKPOINT_MARK = "checkpoint.json"  # In the directory of a checkpoint, written last.
NUM_STEPS = "num_steps"  # In a report of training: the steps that its means cover.
# Values of reports that are not metrics.
NO_METRICS = (
    "step",
    "split",
    "learning_rate",
    "examples",
    "epoch",
    NUM_STEPS,
    "steps_per_sec",
    "examples_per_sec",
    "input_wait",
    "gpu_peak_bytes",
    "seconds",
    "examples_skipped",
    "records_skipped",
)
FAILURES = "failures.jsonl"  # In the model directory, or, if that is a URL, under runs/.
# Of variables, and of the gradients of parts of batches, in reports of training: hooks/digest.py.
DIGESTS, PART_DIGESTS = "digests", "part_digests"
# Other values of some reports, of workers and tables by name, and of trainer.evaluate.
_OF_SOME_RUNS = (
    *("loss_scale", "skipped_steps", DIGESTS, PART_DIGESTS, "checkpoint", "staleness"),
    *(f"worker_{name}" for name in ("steps", "examples", "dropped", "repeated", "share")),
    *(f"table_{name}" for name in ("unique_share", "bytes_per_step", "rows", "new", "evicted")),
)
TAKEN_NAMES = frozenset((*NO_METRICS, *_OF_SOME_RUNS))  # No metric may have one of them.
RESTARTS = "restarts.jsonl"  # In the directory of the tasks' logs.
MEMBERSHIP = "membership"  # In the model directory.
_GROUP = re.compile(r"group-(\d{8})\.json")  # In MEMBERSHIP.
_LATEST = "latest"
_TAIL_BYTES = 1 << 20  # The last part of metrics.jsonl, which has the last reports.
# The newest step with a checkpoint, and the newest reported step.
Progress: TypeAlias = tuple[int, int]
Document: TypeAlias = Mapping[str, Any]  # A JSON object. Its values have no common type.
_LOG_FROM = 50.0  # The largest value is that many times the least: a curve is logarithmic.

log = logging.getLogger(__name__)


def is_logarithmic(name: str, least: float, most: float) -> bool:
    """Returns True if a curve of this name, from `least` to `most`, is shown logarithmically."""
    return ("loss" in name or "rate" in name) and least > 0 and most > _LOG_FROM * least


class RunFileError(UsageError):
    """A file of a run is missing or damaged, and the run cannot make it anew. Exit code 2."""


class RunFiles:
    """The paths of the files of a run, and the contents of its JSON files."""

    def __init__(self, model_dir: str) -> None:
        """For an evaluator's files, `model_dir` is `evaluator` of the run's."""
        self.model_dir = model_dir
        self.config = join(model_dir, "config.json")
        self.result = join(model_dir, "result.json")
        self.metrics = join(model_dir, "metrics.jsonl")
        self.checkpoints = join(model_dir, "checkpoints")
        self.tensorboard = join(model_dir, "tensorboard")
        self.export = join(model_dir, "export")
        self.model = join(self.export, "model.keras")
        self.evaluator = join(model_dir, "evaluator")
        self.tasks = join(model_dir, "tasks")
        self.compiled = join(model_dir, "compiled")

    def write_config(self, document: Document) -> None:
        """Writes config.json, in a directory that is created. Raises OSError if that fails."""
        make_dirs(self.model_dir)
        _write_json(self.config, document)

    def read_config(self) -> Document:
        """The contents of config.json. Raises RunFileError if it is missing or damaged."""
        try:
            document = _read_json(self.config, {"recipe": str, "data_dir": str, "config": dict})
            _check_types(document["config"], {"data": dict})
            _check_types(document["config"]["data"], {"eval_split": str})
            return document
        except UnavailableError:
            raise
        except (OSError, ValueError) as error:
            raise RunFileError(
                f"{self.config} is missing or damaged: {error}. Remove {self.result}, and start "
                "the training command of this run again with the same --model_dir: it writes both "
                "anew."
            ) from error

    def recorded(self, name: str) -> Document:
        """The object `name` in config.json; empty if it or the file is missing or damaged."""
        with contextlib.suppress(Exception):  # Each file system raises other errors.
            return dict(self.read_config()[name])
        return {}

    def write_result(self, document: Document) -> str:
        """Writes result.json. Returns the reason if that failed, for example a full disk, or ""."""
        try:
            _write_json(self.result, document)
        except OSError as error:
            return f"{self.result} could not be written: {error}"
        return ""

    def read_result(self) -> Document | None:
        """The contents of result.json; None if there is none, or if it is damaged: then warns."""
        if not exists(self.result):
            return None
        try:
            document = _read_json(self.result, {"exit_code": int})
            if document["exit_code"] == 0:
                _check_types(document, {"step": int, "eval": dict})
        except UnavailableError:
            raise
        except (OSError, ValueError) as error:
            _warn_once(f"{self.result} is damaged: {error}. The run writes it anew at its end.")
            return None
        return document

    def read_reports(self, *, num_with_workers: int | None = None) -> list[Document]:
        """The reports so far, as `read_reports` returns them; those of an evaluator task last."""
        found: list[Document] = []
        for path in filter(exists, (self.metrics, join(self.evaluator, "metrics.jsonl"))):
            try:
                found += read_reports(path, num_with_workers=num_with_workers)
            except (IsADirectoryError, PermissionError) as error:
                raise RunFileError(
                    f"{path} cannot be read: {error.strerror}. If it is a directory, move it "
                    "away: the run writes the file anew."
                ) from None
        return found

    def remove_result(self) -> None:
        """Removes result.json: the result of a former run says nothing about this one."""
        if exists(self.result):
            remove_file(self.result)


def local_dir(model_dir: str) -> str:
    """The local directory for files that are appended to: `model_dir`, unless it is at s3://."""
    return str(_place_of_url(model_dir)) if is_s3(model_dir) else model_dir


def directory_of_logs(model_dir: str | Path) -> Path:
    """The directory of the tasks' logs: in `model_dir`, or under runs/ if that is a URL."""
    is_remote = is_url(str(model_dir))
    return (_place_of_url(str(model_dir)) if is_remote else Path(model_dir).resolve()) / "tasks"


def _place_of_url(model_dir: str) -> Path:
    """The local directory of a run at a URL: runs/bucket/a for s3://bucket/a and gs://bucket/a."""
    return Path("runs", model_dir.partition("://")[2].strip("/")).resolve()


def newest_generation(model_dir: str | Path) -> int:
    """The generation of the newest group that is written down; 0 if there is none."""
    try:
        found = map(_GROUP.fullmatch, os.listdir(Path(model_dir) / MEMBERSHIP))
    except FileNotFoundError:
        return 0
    return max((int(match[1]) for match in found if match), default=0)


def point_latest_to(model_dir: str) -> None:
    """Makes runs/latest a link to `model_dir`, a default directory."""
    latest = Path(model_dir).parent / _LATEST
    partial = latest.with_name(f".{_LATEST}-{os.getpid()}")
    # It is a convenience: a file system without links, or a directory of that name, is no error.
    with contextlib.suppress(OSError):
        latest.parent.mkdir(parents=True, exist_ok=True)
        partial.symlink_to(Path(model_dir).name)
        partial.replace(latest)


def progress_of(model_dir: str) -> Progress:
    """The newest step with a finished checkpoint in `model_dir`, and the newest reported step.

    Files that cannot be read are treated as missing.
    """
    files, saved, reported = RunFiles(model_dir), 0, 0
    with contextlib.suppress(Exception):  # Each file system raises other errors.
        names = finished_checkpoints(files.checkpoints)
        saved = max((step_in(n) for n in names if n.startswith("step-")), default=0)
    with contextlib.suppress(Exception), open_file(files.metrics) as file:
        file.seek(max(0, num_bytes_of(files.metrics) - _TAIL_BYTES))
        lines = file.read().splitlines()
        reported = int(max((step_of(line, 0) for line in lines), default=0))
    return saved, reported


def read_reports(path: str, *, num_with_workers: int | None = None) -> list[Document]:
    """The reports in the file at `path`, without damaged lines.

    Under parameter servers most of a report is by worker. If `num_with_workers` is given, about
    this many reports at equal distances, and the last of each split, keep their values by worker:
    a long run needs a tenth of the memory and half the time.
    """
    with open_file(path) as file:
        lines = file.read().splitlines()
    every = 1 if num_with_workers is None else max(1, -(-len(lines) // num_with_workers))
    reports: list[Document] = []
    last_splits = set()
    for index in range(len(lines) - 1, -1, -1):
        report = _report(lines[index])
        if report is None:
            continue
        if index % every and report.get("split") in last_splits:
            report = {name: v for name, v in report.items() if not isinstance(v, dict)}
        last_splits.add(report.get("split"))
        reports.append(report)
    return reports[::-1]


def json_objects(path: str) -> Iterator[Document]:
    """The objects in a file of JSON lines, without damaged lines; none if there is no file."""
    if not exists(path):
        return
    with open_file(path) as file:
        lines = file.read().splitlines()
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(line), dict):
                yield found


def checkpoints_in(directory: str) -> list[str]:
    """The names of the checkpoints there: best-* first, each kind in the order of steps."""
    names = names_in(directory) if is_dir(directory) else []
    found = [name for name in names if re.fullmatch(r"(best|step)-\d+", name)]
    # Not by name alone, which has 8 digits or more.
    return sorted(found, key=lambda name: (name.partition("-")[0], step_in(name)))


def finished_checkpoints(directory: str) -> list[str]:
    """Those of `checkpoints_in` that were written to the end."""
    names = checkpoints_in(directory)
    return [name for name in names if exists(join(join(directory, name), CHECKPOINT_MARK))]


def step_in(name: str) -> int:
    """The step in the name of a checkpoint."""
    return int(name.partition("-")[2])


def step_of(line: bytes, if_damaged: float) -> float:
    """The step of a report; `if_damaged` for a part of a line, for example of a killed run."""
    report = _report(line)
    return if_damaged if report is None else int(report["step"])


def _report(line: bytes) -> Document | None:
    try:
        # Not json.loads alone, which guesses UTF-16 and UTF-32 from zero bytes.
        report: Document = json.loads(line.decode())
        int(report["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return report


def clock(seconds: float) -> str:
    """A duration as people read it: `1:02:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def four_digits(value: float) -> str:
    """A metric as people read it: `0.0123`; `4.18e-06` where that would be 0.0000."""
    return f"{value:.4f}" if value == 0 or not abs(value) < 0.0005 else f"{value:.2e}"


def two_digits(value: float) -> str:
    """A rate, or seconds, as people read it: `12,345`; `0.031` where that would be 0."""
    return f"{value:,.0f}" if not abs(value) < 9.5 else f"{value:.2g}"


def metric_words(metrics: Mapping[str, object]) -> list[str]:
    """The metrics as `loss 0.1230`; without values that are not float, such as counts."""
    found = metrics.items()
    return [f"{name} {four_digits(v)}" for name, v in found if isinstance(v, float)]


def _write_json(path: str, document: Document) -> None:
    """Writes `document` to `path` in one piece: a reader sees the old file or the new one."""
    replace_file(path, f"{json_text(document, indent=2)}\n".encode())


def _read_json(path: str, types: Mapping[str, type]) -> Document:
    """The JSON object in `path`. Raises ValueError if it has no values of these `types`."""
    try:
        document = json.loads(read_text(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_types(document, types)
    return document  # type: ignore[no-any-return]


def _check_types(document: object, types: Mapping[str, type]) -> None:
    if not isinstance(document, dict):
        raise ValueError(f"it holds a {type(document).__name__}, not an object")
    for key, wanted in types.items():
        if not isinstance(document.get(key), wanted):
            raise ValueError(f"it has no {key!r} of type {wanted.__name__}")


@functools.cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def json_text(value: object, indent: int | None = None) -> str:
    """`value` as JSON, with null for NaN and infinities, which JSON does not have."""
    return json.dumps(_without_nan(value), indent=indent, allow_nan=False)


def _without_nan(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
