"""A wrong loss, metric, augmentation or optimizer name is refused before the first step."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from data.disk_reader import DiskReader
from data.system.files import DataError
from data.tfrecord.examples import example_bytes
from data.tfrecord.split import Split
from strategies.base import Tensor
from tests.damage import flip_bit
from tests.unit.toy import BATCH, CLASSES, make_reader, write_split
from trainer.batch_checks import _state_of, check_batches, check_dense, length_notes
from trainer.build import build_learner
from trainer.config import Config, ConfigError, Recipe
from trainer.inputs import (
    Inputs,
    data_errors_explained,
    num_steps_of,
    open_inputs,
)
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.optimizers import supported_optimizers


def build_model(config: Config) -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(CLASSES)])


def squares(labels: Tensor, outputs: Tensor) -> Tensor:
    return tf.square(tf.cast(labels, tf.float32) - outputs[:, 0])


def make_recipe(**parts: Any) -> Recipe:
    config = Config(batch_size=BATCH, best_metric="loss")
    return Recipe("mine.py", **{"config": config, "build_model": build_model, **parts})


@pytest.fixture(name="inputs")
def inputs_of_toy(split: Split) -> Inputs:
    reader = make_reader(split)
    return Inputs(reader, reader)


def check(inputs: Inputs, **parts: Any) -> None:
    recipe = make_recipe(**parts)
    check_batches(inputs, build_learner(recipe), recipe)


def test_epochs_are_counted_in_data_that_is_prepared_when_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # 397 training examples, in batches of 64.
    recipe = make_recipe(config=Config(dataset="diabetes", batch_size=64))
    assert num_steps_of(recipe, 2) == 13


def test_message_names_a_shard_that_was_cut_while_it_was_read(tmp_path: Path) -> None:
    reader = make_reader(write_split(tmp_path))
    shard = reader.split.shards[-1]
    assert shard.frame_bytes
    left = shard.num_bytes - 3 * shard.frame_bytes
    os.truncate(shard.path, left)
    said = f"changed while they were read:\n.*{left} bytes"
    num_batches = 2 * reader.split.num_examples // reader.order.batch_size
    with pytest.raises(DataError, match=said), data_errors_explained(Inputs(reader, reader)):
        list(DiskReader(reader).batches(0, range(reader.order.lanes), num_batches))


def test_message_about_damage_names_flags_of_all_commands(tmp_path: Path) -> None:
    reader = make_reader(write_split(tmp_path))
    flip_bit(Path(reader.split.shards[0].path), 20)
    said = f"{reader.split.shards[0].path}: record 0 .*--repair=NEW_DIR, and give --data_dir=NEW"
    said += ".* train with --config.data.on_corrupt=skip"
    num_batches = reader.split.num_examples // reader.order.batch_size
    with (
        pytest.raises(DataError, match=re.compile(said, re.DOTALL)),
        data_errors_explained(Inputs(reader, reader)),
    ):
        list(DiskReader(reader).batches(0, range(reader.order.lanes), num_batches))


def test_reason_is_that_of_the_op_and_not_of_the_layer_around_it(inputs: Inputs) -> None:
    layer = keras.layers.Embedding(3, 2)
    with (
        pytest.raises(DataError, match=r"its features: indices\[0\] = 7 is not in \[0, 3\)$"),
        data_errors_explained(inputs),
    ):
        layer(tf.constant([7]))


def test_check_leaves_the_state_of_layers_as_it_was(inputs: Inputs) -> None:
    """Recurrent layers draw the masks of dropout in an evaluation, too, and advance a variable."""

    def build_recurrent(config: Config) -> keras.Model:
        recurrent = keras.layers.GRU(CLASSES, recurrent_dropout=0.5)
        return keras.Sequential([keras.Input((3,)), keras.layers.Reshape((3, 1)), recurrent])

    recipe = make_recipe(build_model=build_recurrent)
    learner = build_learner(recipe)
    (drawn,) = _state_of(learner)
    before = drawn.numpy()
    learner.model(tf.zeros([2, 3]))
    assert (drawn.numpy() != before).any(), "this test needs a layer that advances it"
    drawn.assign(before)
    check_batches(inputs, learner, recipe)
    assert (drawn.numpy() == before).all()


def test_check_copies_no_frozen_weights() -> None:
    def build_frozen(config: Config) -> keras.Model:
        model = build_model(config)
        model.layers[0].trainable = False
        return keras.Sequential([model, keras.layers.Dense(CLASSES)])

    assert _state_of(build_learner(make_recipe(build_model=build_frozen))) == []


def test_loss_and_metrics_with_one_value_an_example_pass(inputs: Inputs) -> None:
    check(inputs)
    check(inputs, loss=squares, metrics={"squares": squares})


WRONG = {
    "mean": (lambda y, x: tf.reduce_mean(squares(y, x)), r"shape \(\) .* drop tf.reduce_mean"),
    "column": (lambda y, x: squares(y, x)[:, tf.newaxis], r"shape \(8, 1\) .* every axis but"),
    "broadcast": (lambda y, x: tf.cast(y, tf.float32) - x[:, :1], r"shape \(8, 8\) .* same shape"),
    "short": (lambda y, x: squares(y, x)[:1], r"shape \(1,\) .* every axis but"),
    "dictionary": (lambda y, x: {"a": squares(y, x)}, "no tensor .* a single tensor"),
    "wrong sum": (lambda y, x: squares(y, x) + tf.zeros([5]), "fails: ValueError"),
}


@pytest.mark.parametrize(("function", "said"), WRONG.values(), ids=WRONG)
def test_wrong_loss_or_metric_has_a_remedy(inputs: Inputs, function: Any, said: str) -> None:
    by, of_metric = r"of mine.py (returned )?", r".*\(8,\) is needed" if "shape" in said else said
    with pytest.raises(ConfigError, match=rf"loss\(labels, outputs\) {by}{said}"):
        check(inputs, loss=function)
    with pytest.raises(ConfigError, match=rf"metrics\['mine'\]\(.*\) {by}{of_metric}"):
        check(inputs, loss=squares, metrics={"mine": function})


def test_augmentation_may_return_lists(inputs: Inputs) -> None:
    def augment(inputs: Tensor, labels: Tensor, seeds: Tensor) -> Any:
        return [[*inputs], labels]

    class First(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(CLASSES)

        def call(self, x: Any) -> Any:
            return self.dense(x[0])

    parse = inputs.train.parse
    reader = dataclasses.replace(
        inputs.train, augment=augment, parse=lambda s: ((parse(s)[0],), parse(s)[1])
    )
    recipe = make_recipe(build_model=lambda config: First())
    learner = build_learner(recipe, (tf.TensorSpec([None, 3]),))
    check_batches(Inputs(reader, reader), learner, recipe)


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        (lambda x, y, seeds: x, "must return .* of as many examples as it gets, 8 here"),
        (lambda x, y, seeds: (x[:3], y), r"must return .* 8 here.*\(3, 3\), \(8,\)"),
        (lambda x, y, seeds: (x + tf.zeros([5]), y), "fails: ValueError"),
        (lambda x, y: (x, y), "fails: TypeError"),
        (lambda x, y, seeds: (x, tf.sparse.from_dense(y)), "labels are a SparseTensor.*from_spa"),
    ],
    ids=["no labels", "fewer", "raises", "no seeds", "sparse"],
)
def test_wrong_augmentation_is_refused(inputs: Inputs, augment: Any, said: str) -> None:
    augmented = Inputs(dataclasses.replace(inputs.train, augment=augment), inputs.evaluation)
    said = r"augment\(inputs, labels, seeds\) of mine.py (must return dense tensors, .*)?" + said
    with pytest.raises(ConfigError, match=said):
        check(augmented)


NUMBERS = [example_bytes({"x": [0] * length, "y": length}) for length in (3, 30, 1)]


@pytest.mark.parametrize(
    ("kind", "pad", "note"),
    [
        (tf.io.VarLenFeature(tf.int64), None, ""),
        (tf.io.RaggedFeature(tf.int64), None, ""),
        (tf.io.VarLenFeature(tf.int64), "tf.sparse.to_dense(x)", "int64(None, None)"),
        (tf.io.RaggedFeature(tf.int64), "x.to_tensor()", "int64(None, None)"),
        (tf.io.FixedLenFeature([], tf.int64), "tf.numpy_function(abs, [x], tf.int64)", "int64<un"),
        (tf.io.RaggedFeature(tf.int64), "x.to_tensor()[..., tf.newaxis]", "[None, 20, 1]"),
        (tf.io.FixedLenFeature([], tf.int64), "x", ""),
    ],
)
def test_advice_on_padding_gives_one_length_in_all_batches(
    kind: Any, pad: str | None, note: str, inputs: Inputs
) -> None:
    """Without `pad`: as the message for a tensor that is not dense advises."""
    if pad is None:
        x = tf.io.parse_example(NUMBERS, {"x": kind})["x"]
        with pytest.raises(ConfigError, match="Pad it to one length") as raised:
            check_dense("parse(serialized)", ({"a": x}, x))
        pad = str(raised.value).partition("longer lists: ")[2].partition(" (default")[0]
        assert eval(pad, {"tf": tf, "x": x}).shape == [3, 20]

    def parse(serialized: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        name = "y" if isinstance(kind, tf.io.FixedLenFeature) else "x"
        x = tf.io.parse_example(serialized, {name: kind})[name]
        return {"a": eval(pad, {"tf": tf, "x": x})}, tf.zeros([tf.size(serialized)])

    reader = dataclasses.replace(inputs.train, parse=parse)
    notes = length_notes(Inputs(reader, reader), "mine.py")
    assert len(notes) == bool(note)
    assert note in "".join(notes)
    if note:
        assert "returns inputs['a'] of int64" in notes[0]


def test_loss_that_only_a_worker_can_run_is_not_run(inputs: Inputs) -> None:
    def loss(labels: Tensor, outputs: Tensor) -> Tensor:
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return squares(labels, outputs) + tf.cast(worker, tf.float32)

    with pytest.raises(RuntimeError):
        loss(tf.zeros([2]), tf.zeros([2, 3]))
    check(inputs, loss=loss)


def test_labels_are_still_compared_with_the_outputs(inputs: Inputs) -> None:
    def two_classes(config: Config) -> keras.Model:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(CLASSES - 1)])

    with pytest.raises(DataError, match="labels from 0 to 2, but the model has 2 outputs"):
        check(inputs, build_model=two_classes)


def test_default_loss_of_several_outputs_is_refused(inputs: Inputs) -> None:
    def two_outputs(config: Config) -> keras.Model:
        x = keras.Input((3,))
        return keras.Model(x, [keras.layers.Dense(CLASSES)(x) for _ in range(2)])

    with pytest.raises(DataError, match="default loss is for one label and one output"):
        check(inputs, build_model=two_outputs)


@pytest.mark.parametrize("name", ["multioptimizer", "lossscaleoptimizer", "no-such"])
def test_message_for_an_unknown_optimizer_lists_the_known(name: str) -> None:
    config = Config(batch_size=BATCH, optimizer=name)
    with pytest.raises(ConfigError, match=f"config.optimizer='{name}'.*adagrad, adam, .*rmsprop"):
        build_learner(make_recipe(config=config, loss=sparse_categorical_crossentropy))


@pytest.mark.parametrize("name", [*supported_optimizers(), "Adam"])
def test_name_of_an_optimizer_chooses_it(name: str) -> None:
    config = Config(batch_size=BATCH, optimizer=name, learning_rate=0.25)
    learner = build_learner(make_recipe(config=config))
    assert type(learner.optimizer).__name__.lower() == name.lower()
    assert learner.learning_rate == 0.25


@pytest.mark.parametrize(("typed", "meant"), [("minst", "mnist"), ("my_clicsk", "my_clicks")])
def test_data_set_that_was_meant_is_named(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets" / "my_clicks").mkdir(parents=True)
    with pytest.raises(DataError, match=f"Did you mean --config.dataset={meant}"):
        open_inputs(make_recipe(config=Config(dataset=typed)))
    with pytest.raises(DataError, match="Write the data there"):  # Known, but not prepared.
        open_inputs(make_recipe(config=Config(dataset="mnist")))
