"""The imports of trainer.local: the launcher starts fast and depends on no other part of a task."""

from tests.commands import run_python

PROGRAM = """
import importlib, pkgutil, sys
import trainer.local

for module in pkgutil.iter_modules(trainer.local.__path__):
    importlib.import_module(f"trainer.local.{module.name}")
print(*sys.modules)
"""


def test_local_clusters_import_no_tensorflow_and_nothing_that_runs_in_tasks() -> None:
    imported = set(run_python("-c", PROGRAM).stdout.split())
    assert "trainer.local.fork_server" in imported
    unwanted = {"tensorflow", "keras", "trainer.__main__", "trainer.cli", "trainer.task"}
    assert not imported & unwanted
