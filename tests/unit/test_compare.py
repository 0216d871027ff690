"""`python -m trainer.compare` finds the first step, and the variables, in which two runs part."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.commands import run_python
from trainer.checkpoints.file_checks import contents_of
from trainer.checkpoints.marks import signed
from trainer.compare import Comparison, compare
from trainer.config import ConfigError

LINES: list[dict[str, float | str | None]] = [
    {"step": step, "split": "train", "loss": 1 / step, "seconds": step} for step in range(1, 5)
]


def made_model(units: int = 3) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(units, name="head")])


def write_run(directory: Path, *, units: int = 3) -> None:
    """A run with three checkpoints and four reports."""
    model = made_model(units)
    for step in (10, 20, 30):
        write_checkpoint(directory, step, model)
    write_reports(directory, LINES)


def write_checkpoint(directory: Path, step: int, model: keras.Model) -> None:
    path = directory / "checkpoints" / f"step-{step:08d}"
    tf.train.Checkpoint(model=model).write(str(path / "variables"))
    (path / "checkpoint.json").unlink(missing_ok=True)
    files = {file.name: contents_of(str(file)) for file in path.iterdir()}
    mark = {"step": step, "next_batch": 0, "open_shares": [], "skipped": [], "identity": {}}
    (path / "checkpoint.json").write_text(json.dumps(signed({**mark, "files": files})))


Lines: TypeAlias = Sequence[Mapping[str, object]]


def write_reports(directory: Path, lines: Lines) -> None:
    directory.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)


def compared(tmp_path: Path, ours: Lines, theirs: Lines) -> Comparison:
    """Compares the runs a and b, whose reports are these."""
    write_reports(tmp_path / "a", ours)
    write_reports(tmp_path / "b", theirs)
    return compare(str(tmp_path / "a"), str(tmp_path / "b"))


def test_equal_runs_are_equal_whatever_their_speed(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    found = compared(tmp_path, LINES, [{**line, "seconds": 7.5} for line in LINES])
    assert found.is_equal
    assert (found.num_reports, list(found.checkpoint_steps)) == (4, [10, 20, 30])


def test_smallest_change_of_one_variable_is_found_with_its_step_and_name(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    model = made_model()
    kernel = model.layers[0].kernel.numpy()
    changed = np.nextafter(kernel, np.inf)
    model.layers[0].kernel.assign(changed)
    for step in (20, 30):
        write_checkpoint(tmp_path / "b", step, model)
    found = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found.reports is None
    assert found.variables is not None
    assert (found.variables.equal_step, found.variables.step) == (10, 20)
    ((name, size),) = found.variables.differ.items()
    assert name.endswith("head/kernel")
    assert size == pytest.approx(np.max(np.abs(changed - kernel)))
    assert "equal at step 10, different at step 20" in found.variables.describe("variables")


@pytest.mark.parametrize(
    ("theirs", "kernel", "expected", "has_hint"),
    [
        ("abXd", "1", ["gradients of part 2 of the batch"], False),
        ("aXXd", "2", ["gradients of parts 1, 2 of the batch", "kernel"], False),
        ("XXXX", "2", ["gradients of all parts of the batch", "kernel"], True),
        ("abcd", "2", ["kernel"], False),
    ],
)
def test_parts_whose_gradients_differ_are_named_with_the_variables(
    theirs: str, kernel: str, expected: list[str], has_hint: bool, tmp_path: Path
) -> None:
    def lines(digests: Sequence[str], kernels: str) -> Lines:
        return [
            {
                "step": 10 * number,
                "split": "train",
                "num_steps": 10,
                "digests": {"kernel": kernels[number]},
                "part_digests": dict(zip("0123", parts, strict=True)),
            }
            for number, parts in enumerate(digests)
        ]

    ours, others = lines(["abcd", "abcd"], "11"), lines(["abcd", theirs], f"1{kernel}")
    found = compared(tmp_path, ours, others)
    assert found.reports is not None
    assert list(found.reports.differ) == expected
    assert "equal at step 0, different at step 10:" in found.reports.describe("reports")
    assert ("log_every_steps=1" in found.reports.describe("reports")) == has_hint


def test_means_over_other_steps_are_not_compared(tmp_path: Path) -> None:
    def report(loss: float, **values: float) -> Lines:
        return [{"step": 10, "split": "train", "loss": loss, **values}]

    ours = report(0.5, num_steps=10, loss_scale=2.0)
    resumed = compared(tmp_path, ours, report(0.4, num_steps=4, loss_scale=2.0))
    assert (resumed.is_equal, resumed.num_other_steps) == (True, 1)
    assert not compared(tmp_path, ours, report(0.4, num_steps=10)).is_equal
    assert not compared(tmp_path, ours, report(0.5, num_steps=4, loss_scale=1.0)).is_equal
    of_earlier_version = report(0.4)
    assert not compared(tmp_path, ours, of_earlier_version).is_equal


def test_digests_of_parts_of_an_earlier_version_are_not_compared(tmp_path: Path) -> None:
    def report(digests: str, **values: int) -> Lines:
        parts = dict(zip("01", digests, strict=True))
        return [{"step": 10, "split": "train", "loss": 0.5, "part_digests": parts, **values}]

    assert compared(tmp_path, report("ab", num_steps=10), report("cd")).is_equal


def test_parts_of_another_number_are_not_compared(tmp_path: Path) -> None:
    def report(kernel: str, parts: str) -> Lines:
        digests = {str(index): part for index, part in enumerate(parts)}
        line = {"step": 10, "split": "train", "num_steps": 10, "digests": {"kernel": kernel}}
        return [{**line, "part_digests": digests}]

    found = compared(tmp_path, report("a", "abcd"), report("b", "ef")).reports
    assert found is not None
    assert list(found.differ) == ["kernel"]
    assert "different at step 10, the first that was compared: kernel" in found.describe("reports")


def test_reports_that_only_one_run_has_are_counted(tmp_path: Path) -> None:
    found = compared(tmp_path, LINES, LINES[1:3])
    assert found.is_equal
    assert (found.num_reports, found.num_single_reports) == (2, (2, 0))


def test_reports_of_an_evaluator_task_are_compared(tmp_path: Path) -> None:
    for name, loss in (("a", 0.5), ("b", 0.25)):
        evaluation = {"step": 2, "split": "eval", "loss": loss}
        (tmp_path / name).mkdir()
        write_reports(tmp_path / name / "evaluator", [evaluation])
    found = compared(tmp_path, LINES, LINES).reports
    assert found is not None
    assert (found.step, found.differ) == (2, {"loss of split eval": 0.25})


def test_first_different_report_is_found(tmp_path: Path) -> None:
    nan = {**LINES[2], "loss": None}  # Of the run.
    found = compared(tmp_path, LINES, [*LINES[:2], nan, *LINES[3:]])
    assert found.variables is None
    assert found.reports is not None
    assert (found.reports.equal_step, found.reports.step) == (2, 3)
    assert next(iter(found.reports.differ)) == "loss of split train"


def test_differences_that_are_no_numbers_are_null_in_json(tmp_path: Path) -> None:
    document = {"recipe": "a.py", "data_dir": "", "config": {"data": {"eval_split": "test"}}}
    for name, loss in (("a", 0.5), ("b", None)):
        write_reports(tmp_path / name, [{"step": 1, "split": "train", "loss": loss}])
        (tmp_path / name / "config.json").write_text(json.dumps(document))
    words = (str(tmp_path / "a"), str(tmp_path / "b"), "--json")
    done = run_python("-m", "trainer.compare", *words)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert found["reports"]["differ"] == {"loss of split train": None}


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", units=4)
    with pytest.raises(ConfigError, match=r"head/kernel has shape \[2, 3\] in one and \[2, 4\]"):
        compare(str(tmp_path / "a"), str(tmp_path / "b"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare(str(tmp_path / "a"), str(tmp_path / "empty"))
