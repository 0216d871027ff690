"""Text files become sequences of bytes, each byte predicted once; and what configs make of them."""

import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.disk_reader import DiskReader
from data.features import ExampleParse
from data.prepare import catalog
from data.prepare.preparing import prepare
from data.prepare.sources import Options, Source
from data.system.files import DataError
from data.tfrecord.examples import example_bytes
from strategies.metrics import means
from tests.unit.comparing import assert_same
from trainer.build import build_learner
from trainer.config import ConfigError, load_recipe
from trainer.inputs import open_inputs

LENGTH = 7


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Files of 0 to 59 bytes, in two directories, of which one is hidden."""
    directory = tmp_path / "texts"
    for name, size in (("b/long.txt", 59), ("a.txt", 20), ("c", 0), ("d.txt", 31), (".x/y", 99)):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(33 + i % 90 for i in range(size)))
    return directory


def sequences(split: Source, name: str, first: int = 0, last: int = -1) -> list[bytes]:
    found = split.splits[name]
    last = found.num_examples if last < 0 else last
    examples = map(tf.train.Example.FromString, found.examples(first, last))
    return [example.features.feature["bytes"].bytes_list.value[0] for example in examples]


def stream(texts: Path, cut: slice = slice(None)) -> bytes:
    names = ("a.txt", "b/long.txt", "c", "d.txt")
    return b"".join((texts / name).read_bytes()[cut] + b"\0" for name in names)


def test_each_byte_is_predicted_once_in_the_order_of_the_documents(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.prepare.sources.text._BLOCK_BYTES", 5)
    (texts / "train").mkdir()
    for name in ("a.txt", "b", "c", "d.txt"):
        (texts / name).rename(texts / "train" / name)
    whole = stream(texts / "train")
    opened = catalog.open_source("text:mine", str(texts), Options(length=LENGTH))
    assert opened.splits.keys() == {"train"}
    found = sequences(opened, "train")
    assert {len(sequence) for sequence in found} == {LENGTH + 1}
    predicted = b"".join(sequence[1:] for sequence in found)
    assert predicted == whole[1 : 1 + len(predicted)]
    assert len(whole) - 1 - len(predicted) < LENGTH
    # Processes write parts.
    for first in range(len(found)):
        last = min(first + 2, len(found))
        assert sequences(opened, "train", first, last) == found[first:last]


def test_end_of_each_document_is_the_test_split(texts: Path) -> None:
    options = Options(length=LENGTH, test_fraction=0.5)
    opened = catalog.open_source("text:mine", str(texts), options)
    text = b"".join(sequence[1:] for sequence in sequences(opened, "test"))
    ends = b"".join(
        (texts / name).read_bytes()[-(size // 2) or 99 :] + b"\0"
        for name, size in (("a.txt", 20), ("b/long.txt", 59), ("c", 0), ("d.txt", 31))
    )
    assert text == ends[1 : 1 + len(text)]


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (b"abc\0" * 99, Options(length=7), "has byte 0 at offset 359, .*Convert it to UTF-8"),
        (b"abc" * 3, Options(), "has 10 bytes, and a sequence needs 257.*Give more text"),
        (b"abc" * 3, Options(label="x"), "--label=x would be ignored"),
    ],
)
def test_mistakes_are_explained(
    content: bytes, options: Options, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(DataError, match=said):
        prepare("text:mine", str(tmp_path / "out"), str(file), options)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sentences")
    (directory / "text.txt").write_bytes(b"Once upon a time there was a mouse. " * 400)
    prepare("text:mine", str(directory / "data"), str(directory / "text.txt"))
    return directory / "data"


def test_language_model_is_causal_and_its_metrics_agree(sentences: Path) -> None:
    recipe = load_recipe("configs/text_lm.py")
    recipe.config.data_dir = str(sentences)
    recipe.config.width, recipe.config.blocks = 8, 1  # type: ignore[attr-defined]
    inputs = open_inputs(recipe)
    reader = DiskReader(inputs.evaluation)
    lanes = range(inputs.evaluation.order.lanes)
    tokens, labels, *_ = next(iter(reader.evaluation_batches(lanes)))
    assert tokens.shape == labels.shape
    assert np.array_equal(tokens[:, 1:], labels[:, :-1])
    learner = build_learner(recipe)
    before = learner.model(tokens).numpy()
    changed = tokens.numpy()
    changed[:, 100] += 1
    after = learner.model(changed).numpy()
    assert np.array_equal(before[:, :100], after[:, :100])
    assert (before[:, 100:] != after[:, 100:]).any(axis=(0, 2)).all()
    learner.objective.build_metrics(labels, before)
    totals = learner.evaluate((tokens, labels, tf.ones([len(tokens)]))).numpy()
    values = learner.to_metrics(totals)
    found = means(values)
    exact = keras.losses.sparse_categorical_crossentropy(labels, before, from_logits=True)
    assert found["loss"] == pytest.approx(np.mean(exact), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-6)
    # All weights are trained, those of the positions too.
    assert sum(v.shape[0] == 256 for v in learner.model.trainable_variables) >= 2


def test_language_model_refuses_sequences_of_another_length() -> None:
    parse = load_recipe("configs/text_lm.py").parse
    assert isinstance(parse, ExampleParse)
    assert [part.dtype for part in parse.narrow(records_of(257))] == [tf.uint8] * 2
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"= 256 .* --length=256.*\s+512"):
        parse(records_of(513))


def records_of(num_bytes: int) -> tf.Tensor:
    return tf.constant([example_bytes({"bytes": bytes(num_bytes)})] * 2)


@pytest.mark.slow
def test_finetuning_takes_the_backbone_of_a_file_and_trains_the_head(tmp_path: Path) -> None:
    backbone = keras.applications.MobileNetV2(
        (96, 96, 3), 0.35, include_top=False, weights=None, pooling="avg"
    )
    backbone.save(tmp_path / "backbone.keras")
    recipe = load_recipe("configs/image_finetune.py")
    recipe.config.warm_start.path = str(tmp_path / "backbone.keras")
    recipe.config.freeze = "backbone"
    with pytest.raises(ConfigError, match="has 260 variables, but this one has 262"):
        build_learner(recipe)
    recipe.config.warm_start.exclude = "head"
    learner = build_learner(recipe)
    assert [v.path for v in learner.model.trainable_variables] == ["head/kernel", "head/bias"]
    inner = learner.model.get_layer("backbone")
    assert_same(inner.variables, backbone.variables)
    assert "as initialised: head/kernel, head/bias" in learner.origin
    image = np.random.default_rng(0).random((2, 96, 96, 3)).astype(np.float32)
    # Frozen, and without statistics of the batch, also in the second run.
    recipe.config.freeze = ""
    model = build_learner(recipe).model
    assert np.allclose(model(image, training=True), model(image, training=False), atol=1e-6)
