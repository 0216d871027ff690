"""`python -m trainer.compare A B`: are two runs equal bit for bit, and if not, where do they part?

    python -m trainer.compare runs/a runs/b
    equal bit for bit: 10 reports, 3 checkpoints (the last of step 1,000)

Compared are the reports of equal steps (loss, metrics, learning rate) and all variables of the
checkpoints of equal steps, the optimizer's too. Reports name the steps between which two runs part;
checkpoints name the variables, and so do the digests that reports have with
config.virtual_replicas. These also name the parts of the batch whose gradients differ. Exit codes
are those of diff: 0 equal, 1 different, 2 an error.

The loss and the metrics of a report of training are means over its last `num_steps` steps: those
since the report before it, or since the run was resumed. They are not compared if the two reports
cover other steps.
"""

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from absl import flags

from data.system.extras import of_satellite
from data.system.files import exists
from trainer import run_files
from trainer.config import ConfigError, flatten_json
from trainer.exit_codes import EXIT_DONE, first_line
from trainer.run_files import DIGESTS, NUM_STEPS, PART_DIGESTS, Document, RunFiles, json_text
from trainer.run_record.tools import prepare_tensorflow, run_tool, runs_of

EXIT_DIFFERENT = 1
# Values of reports that depend on the machine: rates and times.
_NOT_COMPARED = (
    *("step", "split", "seconds", "steps_per_sec", "examples_per_sec", "input_wait"),
    *("gpu_peak_bytes", NUM_STEPS),
)
# Values of reports of training that are no means over its steps.
_NO_MEANS = {*run_files.NO_METRICS, "loss_scale", "skipped_steps"}
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_NUM_SHOWN = 8
_ALL_PARTS = "gradients of all parts of the batch"
_HINT = (
    "\nFrom the step after the first difference on, all parts differ. If the runs should be equal, "
    "find the part: continue both from a checkpoint at which they are equal, or start both anew, "
    "with --config.log_every_steps=1."
)
# The name of each value that differs, and its largest difference; NaN if that is no number.
Differences: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class Difference:
    """The first step at which two runs differ in their reports or in their checkpoints.

    `equal_step` is the last step before it at which they are equal; None if there is none.
    """

    step: int
    equal_step: int | None
    differ: Differences

    def describe(self, what: str) -> str:
        """For example `variables: equal at step 40, different at step 60: dense/kernel ...`."""
        shown = [
            name if math.isnan(size) else f"{name} (by up to {size:.3g})"
            for name, size in itertools.islice(self.differ.items(), _NUM_SHOWN)
        ]
        if len(self.differ) > _NUM_SHOWN:
            shown.append(f"and {len(self.differ) - _NUM_SHOWN} more")
        when = f"different at step {self.step:,}"
        if self.equal_step is not None:
            when = f"equal at step {self.equal_step:,}, {when}"
        else:
            when += ", the first that was compared"
        has_passed = self.step - (self.equal_step or 0) > 1
        hint = _HINT if has_passed and _ALL_PARTS in self.differ else ""
        return f"{what}: {when}: {', '.join(shown)}{hint}"


@dataclass(frozen=True)
class Comparison:
    """The result, as --json prints it; `reports` and `variables` are None if all are equal."""

    num_reports: int
    num_single_reports: tuple[int, int]  # Of the left run alone, and of the right run alone.
    num_other_steps: int  # Reports of training of which only one covers some steps.
    checkpoint_steps: Sequence[int]  # Of the compared checkpoints.
    reports: Difference | None
    variables: Difference | None

    @property
    def is_equal(self) -> bool:
        """True if nothing that was compared differs."""
        return self.reports is None and self.variables is None


def compare(left: str, right: str) -> Comparison:
    """Compares the runs in two directories.

    Raises ConfigError if they have no report and no checkpoint of the same step.
    """
    ours, theirs = (_reports(RunFiles(run)) for run in (left, right))
    common = sorted(ours.keys() & theirs.keys())
    saved = [_checkpoints(RunFiles(run)) for run in (left, right)]
    steps = sorted(saved[0].keys() & saved[1].keys())
    if not common and not steps:
        raise ConfigError(
            f"{left} and {right} have no report or checkpoint of the same step: nothing to compare."
        )
    by_step = itertools.groupby(common, key=lambda key: key[0])
    return Comparison(
        num_reports=len(common),
        num_single_reports=(len(ours) - len(common), len(theirs) - len(common)),
        num_other_steps=sum(_cover_other_steps(ours[key], theirs[key]) for key in common),
        checkpoint_steps=steps,
        reports=_first(
            (step, _report_differences([(ours[key], theirs[key]) for key in keys]))
            for step, keys in by_step
        ),
        variables=_first((at, variable_differences(saved[0][at], saved[1][at])) for at in steps),
    )


def _reports(files: RunFiles) -> dict[tuple[int, str], Document]:
    return {(report["step"], report["split"]): report for report in files.read_reports()}


def _checkpoints(files: RunFiles) -> dict[int, str]:
    """The path of a complete checkpoint of each step."""
    names = run_files.finished_checkpoints(files.checkpoints)
    return {run_files.step_in(name): f"{files.checkpoints}/{name}" for name in names}


def _report_differences(pairs: Iterable[tuple[Document, Document]]) -> Differences:
    """The differences in the reports of one step: a pair for each split."""
    digests: Differences = {}
    found: Differences = {}
    for left, right in pairs:
        if parts := _different_parts(left, right):
            digests[parts] = math.nan
        ours, theirs = left.get(DIGESTS, {}), right.get(DIGESTS, {})
        digests |= {name: math.nan for name in ours if ours[name] != theirs.get(name, ours[name])}
        cover_other_steps = _cover_other_steps(left, right)
        for name in [name for name in left if name in right and name not in _NOT_COMPARED]:
            ours, theirs = left[name], right[name]
            if cover_other_steps and name not in _NO_MEANS:
                continue
            if isinstance(ours, Mapping) or ours == theirs:  # Counts by worker depend on timing.
                continue
            is_number = ours is not None and theirs is not None
            size = abs(ours - theirs) if is_number else math.nan
            found[f"{name} of split {left['split']}"] = size
    return digests | found


def _cover_other_steps(left: Document, right: Document) -> bool:
    """True if a run was resumed, for example. Reports of an earlier version do not say it."""
    numbers = [report.get(NUM_STEPS) for report in (left, right)]
    return None not in numbers and numbers[0] != numbers[1]


def _different_parts(left: Document, right: Document) -> str:
    """The parts of a batch whose gradients differ, with config.virtual_replicas; "" if none do."""
    # Without NUM_STEPS they are of an earlier version, which added the digests of several steps.
    ours, theirs = (
        report[PART_DIGESTS] if {NUM_STEPS, PART_DIGESTS} <= report.keys() else {}
        for report in (left, right)
    )
    if ours.keys() != theirs.keys():  # The batches have other parts, or none.
        return ""
    parts = [part for part in ours if ours[part] != theirs[part]]
    if parts and len(parts) == len(ours):
        return _ALL_PARTS
    plural = "s" if len(parts) > 1 else ""
    return f"gradients of part{plural} {', '.join(parts)} of the batch" if parts else ""


def _first(found: Iterable[tuple[int, Differences]]) -> Difference | None:
    equal_step = None
    for step, differ in found:
        if differ:
            return Difference(step, equal_step, differ)
        equal_step = step
    return None


def variable_differences(left: str, right: str) -> Differences:
    """The variables of two checkpoints that are not equal bit for bit, in the model's order.

    Raises ConfigError if the checkpoints are of different models, or one of them is damaged.
    """
    # They load TensorFlow.
    from trainer.checkpoints.marks import DamagedError, complete_mark
    from trainer.checkpoints.store import local_files

    with contextlib.ExitStack() as stack:
        readable = []
        for path in (left, right):
            try:
                found = local_files(path, complete_mark(path).files)
                readable.append(stack.enter_context(found))
            except DamagedError as error:
                message = f"{path} cannot be compared: {error}. Copy its files again."
                raise ConfigError(message) from error
        differences = _dense_differences(left, right, readable)
    return differences | _table_differences(left, right)


def _dense_differences(left: str, right: str, readable: Sequence[str]) -> Differences:
    import tensorflow as tf

    readers = [tf.train.load_checkpoint(f"{path}/variables") for path in readable]
    ours, theirs = ({**reader.get_variable_to_shape_map()} for reader in readers)
    names = _readable_names(readers[0].get_tensor(_GRAPH))
    if ours.keys() != theirs.keys():
        only = sorted(names.get(key, key) for key in ours.keys() ^ theirs.keys())
        raise ConfigError(
            f"{left} and {right} are of different models or optimizers. Only one of them has "
            f"{', '.join(only[:_NUM_SHOWN])}."
        )
    found: Differences = {}
    for key in [key for key in names if key in ours and key != _GRAPH]:
        a, b = (np.asarray(reader.get_tensor(key)) for reader in readers)
        if a.shape != b.shape:
            raise ConfigError(
                f"{left} and {right} are of different models: {names[key]} has shape "
                f"{list(a.shape)} in one and {list(b.shape)} in the other."
            )
        if a.tobytes() != b.tobytes():
            found[names[key]] = _largest_difference(a, b)
    return found


def _table_differences(left: str, right: str) -> Differences:
    if not any(exists(f"{path}/tables.index") for path in (left, right)):
        return {}
    # They load TensorFlow.
    import tensorflow as tf

    from trainer.checkpoints.marks import DamagedError

    table_values = of_satellite("trainer.embeddings.saved", "table_values")
    try:
        ours, theirs = (table_values(path) for path in (left, right))
    except (DamagedError, OSError, ValueError, tf.errors.OpError) as error:
        raise ConfigError(
            f"The tables of {left} or {right} cannot be read: {first_line(error)}"
        ) from error
    found: Differences = {}
    for key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(key), theirs.get(key)
        if a is None or b is None or a.shape != b.shape:  # Of dynamic ids, for example.
            found[f"table {key}"] = math.inf
        elif a.tobytes() != b.tobytes():
            found[f"table {key}"] = _largest_difference(a, b)
    return found


def _largest_difference(left: npt.NDArray[np.generic], right: npt.NDArray[np.generic]) -> float:
    return float(np.max(np.abs(left.astype(np.float64) - right.astype(np.float64))))


def _readable_names(graph: bytes) -> dict[str, str]:
    """The name of the variable for each key of a checkpoint; the model's variables first."""
    from data.system.compat.checkpoint_graph import nodes_of  # Imports TensorFlow.

    full = {a.checkpoint_key: a.full_name for node in nodes_of(graph) for a in node.attributes}
    counts = Counter(full.values())  # All averages have one name, for example.
    # The optimizer has a list of the variables that it trains.
    model = ("model/", "optimizer/_trainable_variables/")
    return {
        key: full[key] if full[key] and counts[full[key]] == 1 else key.partition("/.")[0]
        for key in sorted(full, key=lambda key: not key.startswith(model))
    }


def define_flags() -> None:
    """Declares the flags of the command."""
    flags.DEFINE_boolean("json", False, "Print JSON.")


def main(argv: Sequence[str]) -> int:
    """Prints the comparison; returns the exit code of diff."""
    left, right = runs_of(argv, command="trainer.compare", number=2)
    prepare_tensorflow()
    configs = [flatten_json(RunFiles(run).read_config()["config"]) for run in (left, right)]
    different = [
        f"{name}: {configs[0].get(name)} | {configs[1].get(name)}"
        for name in dict.fromkeys([*configs[0], *configs[1]])
        if configs[0].get(name) != configs[1].get(name)
    ]
    found = compare(left, right)
    if flags.FLAGS.json:
        document = {"is_equal": found.is_equal, "config": different, **asdict(found)}
        print(json_text(document, indent=2))
        return EXIT_DONE if found.is_equal else EXIT_DIFFERENT
    for line in different:
        print(f"config.{line}")
    if found.is_equal:
        last = (
            f" (the last of step {found.checkpoint_steps[-1]:,})" if found.checkpoint_steps else ""
        )
        number = f"{found.num_reports} reports, {len(found.checkpoint_steps)} checkpoints"
        print(f"equal bit for bit: {number}{last}")
        if any(found.num_single_reports):
            single = zip(found.num_single_reports, (left, right), strict=True)
            shown = " and ".join(f"{count} of {run}" for count, run in single if count)
            print(f"not compared, since the other run has no such report: {shown}")
        if found.num_other_steps:
            print(
                f"{found.num_other_steps} reports cover other steps in the two runs: their losses "
                "and metrics are not compared"
            )
        return EXIT_DONE
    for what, difference in (("reports", found.reports), ("variables", found.variables)):
        if difference is not None:
            print(difference.describe(what))
    return EXIT_DIFFERENT


if __name__ == "__main__":
    run_tool(main, define_flags)
