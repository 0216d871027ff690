"""Configs are loaded, checked and explained."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

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
    assert flatten(recipe.config)["width"] == 5
    assert recipe.config.batch_size == 7
    assert recipe.build_model(recipe.config) == 5
    assert recipe.parse("x") == "x"
    assert recipe.augment(1, 2, 3) == (1, 2)
    assert recipe.loss(1, 2) == 2
    assert recipe.metrics.keys() == {"one"}
    assert recipe.build_optimizer(recipe.config) == "optimizer"
    assert recipe.build_hooks(recipe.config, "dir") == ["dir"]


def test_given_config_replaces_the_config_of_the_file(tmp_path: Path) -> None:
    config = Config(seed=9)
    assert load_recipe(write(tmp_path / "mine.py", WHOLE), config).config is config


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[!_]*.py")), ids=lambda p: p.name)
def test_shipped_configs_pass_their_own_checks(path: Path) -> None:
    recipe = load_recipe(str(path))
    check(recipe.config)
    # JSON has lists in place of tuples.
    fields = json.loads(json.dumps(dataclasses.asdict(recipe.config)))
    assert json.loads(to_json(recipe.config)) == fields


@pytest.mark.parametrize(
    "field", ["batch_size", "train_steps", "steps_per_call", "log_every_steps", "keep_checkpoints"]
)
def test_counts_below_one_are_refused(field: str) -> None:
    config = Config(batch_size=1)
    setattr(config, field, 1)
    check(config)
    setattr(config, field, 0)
    with pytest.raises(ConfigError, match=f"config.{field} must be at least 1. .*{field}=0"):
        check(config)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_learning_rate_must_be_above_zero(rate: float) -> None:
    with pytest.raises(ConfigError, match="learning_rate"):
        check(Config(learning_rate=rate))


def test_lanes_must_divide_the_batch() -> None:
    check(Config(batch_size=64, data=DataConfig(lanes=16)))
    with pytest.raises(ConfigError, match="lanes=10, batch_size=64"):
        check(Config(batch_size=64, data=DataConfig(lanes=10)))


@pytest.mark.parametrize("weights", [{-1: 2.0}, {"0": 2.0}, {0: -1.0}, {True: 2.0}, {0: "x"}])
def test_weights_of_classes_are_of_indices(weights: Any) -> None:
    with pytest.raises(ConfigError, match=r"Type --config\.class_weight='\{0: 2\}'"):
        check(Config(class_weight=weights))


def test_recovery_from_a_nan_needs_checkpoints() -> None:
    check(Config(recover_from_nan=2))
    with pytest.raises(ConfigError, match="recover_from_nan=2 needs checkpoints"):
        check(Config(recover_from_nan=2, checkpoint_every_steps=0))


def test_data_directory_is_named_after_the_data_set_unless_given() -> None:
    assert data_dir(Config(dataset="mnist")) == "datasets/mnist"
    assert data_dir(Config(dataset="mnist", data_dir="/d")) == "/d"


def test_fields_are_named_as_on_the_command_line() -> None:
    names = flatten(Config())
    assert names["batch_size"] == 64
    assert names["data.window_batches"] == 32
    assert "data" not in names


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("batchsize", "batch_size"), ("data.lane", "data.lanes"), ("learningrate", "learning_rate")],
)
def test_message_for_an_unknown_field_names_the_nearest(name: str, nearest: str) -> None:
    message = explain_unknown_field(name, Config())
    assert repr(name) in message
    assert f"--config.{nearest}?" in message


def test_unknown_field_without_a_near_match_lists_all_fields() -> None:
    message = explain_unknown_field("xyzzy", Config())
    assert all(name in message for name in flatten(Config()))


def test_bounds_hold_for_a_field_that_a_config_file_declares_again() -> None:
    @dataclasses.dataclass
    class Mine(Config):
        batch_size: int = 128

    check(Mine())
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        check(Mine(batch_size=0))


@pytest.mark.parametrize("name", ["batch_size", "eval_batch_size"])
def test_batch_that_does_not_fit_into_memory_is_refused(name: str) -> None:
    config = Config()
    setattr(config, name, 10**15)
    needed = rf"{name}=1,000,000,000,000,000 needs 46,566,128.7 GiB .* Type .*--config.{name}=1024"
    with pytest.raises(ConfigError, match=needed):
        check(config)
