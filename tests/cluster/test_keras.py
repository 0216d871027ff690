"""What Keras users bring works under every strategy: lookup tables, unbuilt models, callbacks."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from data.prepare.preparing import prepare
from data.prepare.sources import Options
from tests.cluster.runs import CONFIGS, Run, train
from tests.commands import run_python
from tests.shards import write_shards


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """180 training and 36 test examples of a word, a number and two floats."""
    directory = tmp_path_factory.mktemp("words")
    random = np.random.default_rng(0)
    features = tfds.features.FeaturesDict(
        {
            "word": tfds.features.Text(),
            "number": tfds.features.Scalar(np.int64),
            "x": tfds.features.Tensor(shape=(2,), dtype=np.float32),
            "label": tfds.features.ClassLabel(num_classes=3),
        }
    )
    features.save_config(str(directory))
    for split, count in (("train", 180), ("test", 36)):
        labels = random.integers(0, 3, count)
        examples = []
        for label in labels:
            x = random.normal(size=2).astype(np.float32)
            example = {"word": "abc"[label], "number": 3 + 2 * label, "x": x, "label": label}
            examples.append(features.serialize_example(example))
        write_shards(examples, str(directory), "words", split, 1, count)
    return directory


def predictions(run: Run, cwd: Path) -> list[dict[str, object]]:
    """The lines of `trainer.predict`, in another directory."""
    words = ("-m", "trainer.predict", f"--model_dir={run.model_dir}", "--num_examples=0")
    env = {"PATH": "/usr/bin:/bin", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = run_python(*words, cwd=cwd, env=env, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_models_tables_and_callbacks_of_keras_are_equal_everywhere(
    words: Path, tmp_path: Path
) -> None:
    flags = (
        f"--config={CONFIGS / 'words.py'}",
        f"--data_dir={words}",
        "--config.data.inputs=('word','number','x')",
    )
    weights, accuracies = [], []
    for name in ("mirrored-1", "multiworker-2", "ps-sync-3+1"):
        run = train(name, tmp_path / name, *flags)
        # Stopped by the callback in all tasks, each with the same learning rates.
        assert run.result["step"] == 40
        assert "callback" in run.result["why"]
        assert run.metrics("train")[-1]["learning_rate"] == pytest.approx(0.5 / 2**4)
        # Evaluated after each epoch, for the callbacks.
        assert run.steps("eval") == [10, 20, 30, 40]
        weights.append(run.weights())
        accuracies.append(run.result["eval"]["accuracy"])
    for other in weights[1:]:
        for path, value in weights[0].items():
            assert np.allclose(value, other[path], atol=1e-5), path
    assert accuracies[0] == max(accuracies) == min(accuracies) == 1.0
    # The class is known only to the config file.
    lines = predictions(run, tmp_path)
    assert len(lines) == 36
    assert all(line["label"] == line["predicted"] for line in lines)


def test_example_config_of_a_table_trains(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with open(tmp_path / "adult.csv", "w") as file:
        columns = "age,workclass,fnlwgt,education,education-num,marital-status,occupation,"
        columns += "relationship,race,sex,capital-gain,capital-loss,hours-per-week,income"
        file.write(f"{columns}\n")
        writer = csv.writer(file)
        for _ in range(300):
            learned = random.choice(["Bachelors", "HS-grad"])
            gained = random.integers(0, 9999)
            age, hours = random.integers(18, 80), random.integers(10, 60)
            numbers = [age, "Private", 1, learned, 9, "Married", "Sales", "Wife", "White", "Male"]
            income = ">50K" if learned == "Bachelors" else "<=50K"
            writer.writerow([*numbers, gained, 0, hours, income])
    data = tmp_path / "data"
    prepare("csv:adult", str(data), str(tmp_path / "adult.csv"), Options(label="income"))
    short = ("--train_steps=60", "--batch_size=32")
    flags = ("--config=configs/table.py", f"--data_dir={data}", *short)
    run = train("mirrored-1", tmp_path / "run", *flags)
    assert run.result["eval"]["accuracy"] > 0.95
    assert re.search(r"inputs: age, .*, sex; label: income; left out: fnlwgt .*race", run.stdout)
    assert len(predictions(run, tmp_path)) == run.metrics("eval")[-1]["examples"]


def test_example_config_of_a_regression_trains(tmp_path: Path) -> None:
    prepare("diabetes", str(tmp_path / "data"))
    flags = ("--config=configs/regression.py", f"--data_dir={tmp_path / 'data'}")
    run = train("mirrored-1", tmp_path / "run", *flags)
    assert run.result["eval"].keys() == {"loss", "mae"}
    assert run.result["eval"]["loss"] < 4500  # The mean label has about 5,900.
    line = predictions(run, tmp_path)[0]
    assert "predicted" not in line
