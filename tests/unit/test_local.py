"""What the launcher imports: it starts fast, and depends on no other part of a task."""

from tests.commands import run_python

PROGRAM = """
import importlib, pkgutil, sys
import trainer.local

names = [f"trainer.local.{module.name}" for module in pkgutil.iter_modules(trainer.local.__path__)]
assert "trainer.local.fork_server" in names
names += ["data.order", "data.tfrecord.split", "data.features"]
names += ["trainer.checkpoints.identity", "trainer.checkpoints.retention"]
unwanted = {"tensorflow", "keras", "trainer.__main__", "trainer.cli", "trainer.task"}
for name in names:
    importlib.import_module(name)
    assert not unwanted & sys.modules.keys(), f"{name} imports {unwanted & sys.modules.keys()}"
"""


def test_launcher_imports_no_tensorflow_and_nothing_that_runs_in_tasks() -> None:
    run_python("-c", PROGRAM, check=True)
