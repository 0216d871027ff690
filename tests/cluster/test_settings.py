"""Settings outside the config that change numbers: they are said, recorded and compared."""

import json
import os
from pathlib import Path

import pytest

from strategies.cluster.tf_config import Task, local_cluster
from tests.cluster.runs import assert_one_error, assert_refused, by_hand, train
from tests.commands import run_python

CONFIG = "--config=tests/cluster/configs/linear.py"


def keras_home(directory: Path, **settings: object) -> str:
    """A directory with a keras.json."""
    directory.mkdir()
    (directory / "keras.json").write_text(json.dumps(settings))
    return str(directory)


def test_settings_of_keras_are_said_recorded_and_needed_by_what_continues_the_run(
    digits: Path, tmp_path: Path
) -> None:
    home = keras_home(tmp_path / "home", epsilon=0.001)
    model_dir = tmp_path / "run"
    flags = (CONFIG, "--plain", f"--data_dir={digits}")
    env = {"KERAS_HOME": home}
    first = train("multiworker-2", model_dir, *flags, "--train_steps=20", env=env)
    said = f"keras.config.epsilon is 0.001, which is not Keras' default: see {home}/keras.json"
    assert first.stderr.count("not Keras' default") == first.stderr.count(said) == 1
    settings = first.config["process_settings"]
    assert settings["keras.config.epsilon"] == 0.001
    assert settings["keras.config.dtype_policy"] == "float32"
    assert settings["TF_ENABLE_ONEDNN_OPTS"] == "not set"

    needed = "keras.config.epsilon"
    default = {"KERAS_HOME": keras_home(tmp_path / "default")}
    longer = ("--train_steps=30", f"--model_dir={model_dir}")
    assert_refused((*flags, *longer), model_dir, f"{needed}: 0.001 there, 1e-07 here", env=default)
    for tool in ("trainer.evaluate", "trainer.predict"):
        ended = run_python("-m", tool, str(model_dir), env={**os.environ, **default})
        assert (ended.returncode, needed in ended.stderr) == (2, True), ended.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KERAS_HOME", "{home}", "keras.config.floatx (float64 here), keras.config.dtype_policy"),
        ("TF_ENABLE_ONEDNN_OPTS", "0", "TF_ENABLE_ONEDNN_OPTS (0 here)"),
    ],
)
def test_task_with_other_settings_is_refused_before_it_builds_the_model(
    name: str, value: str, said: str, tmp_path: Path
) -> None:
    home = keras_home(tmp_path / "home", floatx="float64")
    cluster = local_cluster("multiworker", 2, 0)
    under = {Task("worker", 1): ("env", f"{name}={value.format(home=home)}")}
    flags = (CONFIG, "--num_threads=1")
    with by_hand(cluster, tmp_path / "run", *flags, under=under) as tasks:
        tasks.start(*cluster.tasks())
        runs = tasks.wait(2)
    assert_one_error(runs["worker 1"], f"differ in {said}")


@pytest.mark.parametrize(
    ("name", "value"), [("epsilon", 1), ("floatx", "float8")], ids=["epsilon", "floatx"]
)
def test_settings_with_which_nothing_trains_are_explained(
    name: str, value: object, digits: Path, tmp_path: Path
) -> None:
    home = keras_home(tmp_path / "home", **{name: value})
    model_dir = tmp_path / "run"
    flags = (CONFIG, f"--data_dir={digits}", f"--model_dir={model_dir}")
    assert_refused(flags, model_dir, "keras.json", name, env={"KERAS_HOME": home})
    assert not (model_dir / "config.json").exists()


def test_run_with_deterministic_ops_trains(tmp_path: Path) -> None:
    train("mirrored-1", tmp_path, CONFIG, "--train_steps=5", env={"TF_DETERMINISTIC_OPS": "1"})
