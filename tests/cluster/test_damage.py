"""Damaged data is fatal, or skipped and counted: nothing is ever trained on less in silence."""

import shutil
from pathlib import Path

import pytest

from tests.cluster.runs import Run, TrainOnce, assert_refused, largest_difference, train
from tests.commands import run_python
from tests.damage import flip_bit

CONFIG = "--config=tests/cluster/configs/linear.py"
SKIP = "--config.data.on_corrupt=skip"


def damaged_copy(digits: Path, tmp_path: Path) -> Path:
    """A bit of a training record's contents is another, and the test split's end is missing."""
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    flip_bit_of_shard(data, "train", 20)
    (shard,) = data.glob("*-test.tfrecord*")
    shard.write_bytes(shard.read_bytes()[:-5])
    return data


def flip_bit_of_shard(data: Path, split: str, at: int) -> Path:
    """Flips a bit of the only shard of a split; returns the path of the shard."""
    (shard,) = data.glob(f"*-{split}.tfrecord*")
    flip_bit(shard, at)
    return shard


def test_skipped_records_are_counted_in_everything_that_a_run_leaves(
    digits: Path, tmp_path: Path
) -> None:
    data = damaged_copy(digits, tmp_path)
    flags = (CONFIG, f"--data_dir={data}", "--train_steps=60")
    where = f"--model_dir={tmp_path / 'run'}"
    assert_refused((*flags, where), tmp_path / "run", "test.tfrecord", "cut short")
    assert not (tmp_path / "run").exists()

    run = train("mirrored-1", tmp_path / "run", *flags, SKIP)

    skipped = {"train": 1, "eval": 1}
    assert run.result["records_skipped"] == skipped
    assert run.config["records_skipped"] == skipped
    assert (run.config["train_examples"], run.config["eval_examples"]) == (1436, 359)
    for split in ("train", "eval"):
        assert {line["records_skipped"] for line in run.metrics(split)} == {1}
    assert {line["examples"] for line in run.metrics("eval")} == {359}
    assert "1 of 1,437 records cannot be read and are left out" in run.stderr

    more = train("mirrored-1", tmp_path / "run", *flags, SKIP, "--train_steps=80")
    assert more.result["step"] == 80
    flip_bit_of_shard(data, "train", -20)
    longer = (*flags, SKIP, "--train_steps=90", where)
    assert_refused(longer, tmp_path / "run", "train data")


def test_corrupt_record_is_named_before_the_first_step_if_records_are_cached(
    digits: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    shard = flip_bit_of_shard(data, "train", -20)  # In the last batch of the epoch.
    cached = ("--config.data.cache_bytes=100000000", "--config.data.shuffle=False")
    flags = (CONFIG, f"--data_dir={data}", *cached, f"--model_dir={tmp_path / 'run'}")
    assert_refused(flags, tmp_path / "run", shard.name, "corrupt", SKIP)


@pytest.fixture
def exported(train_once: TrainOnce) -> Run:
    """A run on undamaged data, which would fail on damaged data."""
    flags = (CONFIG, "--train_steps=20", "--config.export")
    return train_once("mirrored-1", *flags)


def test_undamaged_data_ends_in_the_same_weights_with_and_without_skip(
    exported: Run, digits: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    flags = (CONFIG, f"--data_dir={data}", "--train_steps=20", SKIP)
    skipping = train("mirrored-1", tmp_path / "run", *flags)
    assert skipping.result["records_skipped"] == {"train": 0, "eval": 0}
    assert "records_skipped" not in exported.result
    assert largest_difference(exported.weights(), skipping.weights()) == 0


def test_damaged_reports_and_result_of_a_run_are_named_and_made_anew(
    exported: Run, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    shutil.copytree(exported.model_dir, model_dir)
    result, metrics = model_dir / "result.json", model_dir / "metrics.jsonl"
    result.write_bytes(result.read_bytes()[:20])
    reports = metrics.read_bytes()
    metrics.write_bytes(b"\xff\xfe{\n" + reports)
    flags = (CONFIG, f"--data_dir={exported.config['data_dir']}", "--train_steps=20")
    run = train("mirrored-1", model_dir, *flags)
    assert f"{result} is damaged: " in run.stderr
    assert f"{metrics} has 1 damaged line(s), which are removed." in run.stderr
    assert "resuming from step 20" in run.stdout
    assert metrics.read_bytes().startswith(reports)
    assert (run.result["step"], run.result["exit_code"]) == (20, 0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"[]", "config.json is missing or damaged: it holds a list"),
        ("config.json", None, "config.json is missing or damaged: "),
        ("export/model.keras", b"PK", "model.keras cannot be loaded"),
    ],
)
def test_prediction_with_a_damaged_file_of_the_run_says_how_to_make_it_anew(
    name: str, content: bytes | None, message: str, exported: Run, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    shutil.copytree(exported.model_dir, model_dir)
    (model_dir / name).unlink()
    if content is not None:
        (model_dir / name).write_bytes(content)
    done = run_python("-m", "trainer.predict", f"--model_dir={model_dir}")
    assert done.returncode == 2
    assert message in done.stderr
    assert f"Remove {model_dir}/result.json" in done.stderr.replace("remove", "Remove")
    assert "Traceback" not in done.stderr


def test_prediction_on_a_corrupt_record_ends_with_2_and_the_command_that_names_the_record(
    exported: Run, digits: Path, tmp_path: Path
) -> None:
    data = damaged_copy(digits, tmp_path)
    flags = (f"--model_dir={exported.model_dir}", f"--data_dir={data}", "--split=train")
    done = run_python("-m", "trainer.predict", *flags)
    assert done.returncode == 2
    assert "error: Records are corrupt" in done.stderr
    assert "python -m data.inspect --data_dir=DIR --verify" in done.stderr
    assert "Traceback" not in done.stderr


def test_tools_name_a_corrupt_record_of_the_split_that_they_evaluate(
    exported: Run, digits: Path, tmp_path: Path
) -> None:
    data, model_dir = tmp_path / "data", tmp_path / "run"
    shutil.copytree(digits, data)
    shard = flip_bit_of_shard(data, "test", -20)  # Not in the first batch.
    shutil.copytree(exported.model_dir, model_dir)
    config = model_dir / "config.json"
    config.write_text(config.read_text().replace(str(digits), str(data)))
    done = run_python("-m", "trainer.evaluate", str(model_dir))
    assert done.returncode == 2
    assert f"error: Records are corrupt:\n  {shard}: record 359" in done.stderr
    assert "Traceback" not in done.stderr
    done = run_python("-m", "trainer.report", str(model_dir))
    assert done.returncode == 0, done.stderr
    assert "Records are corrupt" in (model_dir / "report.html").read_text()


@pytest.mark.parametrize("name", ["report", "runs", "compare"])
def test_directory_in_place_of_the_reports_is_named(
    name: str, exported: Run, tmp_path: Path
) -> None:
    shutil.copytree(exported.model_dir, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    words = {"runs": [tmp_path], "compare": [exported.model_dir, tmp_path / "run"]}
    done = run_python("-m", f"trainer.{name}", *map(str, words.get(name, [tmp_path / "run"])))
    assert done.returncode == (0 if name == "runs" else 2)  # The other runs are listed.
    assert f"{metrics} cannot be read: Is a directory" in done.stderr
    assert "Traceback" not in done.stderr
