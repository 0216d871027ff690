"""Trackers get the reports of a run and of its continuation; their failures are only warnings."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.plugins.hparams import plugin_data_pb2

import trainer
from tests.cluster.configs.linear import build_model
from tests.cluster.runs import ROOT, events
from tests.cluster.test_readme import blocks
from trainer.hooks.tracker_names import reached_over_network
from trainer.hooks.tracking import PROJECT, Background

Continued = Callable[..., trainer.Result]


@pytest.fixture
def train_and_continue(digits: Path, tmp_path: Path) -> Continued:
    """Trains 10 steps, then 20 in the same directory; returns the second result."""

    def run(**arguments: Any) -> trainer.Result:
        config = trainer.Config(data_dir=str(digits), export=False, log_every_steps=10)
        fixed = {"build_model": build_model, "model_dir": tmp_path / "run", **arguments}
        trainer.train(config, train_steps=10, **fixed)
        return trainer.train(config, train_steps=20, **fixed)

    return run


def test_mlflow_has_one_run_with_config_and_all_reports(
    train_and_continue: Continued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no SQL.
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
    result = train_and_continue(trackers="mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["batch_size"] == "64"
    assert run.data.metrics["eval/accuracy"] == pytest.approx(result.metrics["accuracy"])
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    reported = [(r["step"], r["loss"]) for r in result.history if r["split"] == "train"]
    assert [(metric.step, metric.value) for metric in losses] == reported
    assert [step for step, _ in reported] == [10, 20]


def test_mlflow_takes_metrics_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from trainer.hooks.trackers.mlflow import MLflow

    fields = {"strategy": "mirrored", "config": {"weights": {"a@b": 2}}}
    tracker = MLflow(str(tmp_path), fields, lambda: True)
    names = ["p@5", "p_5", "loss(a)", "a//b", "../c", "x" * 300, "d:e", "é"]
    tracker.begin(0)
    tracker.write(10, "eval", {name: float(i) for i, name in enumerate(names)})
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string=f"name = '{PROJECT}'")
    (run,) = client.search_runs([experiment.experiment_id])
    found = {name: value for name, value in run.data.metrics.items() if "x" not in name}
    accepted = ["p_5", "p_5_", "loss_a_", "a/_/b", "_/c", "d:e", "é"]
    values = [0, 1, 2, 3, 4, 6, 7]
    assert found == {f"eval/{name}": i for name, i in zip(accepted, values, strict=True)}
    assert len(run.data.metrics) == len(names)
    assert run.data.params == {"weights.a_b": "2"}


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file, which is a log of LevelDB after a header of 7 bytes."""
    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32_768 - at % 32_768  # Of the block.
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # A complete record, or its last part.
            yield record
            record = b""


def test_wandb_continues_its_offline_run(
    train_and_continue: Continued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    train_and_continue(trackers="wandb")
    files = sorted((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.stem for file in files}) == 1, "the same id"
    logged = []
    for file in files:
        for content in wandb_records(file):
            record = wandb_internal_pb2.Record.FromString(content)
            items = record.history.item
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            if "train/loss" in row:
                logged.append(row["step"])
    assert logged == [10, 20]


class Recorded(trainer.Writer):
    """A user's writer: appends to a file; fails where it is told to."""

    def __init__(self, path: str, fails: bool = False) -> None:
        self._path, self._fails = path, fails

    def begin(self, step: int) -> None:
        self._note(f"begin {step}")

    def write(self, step: int, split: str, values: Any) -> None:
        if self._fails:
            raise TimeoutError("the server does not answer")
        self._note(f"{split} {step} {sorted(values)[0]}")

    def end(self, step: int) -> None:
        self._note(f"end {step}")

    def _note(self, text: str) -> None:
        with open(self._path, "a") as file:
            file.write(f"{text}\n")


def test_writers_of_a_config_get_each_report_and_may_fail(
    train_and_continue: Continued, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (block,) = blocks(ROOT / "docs" / "trackers.md", "python")
    documented: dict[str, Any] = {}
    exec(block, documented)
    result = train_and_continue(
        build_writers=lambda config, model_dir: [
            *documented["build_writers"](config, model_dir),
            Recorded(f"{tmp_path}/good"),
            Recorded(f"{tmp_path}/bad", fails=True),
        ]
    )
    assert result.exit_code == 0
    assert (tmp_path / "good").read_text().splitlines() == [
        *("begin 0", "train 10 accuracy", "eval 10 accuracy", "end 10"),
        *("begin 10", "train 20 accuracy", "eval 20 accuracy", "end 20"),
    ]
    bad = ["begin 0", "end 10", "begin 10", "end 20"]
    assert (tmp_path / "bad").read_text().splitlines() == bad
    losses = (tmp_path / "run" / "losses.txt").read_text().splitlines()
    assert [line.split()[:2] for line in losses] == [
        [str(step), split] for step in (10, 20) for split in ("train", "eval")
    ]
    assert "Recorded failed: TimeoutError: the server does not answer." in caplog.text
    assert caplog.text.count("Recorded lacks 2 report(s)") == 2


def test_hanging_writer_does_not_hold_up_training(caplog: pytest.LogCaptureFixture) -> None:
    never, entered = threading.Event(), threading.Event()

    class Hanging(trainer.Writer):
        def write(self, step: int, split: str, values: Any) -> None:
            entered.set()
            never.wait()

    writer = Background(Hanging(), "slow", end_secs=0.05)
    for step in range(3):
        writer.write(step, "train", {})
    assert entered.wait(60)
    with caplog.at_level(logging.WARNING):
        writer.end(3)
    never.set()
    assert "slow has not answered for 0.05 s" in caplog.text


def test_writers_of_another_type_are_refused(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(trainer.UsageError, match=r"build_writers\(.* trainer\.Writer"):
        trainer.train(
            trainer.Config(data_dir=str(digits)),
            build_model=build_model,
            build_writers=lambda config, model_dir: [print],
            model_dir=tmp_path,
        )


def test_tracker_on_another_machine_needs_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert reached_over_network("wandb,mlflow") == "The tracker mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///disk/mlruns")
    assert reached_over_network("wandb,mlflow") == ""
    monkeypatch.delenv("WANDB_MODE")
    assert reached_over_network("wandb,mlflow") == "The tracker wandb"


def test_tensorboard_shows_config_and_metrics_as_hparams(
    train_and_continue: Continued, tmp_path: Path
) -> None:
    train_and_continue(learning_rate=0.5, clip={"norm": 1.0})
    data = [
        plugin_data_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for _, value in events(tmp_path / "run" / "tensorboard", "hparams")
    ]
    experiment, session = data[:2]
    metrics = {(m.name.group, m.name.tag) for m in experiment.experiment.metric_infos}
    assert metrics == {("eval", "loss"), ("eval", "accuracy")}
    shown = session.session_start_info.hparams
    assert shown["learning_rate"].number_value == 0.5
    assert shown["clip.norm"].number_value == 1.0
    assert shown["strategy"].string_value == "mirrored"
    assert "clip.value" not in shown, "not set"
