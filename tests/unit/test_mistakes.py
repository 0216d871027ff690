"""What a user mistypes is answered with the word that was meant."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
from absl import flags

from tests.commands import ROOT, run_python
from trainer.config import Config, ConfigError
from trainer.config_file import load_module
from trainer.flags.parsing import unknown_flag, wrong_value

run = partial(run_python, "-m")
PARSERS = {
    "batch_size": flags.IntegerParser(),
    "bit": flags.IntegerParser(0, 1),
    "export": flags.BooleanParser(),
    "kind": flags.EnumParser(["a", "b"]),
    "mb": flags.FloatParser(0.001),
    "mode": flags.EnumParser(["a", "bc", "d"]),
    "ps": flags.IntegerParser(1),
    "rate": flags.FloatParser(),
    "secs": flags.FloatParser(0.0),
    "steps": flags.IntegerParser(0),
}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("log_every_steps", "--config.log_every_steps"),
        ("lanes", "--config.data.lanes"),
        ("worker", "--workers"),
        ("log_every_step", "--config.log_every_steps"),
        ("lr", "--learning_rate"),
        ("fp16", "--config.precision"),
        ("local_steps", "--config.local_steps.every"),
    ],
)
def test_flag_or_field_that_was_meant_is_named(name: str, meant: str) -> None:
    message = unknown_flag(name, ["workers", "model_dir"], Config())
    assert message == f"There is no flag --{name}. Did you mean {meant}?"


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("batch_size=abc", "a whole number. Received: 'abc'. Type --batch_size=64, for example."),
        ("batch_size=1e4", "a whole number. Received: '1e4'. Type --batch_size=10000."),
        ("batch_size=1,000", "a whole number. Received: '1,000'. Type --batch_size=1000."),
        ("batch_size=1.5", "a whole number. Received: '1.5'. Type --batch_size=64, for example."),
        ("rate=1,5", "a number. Received: '1,5'. Type --rate=1.5."),
        ("mode=b", "a, bc or d. Received: 'b'. Did you mean --mode=bc?"),
        ("kind=x", "a or b. Received: 'x'. Type --kind=a, for example."),
        ("steps=-1", "a whole number of 0 or more. Received: '-1'. Type --steps=0, for example."),
        ("ps=0", "a whole number of 1 or more. Received: '0'. Type --ps=1, for example."),
        ("mb=0", "a number of 0.001 or more. Received: '0'. Type --mb=0.001, for example."),
        ("secs=-2", "a number of 0 or more. Received: '-2'. Type --secs=0, for example."),
        ("bit=0x2", "a whole number from 0 to 1. Received: '0x2'. Type --bit=1, for example."),
        ("bit=-1", "a whole number from 0 to 1. Received: '-1'. Type --bit=0, for example."),
        ("export=maybe", "true or false. Received: 'maybe'. Type --export=True, for example."),
    ],
)
def test_value_of_a_wrong_type_is_explained(typed: str, answer: str) -> None:
    values = {"batch_size": 64, "rate": 0.1, "export": True}
    name, _, value = typed.partition("=")
    with pytest.raises(ValueError, match=r"\w") as raised:
        PARSERS[name].parse(value)
    message = wrong_value(f"flag --{typed}: {raised.value}", values, PARSERS)
    assert message == f"--{name} must be {answer}"


def test_other_messages_are_left_as_they_are() -> None:
    for message in ("flag --other=3: no", "Flag --x must be given"):
        assert wrong_value(message, {"batch_size": 64}, PARSERS) == message


def test_command_explains_values_and_flags_before_tensorflow_is_imported(tmp_path: Path) -> None:
    for typed, answer in (
        ("--config.batch_size=1e4", "Type --config.batch_size=10000."),
        ("--strategy=multi", "Received: 'multi'. Did you mean --strategy=multiworker?"),
        ("--lr=3", "There is no flag --lr. Did you mean --learning_rate?"),
        ("--config.optimizer.learning_rate=3", "Did you mean --config.learning_rate?"),
        ("--config.batch_size.=3", "Did you mean --config.batch_size?"),
        ("--config=digit", "Did you mean --config=digits.py?"),
    ):
        done = run("trainer", typed, cwd=tmp_path)
        assert done.returncode == 2
        assert answer in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["digits", "digits.py", "configs/digits.py"])
def test_shipped_config_is_found_from_any_directory_unless_there_is_one_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    load_module.cache_clear()
    _, (file, *_) = load_module(name)
    assert file == str(ROOT / "configs" / "digits.py")
    path = Path(name).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text("HERE = True\n")
    load_module.cache_clear()
    if name.endswith(".py"):
        assert load_module(name)[0].HERE
    else:
        monkeypatch.syspath_prepend(tmp_path)
        assert load_module(name)[0].HERE
        sys.modules.pop("digits")
    load_module.cache_clear()
    # The user's file does not hide the shipped one, neither by its path nor in another directory.
    shipped = str(ROOT / "configs" / "digits.py")
    assert load_module(shipped)[1][0] == shipped
    monkeypatch.chdir("/")
    assert load_module("digits")[1][0] == shipped
    load_module.cache_clear()


def test_unknown_config_names_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"mnist_replica\.py.*Shipped: .*digits"):
        load_module("configs/mnist_replic.py")


def test_version_names_the_packages_and_the_machine(tmp_path: Path) -> None:
    for command in ("trainer", "trainer.runs", "data.prepare"):
        printed = run(command, "--version", cwd=tmp_path, check=True).stdout.lower()
        for part in ("tensorflow 2.21", f"python {sys.version.split()[0]}", sys.platform):
            assert part in printed


def test_module_of_the_user_does_not_hide_a_package(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("")
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies/__init__.py").write_text("")
    run("trainer.runs", "--version", cwd=tmp_path, check=True)
    (tmp_path / "data.py").unlink()
    (tmp_path / "data").mkdir()  # The data themselves: no package.
    run("trainer.runs", "--version", cwd=tmp_path, check=True)


@pytest.mark.parametrize("command", ["trainer", "trainer.report", "data.inspect"])
def test_path_that_is_not_utf_8_is_refused(command: str, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/a\xffb")
    words = [f"--model_dir={path}"] if command == "trainer" else [path]
    done = run(command, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "/a\\xffb' is not UTF-8" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    os.mkdir(path)
    done = run(command, "nothing", cwd=Path(path))
    assert done.returncode == 2
    assert "current directory" in done.stderr


@pytest.mark.slow
def test_traceback_of_a_users_error_is_printed_if_asked_for(tmp_path: Path) -> None:
    words = ("trainer", "--config=digits", "--config.dataset=digts")
    plain, traced = (run(*words, *more, "--check", cwd=tmp_path) for more in ((), ("--traceback",)))
    assert (plain.returncode, traced.returncode) == (2, 2)
    assert "Did you mean --config.dataset=digits?" in plain.stderr
    assert "Traceback" not in plain.stderr
    assert "Traceback" in traced.stderr
    assert traced.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]
