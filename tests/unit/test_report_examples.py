"""What the report says about a classifier equals what its model predicts."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import trainer
from data.prepare.preparing import prepare
from data.tfrecord.split import batched_records, open_split
from tests.commands import run_python
from trainer.config import ConfigError
from trainer.report.examples import (
    Classified,
    _are_probabilities,
    _classes,
    classified,
    classified_or_reason,
)

NAMES = [f"the {i}" for i in range(10)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> trainer.Result:
    """A run on digits whose classes have names; ten steps leave many mistakes."""
    directory = tmp_path_factory.mktemp("classifier")
    prepare("digits", str(directory / "digits"))
    (directory / "digits" / "label.labels.txt").write_text("\n".join(NAMES) + "\n")
    return trainer.train(
        "digits", data_dir=directory / "digits", model_dir=directory / "run", train_steps=10
    )


FAILING = """from configs import digits
from configs.digits import get_config

def build_model(config):
    model = digits.build_model(config)
    model.call = lambda *args, **kwargs: 1 / 0
    return model
"""


def directory_of(run: trainer.Result) -> Path:
    return Path(run.model_dir).parent


@pytest.fixture(scope="module")
def found(run: trainer.Result) -> Classified:
    return classified(run.model_dir)


@pytest.mark.slow
def test_counts_and_worst_examples_are_those_of_the_model(
    run: trainer.Result, found: Classified
) -> None:
    split = open_split(str(directory_of(run) / "digits"), "test")
    records = [record for batch in batched_records(split, 100) for record in batch]
    features = [tf.train.Example.FromString(record).features.feature for record in records]
    pixels = [np.frombuffer(f["image"].bytes_list.value[0], np.uint8) for f in features]
    labels = np.array([f["label"].int64_list.value[0] for f in features])
    logits = run.load_model()(np.reshape(pixels, (-1, 8, 8, 1)) / np.float32(255))
    probabilities = tf.nn.softmax(logits).numpy()
    predicted = probabilities.argmax(axis=1)

    wanted = np.zeros((10, 10), int)
    np.add.at(wanted, (labels, predicted), 1)
    assert found.confusion == wanted.tolist()
    assert found.num_examples == len(records) == 360
    assert found.accuracy == pytest.approx((labels == predicted).mean())
    of_label = np.where(labels == predicted, 2, probabilities[np.arange(360), labels])
    worst = np.argsort(of_label)[: len(found.worst)]
    assert len(worst) == 12
    assert [example.number for example in found.worst] == worst.tolist()
    assert [example.predicted for example in found.worst] == predicted[worst].tolist()
    assert all(example.image.startswith("data:image/png;base64,") for example in found.worst)


@pytest.mark.slow
def test_page_shows_the_names_of_the_classes(run: trainer.Result, found: Classified) -> None:
    assert found.class_names == NAMES
    done = run_python("-m", "trainer.report", run.model_dir, check=True)
    assert done.stderr == "", "TensorFlow prints nothing"
    page = (directory_of(run) / "run" / "report.html").read_text()
    worst = found.worst[0]
    assert f"{NAMES[worst.label]}, taken for {NAMES[worst.predicted]}<br>" in page
    matrix = page.partition('<table class="confusion">')[2].partition("</table>")[0]
    assert re.findall(r"<th>(.*?)</th>", matrix) == ["", *NAMES, *NAMES]


def test_class_without_a_name_is_shown_by_its_number(run: trainer.Result) -> None:
    path = directory_of(run) / "digits" / "label.labels.txt"
    path.write_text("\n".join(NAMES[:9]) + "\n")
    try:
        assert classified(run.model_dir).class_names == []
    finally:
        path.write_text("\n".join(NAMES) + "\n")


def test_more_classes_than_are_shown_are_a_reason() -> None:
    with pytest.raises(ConfigError, match="has 1,001 outputs; classes are shown up to 1,000"):
        _classes(tf.zeros([1], tf.int64), tf.zeros([1, 1001]))
    assert _classes(tf.zeros([1], tf.int64), tf.zeros([1, 1000])).tolist() == [0]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_probabilities_of_any_precision_are_told_from_logits(dtype: Any, num_classes: int) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(100, num_classes))
    for scale in (0.1, 1, 5):
        probabilities = tf.nn.softmax(tf.cast(scale * logits, dtype))
        assert _are_probabilities(probabilities.numpy().astype(np.float64))
    assert not _are_probabilities(logits)
    assert not _are_probabilities(abs(logits))


def test_error_of_the_model_is_a_reason(run: trainer.Result, tmp_path: Path) -> None:
    shutil.copytree(run.model_dir, tmp_path / "run")
    (tmp_path / "failing.py").write_text(FAILING)
    path = tmp_path / "run" / "config.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "recipe": str(tmp_path / "failing.py")}))
    reason = classified_or_reason(str(tmp_path / "run"))
    assert isinstance(reason, str)
    assert reason.startswith("ZeroDivisionError: ")
