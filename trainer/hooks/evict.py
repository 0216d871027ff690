"""Evict: removes ids from tables of dynamic ids, before reports, evaluations and checkpoints."""

from dataclasses import dataclass

import keras
from typing_extensions import override

from strategies.base import Executor
from trainer.embeddings.dynamic import DynamicTable
from trainer.embeddings.table import tables_of
from trainer.hooks.base import Hook, PeriodicHook


@dataclass(eq=False)
class Evict(PeriodicHook):
    """Removes the ids that the arguments of the layer say. In every task that runs the loop."""

    table: DynamicTable
    executor: Executor

    @override
    def begin(self, step: int) -> None:
        super().begin(step)
        self.table.make_graphs()

    @override
    def catch_up(self, step: int) -> None:
        """Removes ids if that is due at `step`; if it is done already, nothing changes."""
        if step and self.next_step(step - 1) == step:
            self._act(step)

    @override
    def act(self, step: int) -> None:
        with self.executor.changing("the removal of ids"):
            self.table.evict(step)


def evict_hooks(model: keras.Model, executor: Executor) -> list[Hook]:
    """A hook for each table of `model` from which ids are removed."""
    return [
        Evict(layer.table, executor, every_steps=layer.evict_every)
        for layer in tables_of(model)
        if isinstance(layer.table, DynamicTable) and layer.evicts
    ]
