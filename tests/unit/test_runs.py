"""`python -m trainer.runs` lists what is in the files of runs, without TensorFlow."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_python
from tests.unit.test_goodput import steps, write_process
from trainer import load_run
from trainer.config import ConfigError
from trainer.run_record.summary import differences, summary
from trainer.runs import default_fields, ordered, runs_under, table


def write_run(
    directory: Path, *, learning_rate: float, losses: list[float], exit_code: int | None = 0
) -> None:
    directory.mkdir(parents=True)
    config = {
        "best_metric": "loss",
        "train_steps": 10 * len(losses),
        "learning_rate": learning_rate,
        "data_dir": str(directory),
        "data": {"eval_split": "test"},
    }
    document = {"strategy": "mirrored", "recipe": "a.py", "data_dir": "data", "config": config}
    if learning_rate != 0.1:
        document["changed"] = ["learning_rate", "train_steps"]
    (directory / "config.json").write_text(json.dumps(document))
    lines: list[dict[str, Any]] = []
    for index, loss in enumerate(losses):
        step = 10 * (index + 1)
        # The second process of the run begins at step 20.
        seconds = 100.0 + index if index < 2 else 7.0 * (index - 1)
        lines.append({"step": step, "split": "train", "loss": loss, "seconds": seconds})
        lines.append({"step": step, "split": "eval", "loss": loss, "examples": 5, "seconds": 50.0})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text + '{"step": 1')
    if exit_code is not None:
        result = {"step": 10 * len(losses), "eval": {"loss": losses[-1]}, "exit_code": exit_code}
        (directory / "result.json").write_text(json.dumps(result))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_run(tmp_path / "a", learning_rate=0.1, losses=[3.0, 0.5, 0.7, 0.6])
    write_run(tmp_path / "deep" / "b", learning_rate=0.2, losses=[2.0, 0.4], exit_code=75)
    write_run(tmp_path / "c", learning_rate=0.1, losses=[], exit_code=None)
    (tmp_path / "latest").symlink_to("a")
    (tmp_path / "notes").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"strategy":')
    return tmp_path


def test_best_value_of_an_error_is_the_lowest(directory: Path) -> None:
    model_dir = directory / "a"
    document = json.loads((model_dir / "config.json").read_text())
    document["config"]["best_metric"] = "mae"
    lines = [{"step": s, "split": "eval", "loss": 1.0, "mae": s / 10, "seconds": 1} for s in (5, 9)]
    (model_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for is_lowest, best in ((True, 0.5), (False, 0.9)):
        text = json.dumps({**document, "best_is_lowest": is_lowest})
        (model_dir / "config.json").write_text(text)
        assert runs_under(str(model_dir))[0]["best"] == best


def test_each_run_is_listed_once_with_its_best_value_and_the_time_of_all_processes(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {Path(run["run"]).name: run for run in runs_under(str(directory))}
    assert set(runs) == {"a", "b", "c"}
    assert "damaged/config.json is missing or damaged" in capsys.readouterr().err
    assert (runs["a"]["best"], runs["a"]["step"], runs["a"]["exit_code"]) == (0.5, 40, 0)
    assert runs["a"]["seconds"] == 101.0 + 14.0
    assert (runs["b"]["best"], runs["b"]["seconds"], runs["b"]["exit_code"]) == (0.4, 101.0, 75)
    assert (runs["c"]["best"], runs["c"]["step"], runs["c"]["exit_code"]) == (None, 0, None)


@pytest.mark.parametrize(
    ("begins", "seconds"),
    [
        ([0, 10, 20], 20 + 21 + 22),
        ([0, 20, 10], 20 + 22),  # The reports of the second one were removed.
        ([0, 10, 10, 25], 20 + 21 + 22),
        ([0], 22),
        ([], 22),
    ],
)
def test_time_of_each_process_counts(begins: list[int], seconds: float, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, learning_rate=0.1, losses=[], exit_code=None)
    lines = [
        {"step": 10 * number, "split": "train", "loss": 1.0, "seconds": seconds}
        for number, seconds in enumerate((20.0, 21.0, 22.0), start=1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for number, step in enumerate(begins):
        trained = [{"seconds": {"start": 5.0}}, steps(step, step + 9, start=5.0, compute=20.0)]
        write_process(run, number, 100.0 * number, trained, task="chief-0")
    assert summary(str(run))["seconds"] == seconds


def test_only_fields_that_differ_and_matter_are_shown(directory: Path) -> None:
    runs = runs_under(str(directory))
    found = differences([run for run in runs if run["step"]])
    assert found == {"train_steps": [40, 20], "learning_rate": [0.1, 0.2]}


def test_runs_are_sorted_and_runs_without_the_value_come_last(directory: Path) -> None:
    runs = runs_under(str(directory))

    def names(key: str, *, reverse: bool = False) -> list[str]:
        return [Path(run["run"]).name for run in ordered(runs, key, reverse=reverse)]

    assert names("loss") == ["b", "a", "c"]
    assert names("loss", reverse=True) == ["a", "b", "c"]
    assert names("learning_rate", reverse=True)[0] == "b"
    assert names("seconds") == ["c", "b", "a"]
    for key in ("losss", "eval", "config"):  # The last two are no numbers or texts.
        with pytest.raises(ConfigError, match=f"--sort={key}: no run has such a number or text"):
            ordered(runs, key, reverse=False)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_each_run_is_one_line_that_fits_the_width(directory: Path, width: int) -> None:
    """Runs of 12 config files, which differ from each other in every field."""
    runs = [{**run, "run": Path(run["run"]).name} for run in runs_under(str(directory))]
    for number in range(12):
        config = {f"field_{number}_{i}": i for i in range(50)} | {"learning_rate": 0.5}
        name = f"digits-mirrored-learning_rate=0.5-{number}"
        more = {"changed": ["learning_rate"], "recipe": f"{number}.py"}
        runs.append({**runs[0], **more, "run": name, "config": config})
    for sort in ("started", "loss", "learning_rate"):
        lines = table(runs, default_fields(runs, sort), width)
        assert len(lines) == len(runs) + 2 + lines[-1].startswith("Left out for the width: ")
        assert max(map(len, lines[:-1])) <= width
        assert not any("field_" in line for line in lines)


def test_metric_of_the_order_and_what_the_command_line_changed_are_shown(directory: Path) -> None:
    runs = [{**run, "run": Path(run["run"]).name} for run in runs_under(str(directory))]
    title, _, *lines = table(runs, default_fields(runs, "started"), None)
    assert title.split() == ["run", "best", "loss", "step", "time", "exit", "changed"]
    changed = [" ".join(line.split()[5:]) for line in lines]
    assert changed == [f"learning_rate=0.{digit}" for digit in (1, 1, 2)]
    title, *_ = table(runs, default_fields(runs, "learning_rate"), None)
    assert title.split()[:2] == ["run", "learning_rate"]
    assert table(runs, ["run", "strategy", "loss"], None)[2].split() == ["a", "mirrored", "0.5000"]


def test_list_is_printed_as_table_and_as_json_without_tensorflow(directory: Path) -> None:
    argv = ("-X", "importtime", "-m", "trainer.runs", str(directory))
    table, as_json = (run_python(*argv, flag) for flag in ("--sort=loss", "--json"))
    lines = table.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["deep/b", "a", "c"]
    assert "40/40" in lines[3]
    assert "  loss  " in lines[0]
    assert "  0.5000  " in lines[3]
    assert "learning_rate=0.1" in lines[3]
    assert {run["strategy"] for run in json.loads(as_json.stdout)} == {"mirrored"}
    assert "tensorflow" not in {
        line.rpartition("|")[2].strip() for line in table.stderr.splitlines()
    }


def test_json_has_all_fields_and_null_for_what_is_no_number(directory: Path) -> None:
    path = directory / "a" / "result.json"
    path.write_text('{"step": 40, "eval": {"loss": NaN, "l": [Infinity]}, "exit_code": 0}')
    argv = ("-m", "trainer.runs", str(directory), "--json")
    done = run_python(*argv, check=True)
    runs = json.loads(done.stdout, parse_constant=pytest.fail)
    assert [run["eval"] for run in runs if run["run"].endswith("/a")] == [
        {"loss": None, "l": [None]}
    ]
    refused = run_python(*argv, "--fields=loss")
    assert refused.returncode == 2
    assert "--json prints all fields. Leave --fields out." in refused.stderr


@pytest.mark.parametrize("exit_code", [None, 75], ids=["running", "stopped"])
@pytest.mark.parametrize("place", ["", "evaluator"], ids=["the chief", "an evaluator"])
def test_metrics_of_a_run_without_a_result_are_those_of_its_last_evaluation(
    place: str, exit_code: int | None, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    write_run(run, learning_rate=0.1, losses=[], exit_code=None)
    lines: list[dict[str, Any]] = [
        {"step": 20, "split": "eval", "loss": 0.3, "mae": 0.2, "examples": 5},
        {"step": 30, "split": "eval", "loss": 0.4, "mae": 1e-5, "records_skipped": 2},
        {"step": 40, "split": "train", "loss": 0.1, "seconds": 2.0},
    ]
    (run / place).mkdir(exist_ok=True)
    (run / place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if exit_code:
        (run / "result.json").write_text(json.dumps({"eval": {}, "exit_code": exit_code}))
    assert load_run(run).metrics == {"loss": 0.4, "mae": 1e-5}
    (listed,) = runs_under(str(tmp_path))
    assert (listed["best"], listed["eval"]) == (0.3, {"loss": 0.4, "mae": 1e-5})
    assert "1.00e-05" in "".join(table([listed], ["run", "mae"], None))
