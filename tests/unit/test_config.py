"""Configs are loaded, checked and explained."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.config import (
    Config,
    ConfigError,
    DataConfig,
    data_dir,
    explain_unknown_field,
    flatten,
    load_recipe,
    to_json,
)
from trainer.config_checks import check
from trainer.step.options import EarlyStoppingConfig

ROOT = Path(__file__).resolve().parents[2]
WHOLE = """
import dataclasses
from trainer.config import Config

@dataclasses.dataclass
class Mine(Config):
    width: int = 5

def get_config(): return Mine(batch_size=7)
def build_model(config): return config.width
def parse(serialized): return serialized
def augment(inputs, labels, seeds): return inputs, labels
def loss(labels, outputs): return outputs
def build_optimizer(config): return "optimizer"
def build_hooks(config, model_dir): return [model_dir]
metrics = {"one": loss}
"""


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_recipe_has_all_that_its_file_defines(tmp_path: Path) -> None:
    # Any: the functions of this file have other types than a real recipe's.
    recipe: Any = load_recipe(write(tmp_path / "mine.py", WHOLE))
    config = recipe.config
    assert (flatten(config)["width"], config.batch_size, recipe.build_model(config)) == (5, 7, 5)
    assert (recipe.parse("x"), recipe.augment(1, 2, 3), recipe.loss(1, 2)) == ("x", (1, 2), 2)
    assert recipe.metrics.keys() == {"one"}
    assert recipe.build_optimizer(config) == "optimizer"
    assert recipe.build_hooks(config, "dir") == ["dir"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[!_]*.py")), ids=lambda p: p.name)
def test_shipped_configs_pass_their_own_checks(path: Path) -> None:
    recipe = load_recipe(str(path))
    check(recipe.config)
    # JSON has lists in place of tuples.
    fields = json.loads(json.dumps(dataclasses.asdict(recipe.config)))
    assert json.loads(to_json(recipe.config)) == fields


COUNTS = ("batch_size", "train_steps", "steps_per_call", "log_every_steps", "keep_checkpoints")
NO_WEIGHTS: list[Any] = [{-1: 2.0}, {"0": 2.0}, {0: -1.0}, {True: 2.0}, {0: "x"}, {0: math.inf}]
TOO_LARGE = r"{0} must be at most 2\*\*24\. Received: 1000000000000000\. Type --config.{0}=(1|64),"


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(COUNTS, 1),
        {"batch_size": 64, "data": DataConfig(lanes=16)},
        {"recover_from_nan": 2},
    ],
)
def test_values_within_their_bounds_are_accepted(fields: dict[str, Any]) -> None:
    check(Config(**fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(({name: 0}, f"config.{name} must be at least 1. .*{name}=0") for name in COUNTS),
        *(
            ({"learning_rate": rate}, "Type --config.learning_rate=0.001,")
            for rate in (0.0, -1.0, math.nan, math.inf)
        ),
        ({"seed": 2**32}, r"seed must be below 2\*\*32\. .* Type --config.seed=1,"),
        ({"early_stopping": EarlyStoppingConfig(patience=3)}, "Type --config.eval_every_steps"),
        ({"batch_size": 64, "data": DataConfig(lanes=10)}, "lanes=10, batch_size=64"),
        *(
            ({"class_weight": weights}, r"Type --config\.class_weight='\{0: 2\}'")
            for weights in NO_WEIGHTS
        ),
        (
            {"recover_from_nan": 2, "checkpoint_every_steps": 0},
            "recover_from_nan=2 means nothing without .* Type --config.checkpoint_every_steps=100",
        ),
        *(({name: 10**15}, TOO_LARGE.format(name)) for name in ("batch_size", "eval_batch_size")),
    ],
)
def test_value_out_of_its_bounds_is_refused_with_what_to_type(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(Config(**fields))


def test_data_directory_is_named_after_the_data_set_unless_given() -> None:
    assert data_dir(Config(dataset="mnist")) == "datasets/mnist"
    assert data_dir(Config(dataset="mnist", data_dir="/d")) == "/d"
    assert data_dir(Config(data_dir="~/d")) == str(Path.home() / "d")


def test_fields_are_named_as_on_the_command_line() -> None:
    names = flatten(Config())
    assert names["batch_size"] == 64
    assert names["data.window_batches"] == 32
    assert "data" not in names


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("batchsize", "batch_size"), ("data.lane", "data.lanes"), ("learningrate", "learning_rate")],
)
def test_message_for_an_unknown_field_names_the_nearest_or_all(name: str, nearest: str) -> None:
    message = explain_unknown_field(name, Config())
    assert repr(name) in message
    assert f"--config.{nearest}?" in message
    listed = explain_unknown_field("xyzzy", Config())
    assert all(field in listed for field in flatten(Config()))


def test_bounds_hold_for_a_field_that_a_config_file_declares_again() -> None:
    @dataclasses.dataclass
    class Mine(Config):
        batch_size: int = 128

    check(Mine())
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        check(Mine(batch_size=0))


# What the shipped configs promise that needs no training.


@pytest.mark.parametrize(("blocks_per_stage", "num_layers"), [(3, 20), (9, 56)])
def test_resnet_has_the_papers_layers_and_parameters(
    blocks_per_stage: int, num_layers: int
) -> None:
    recipe = load_recipe("configs/cifar10_resnet.py")
    recipe.config.blocks_per_stage = blocks_per_stage  # type: ignore[attr-defined]
    model = recipe.build_model(recipe.config)
    kinds = (keras.layers.Conv2D, keras.layers.Dense)
    assert sum(isinstance(layer, kinds) for layer in model.layers) == num_layers
    millions = sum(np.prod(v.shape) for v in model.trainable_variables) / 1e6
    assert round(millions, 2) == {20: 0.27, 56: 0.85}[num_layers]  # Table 6.
    shapes = [layer.output.shape[1:] for layer in model.layers if layer.name.startswith("add")]
    assert shapes[::blocks_per_stage] == [(32, 32, 16), (16, 16, 32), (8, 8, 64)]


def test_cifar10_images_are_cut_from_padded_ones_and_mirrored() -> None:
    recipe = load_recipe("configs/cifar10_resnet.py")
    assert recipe.augment is not None
    places = np.arange(32)
    # The channels of a pixel are its row, its column, and 0.
    image = np.stack([*np.meshgrid(places, places, indexing="ij"), np.zeros((32, 32))], axis=-1)
    images = np.repeat(image[np.newaxis], 1000, axis=0).astype(np.float32) / 32
    seeds = np.random.default_rng(0).integers(-(2**31), 2**31, (1000, 2)).astype(np.int32)
    moved, labels = tf.function(recipe.augment)(images, np.arange(1000), seeds)
    assert np.array_equal(labels, np.arange(1000))
    rows, columns, _ = np.moveaxis(moved.numpy() * 32, -1, 0)
    # The middle is always left: it says how the image was moved.
    direction = np.round(columns[:, 16, 17] - columns[:, 16, 16])
    down = np.round(rows[:, 16, 16]) - 16
    right = np.round(columns[:, 16, 16]) - np.where(direction > 0, 16, 15)
    from_rows = down[:, np.newaxis, np.newaxis] + places[:, np.newaxis] + 0 * columns
    mirrored = np.where(direction[:, np.newaxis] > 0, places, 31 - places)
    from_columns = (right[:, np.newaxis] + mirrored)[:, np.newaxis] + 0 * rows
    is_inside = (np.abs(from_rows - 15.5) < 16) & (np.abs(from_columns - 15.5) < 16)
    np.testing.assert_allclose(rows[is_inside], from_rows[is_inside], atol=1e-3)
    np.testing.assert_allclose(columns[is_inside], from_columns[is_inside], atol=1e-3)
    beyond = moved.numpy()[~is_inside]
    assert beyond.min() > 0.3, "beyond the edge is the mean colour, not black"
    for drawn, number in ((down, 9), (right, 9), (direction, 2)):
        values, counts = np.unique(drawn, return_counts=True)
        assert len(values) == number
        assert counts.min() > 0.6 * 1000 / number
