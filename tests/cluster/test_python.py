"""`trainer.train` and `trainer.load_run`, in a process in which TensorFlow has been used."""

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags as absl_flags

import trainer
from tests.cluster.configs.linear import build_model
from tests.cluster.runs import read_metrics
from tests.cluster.runs import train as run_command
from tests.commands import run_python
from tests.unit.comparing import assert_same

RECIPE = """
from keras import Input, Sequential, layers
from trainer import Config

def get_config():
    return Config(batch_size=32, train_steps=20, export=False)

def build_model(config):
    return Sequential([Input((8, 8, 1)), layers.Flatten(), layers.Dense(10, name={name!r})])
"""


class SignalAt(trainer.Hook):
    """Sends SIGINT to this process, after `step` and in each later call."""

    def __init__(self, step: int, number: int = 1) -> None:
        self._step, self._left = step, number

    def next_step(self, step: int) -> int:
        return max(self._step, step + 1)

    def __call__(self, step: int, metrics: Any) -> None:
        if step >= self._step and self._left:
            self._left -= 1
            os.kill(os.getpid(), signal.SIGINT)


class DoneAt(trainer.Hook):
    """Says that training is complete after `step`."""

    def __init__(self, step: int) -> None:
        self._step = step

    def next_step(self, step: int) -> int:
        return self._step

    def __call__(self, step: int, metrics: Any) -> None:
        self.done = "enough" if step >= self._step else ""


def state() -> tuple[object, ...]:
    """What a call must leave as it was."""
    return (
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
        random.getstate(),
        str(np.random.get_state()),
        sys.argv,
        absl_flags.FLAGS.is_parsed(),
        tf.config.get_soft_device_placement(),
        keras.config.dtype_policy().name,
    )


def test_second_run_in_a_process_equals_the_command_and_changes_nothing_around_it(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tf.config.set_soft_device_placement(False)
    before = state()
    given: dict[str, Any] = {"data_dir": digits, "train_steps": 20, "data": {"lanes": 32}}
    results = [
        trainer.train("configs/digits.py", model_dir=tmp_path / name, **given) for name in "01"
    ]
    assert state() == before
    tf.config.set_soft_device_placement(True)
    assert "step 20/20  eval" in capsys.readouterr().out
    argv = (f"--data_dir={digits}", "--train_steps=20", "--config.data.lanes=32")
    command = run_command("mirrored-1", tmp_path / "command", *argv)
    for result in results:
        assert (result.step, result.exit_code, result.why) == (20, 0, "done")
        assert result.config["data"]["lanes"] == 32
        assert [report["split"] for report in result.history] == ["train", "eval"]
        assert result.metrics == pytest.approx(command.result["eval"], rel=1e-5)
        assert result.paths["model"].exists()
    first, second = (result.load_model() for result in results)
    assert_same(first.weights, second.weights)
    evaluated = results[0].evaluate()
    assert evaluated["accuracy"] == pytest.approx(results[0].metrics["accuracy"], abs=1e-6)

    # The finished run is returned; a longer one continues, with its own config.
    again = trainer.train(model_dir=results[0].model_dir)
    assert (again.step, again.metrics) == (20, results[0].metrics)
    longer = trainer.train(model_dir=results[0].model_dir, train_steps=30, learning_rate=0.5)
    assert longer.step == 30
    assert longer.history[-2]["learning_rate"] == pytest.approx(0.5), "that of the call"
    assert longer.config["data"]["lanes"] == 32


def test_config_object_with_functions_trains_stops_at_ctrl_c_and_continues(
    digits: Path, tmp_path: Path
) -> None:
    config, model_dir = trainer.Config(data_dir=str(digits), export=False), tmp_path / "run"
    given: dict[str, Any] = {"build_model": build_model, "model_dir": model_dir}
    hooks = {"build_hooks": lambda config, model_dir: [SignalAt(10)]}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(trainer.RunFailed, match="continues it") as stopped:
        trainer.train(config, train_steps=100_000, **given, **hooks)
    assert signal.getsignal(signal.SIGINT) is before
    result = stopped.value.result
    assert result is not None
    assert (stopped.value.exit_code, result.exit_code) == (75, 75)
    assert 10 <= result.step < 100_000
    steps = result.step + 10
    done = trainer.train(config, train_steps=steps, **given)
    assert (done.step, done.exit_code, config.train_steps) == (steps, 0, 1000)
    # It resumed: no step was trained again.
    reports = read_metrics(model_dir)
    assert [r["examples"] for r in reports if r["split"] == "train"][-1] == steps * 64

    loaded = trainer.load_run(model_dir)
    assert loaded.step == steps
    with pytest.raises(trainer.UsageError, match="build_model=build_model"):
        loaded.load_model()
    model = trainer.load_run(**given).load_model()
    assert_same(model.weights, done.load_model("newest").weights)


def test_run_that_a_hook_completes_is_exported(digits: Path, tmp_path: Path) -> None:
    result = trainer.train(
        trainer.Config(data_dir=str(digits)),
        build_model=build_model,
        build_hooks=lambda config, model_dir: [DoneAt(10)],
        model_dir=tmp_path,
        train_steps=100_000,
    )
    assert (result.step, result.exit_code) == (10, 0)
    assert (tmp_path / "export" / "model.keras").exists()


def test_second_ctrl_c_ends_the_call_at_once(digits: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(
            trainer.Config(data_dir=str(digits), steps_per_call=1),
            build_model=build_model,
            build_hooks=lambda config, model_dir: [SignalAt(1), SignalAt(1)],
            model_dir=tmp_path,
            train_steps=100_000,
        )
    assert signal.getsignal(signal.SIGINT) is before


def test_config_file_that_has_changed_is_read_again(digits: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    for name in ("first", "second"):
        path.write_text(RECIPE.format(name=name))
        result = trainer.train(path, data_dir=digits, model_dir=tmp_path / name)
        assert result.load_model().layers[-1].name == name


def test_diverged_run_raises_with_what_it_left(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(trainer.RunFailed, match="Lower --learning_rate") as failed:
        trainer.train(
            trainer.Config(data_dir=str(digits)),
            build_model=build_model,
            learning_rate=1e38,
            train_steps=20,
            model_dir=tmp_path,
        )
    assert failed.value.exit_code == 1
    assert failed.value.result is not None
    assert failed.value.result.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_step": 4}, r"no flag --train_step. Did you mean --train_steps\?"),
        ({"train_steps": "abc"}, "--train_steps must be a whole number"),
        ({"learning_rate": -1.0}, "learning_rate must be a finite number above 0"),
        ({"data": {"lane": 4}}, r"no field 'data.lane'. Did you mean --config.data.lanes\?"),
        ({"trackers": "mlflw"}, "no tracker .mlflw.. Known: mlflow, wandb"),
        ({"data_dir": "/no/such"}, "There is no directory /no/such"),
        ({"check": True}, "train.. takes no check"),
        ({"stall_timeout_secs": 3.0}, "this process is yours"),
        ({"build_model": build_model}, "belong to a Config object"),
        ({"replicas": 64}, "Restart the kernel"),
        ({"workers": 3}, "would be ignored under mirrored"),
    ],
)
def test_mistake_raises_the_message_of_the_command(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    tf.constant(1.0)
    with pytest.raises(trainer.UsageError, match=message) as raised:
        trainer.train("configs/digits.py", model_dir=tmp_path / "run", **arguments)
    assert raised.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_config_object_is_refused_for_other_processes(tmp_path: Path) -> None:
    with pytest.raises(trainer.UsageError, match="needs a config file") as raised:
        trainer.train(trainer.Config(), build_model=build_model, strategy="ps")
    assert "strategy='ps'" in str(raised.value)
    with pytest.raises(trainer.UsageError, match="is not the directory of a run"):
        trainer.load_run(tmp_path)


SCRIPT = """
import os, signal, sys, threading, time
import trainer
assert not {{"tensorflow", "keras", "absl"}} & set(sys.modules), "the import is not cheap"

def interrupt():
    while not os.path.exists({metrics!r}):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    trainer.train("digits", strategy="ps", workers=1, data_dir={digits!r}, model_dir={run!r},
                  train_steps=10_000_000, log_every_steps=20)
except trainer.RunFailed as error:
    assert error.exit_code == 75, error
    assert error.result.exit_code == 75 and error.result.step > 0
    print("STOPPED", error.result.step)
try:
    trainer.train("digits", strategy="ps", data_dir="/no/such", model_dir={run!r})
except trainer.UsageError as error:
    print("USAGE", error)
assert "tensorflow" not in sys.modules, "a cluster runs in other processes"
"""


def test_cluster_is_started_stopped_by_ctrl_c_and_its_messages_are_raised(
    digits: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    script = tmp_path / "script.py"
    paths = {"metrics": str(run / "metrics.jsonl"), "digits": str(digits), "run": str(run)}
    script.write_text(SCRIPT.format(**paths))
    done = run_python(str(script), cwd=tmp_path, check=True)
    assert "STOPPED" in done.stdout
    assert "compiling the first step" in done.stdout
    assert "USAGE There is no directory /no/such" in done.stdout
    assert json.loads((run / "result.json").read_text())["exit_code"] == 75
