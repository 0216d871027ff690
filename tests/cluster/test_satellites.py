"""Without any one satellite, all other modules can be imported, and a run trains.

Without all code of clusters, a run of one process trains.
"""

import json
import os
import shutil
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cluster.runs import ROOT
from tests.commands import run_python

PACKAGES = ("configs", "data", "strategies", "trainer")
# An editable installation finds the deleted modules in this checkout, if its finder is asked.
ALONE = """
import importlib.util, os, sys
is_editable = lambda finder: getattr(finder, "__module__", "").startswith("__editable__")
sys.meta_path[:] = [finder for finder in sys.meta_path if not is_editable(finder)]
for module in os.environ["DELETED"].split():
    assert importlib.util.find_spec(module) is None, module
"""
# Imports all modules, those that define flags of their own in forks, and then runs a command line.
IMPORTS = """
import importlib
modules = sys.stdin.read().split()
for module in [name for name in modules if name.endswith("__main__")]:
    if (child := os.fork()) == 0:
        importlib.import_module(module)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
for module in modules:
    if not module.endswith("__main__"):
        importlib.import_module(module)
"""
COMMAND = "from trainer.__main__ import run_from_command_line\nrun_from_command_line()"
CORE = """
from trainer import task, tf_setup
from trainer.config import load_recipe
from trainer.task_spec import TaskSpec
values = dict(word.removeprefix("--").split("=") for word in sys.argv[1:])
recipe = load_recipe("configs/digits.py")
recipe.config.data_dir, recipe.config.train_steps = values["data_dir"], int(values["train_steps"])
sys.exit(task.run(TaskSpec("mirrored", recipe, None, values["model_dir"])))
"""


TEXT = (ROOT / "pyproject.toml").read_text()
CONTRACTS = tomllib.loads(TEXT)["tool"]["importlinter"]["contracts"]
PROTECTED = {c["name"]: c["protected_modules"] for c in CONTRACTS if c["type"] == "protected"}
LEAVES = PROTECTED["Preparing data and trackers are leaves, which others only load by name"]
OF_CLUSTERS = PROTECTED[
    "Only what runs in a cluster imports its code, and what asks if there is one"
]


def satellites() -> list[str]:
    """The modules that pyproject.toml places above the core, or protects from every importer."""
    (layers,) = (c["layers"] for c in CONTRACTS if c.get("containers") == ["trainer"])
    above = [name.strip() for layer in layers[1:-1] for name in layer.split("|")]
    return [*(f"trainer.{name}" for name in above), *LEAVES]


def modules_in(directory: Path) -> list[str]:
    found = [
        path.relative_to(directory) for p in PACKAGES for path in (directory / p).rglob("*.py")
    ]
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in found}
    return sorted(names)


def copy_without(deleted: Sequence[str], copy: Path) -> Callable[..., None]:
    """Copies the packages; the function that is returned asserts that they train."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("*.pyc"))
    before = modules_in(copy)
    for module in deleted:
        path = copy.joinpath(*module.split("."))
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.with_suffix(".py").unlink()
    assert {*deleted} <= {*before} - {*modules_in(copy)}
    environment = {**os.environ, "DELETED": " ".join(deleted)}

    def assert_trains(program: str, digits: Path, steps: int = 20) -> None:
        model_dir, names = copy.parent / "run", " ".join(modules_in(copy))
        words = (f"--data_dir={digits}", f"--model_dir={model_dir}", f"--train_steps={steps}")
        argv = ("-c", ALONE + program, *words)
        run_python(*argv, cwd=copy, env=environment, input=names, check=True, PYTHONPATH=str(copy))
        result = json.loads((model_dir / "result.json").read_text())
        assert (result["step"], result["exit_code"]) == (steps, 0)

    return assert_trains


@pytest.mark.parametrize(
    "satellite",
    [
        name if name == "data.prepare" else pytest.param(name, marks=pytest.mark.nightly)
        for name in satellites()
    ],
)
def test_satellite_can_be_deleted(satellite: str, digits: Path, tmp_path: Path) -> None:
    assert_trains = copy_without([satellite], tmp_path / "copy")
    assert_trains(IMPORTS + (CORE if satellite == "trainer.cli" else COMMAND), digits)


def test_one_process_trains_without_the_code_of_clusters(digits: Path, tmp_path: Path) -> None:
    assert_trains = copy_without(OF_CLUSTERS, tmp_path / "copy")
    assert_trains(COMMAND, digits)
    assert_trains(COMMAND, digits, steps=30)  # Continues the run.
