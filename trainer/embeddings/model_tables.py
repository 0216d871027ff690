"""ModelTables: what the core needs of the tables of a model (trainer/learner/variables.py)."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import override

from strategies.base import Executor
from strategies.metrics import Pairs
from trainer.checkpoints.store import Store
from trainer.embeddings.dynamic import DynamicTable
from trainer.embeddings.saved import StagedTables, table_values
from trainer.embeddings.table import Part
from trainer.hooks.base import Hook, PeriodicHook
from trainer.step.options import ConfigError, Options

if TYPE_CHECKING:
    from trainer.embeddings.layer import ShardedEmbedding

# The lookups of a training step, for reports. Each replica is traced in its own thread, so it has
# its own counts.
_lookups: ContextVar[list[tuple[object, tf.Tensor]] | None] = ContextVar("lookups", default=None)


def add_lookup(layer: object, num_unique: tf.Tensor, num_ids: tf.Tensor) -> None:
    """Counts a lookup of `layer`; does nothing unless `begin_counting` was called."""
    found = _lookups.get()
    if found is not None:
        found.append((layer, tf.cast(tf.stack([num_unique, num_ids]), tf.float64)))


class ModelTables(tuple["ShardedEmbedding", ...]):
    """The layers of a model that are ShardedEmbeddings, in its order."""

    # The names of tables of dynamic ids that had no row before `start`, and are not trained.
    _without_rows: Sequence[str] = ()

    def start(self, options: Options, *, is_float16: bool) -> list[Part]:
        """Makes the optimizer slots; returns the parts that are trained.

        Called in the strategy's scope.

        Raises ConfigError for an option that would change, or read, a whole table in each step.
        """
        given, default = vars(options), vars(Options())
        refused = {
            f"config.{item.name}": instead
            for item in dataclasses.fields(options)
            if (instead := item.metadata.get("with_tables"))
            and given[item.name] != default[item.name]
        }
        if is_float16:
            refused["config.precision=mixed_float16"] = "--config.precision=mixed_bfloat16"
        for name, instead in refused.items():
            raise ConfigError(
                f"{name} cannot be used with a ShardedEmbedding "
                f"({', '.join(layer.name for layer in self)}), of which a step knows the rows of "
                f"its batch only. Use {instead}."
            )
        # Before rows are set, which a dry run does not do.
        self._without_rows = [
            la.name for la in self if la.is_dynamic and not la.trainable and not _has_rows(la)
        ]
        for layer in self:
            layer.start_training()
        parts = [part for layer in self if layer.trainable for part in layer.parts]
        for part in parts:
            part.add_slots(marks_changes=options.marks_changed_rows)
        return parts

    def check_rows(self) -> None:
        """Raises ConfigError if a table would be zeros for ever; called if no run is resumed."""
        if self._without_rows:
            raise ConfigError(
                f"ShardedEmbedding {', '.join(self._without_rows)}: a table of dynamic ids that "
                "is not trained (config.freeze, trainable=False) gets no rows, and this one has "
                "none, so that each id would have zeros for ever. Train it: leave it out of "
                "config.freeze. Or begin with its rows: build_model may return "
                "keras.models.load_model('runs/RUN/export/model.keras'). Or resume a run that has "
                "trained it: give its --model_dir."
            )

    def begin_counting(self) -> None:
        """Forgets the lookups so far."""
        _lookups.set([])

    def lookups(self) -> tf.Tensor:
        """The sums of the counts of each layer, float64 [2 * layers]; the counting ends."""
        found = _lookups.get() or []
        _lookups.set(None)
        zeros = tf.zeros([2], tf.float64)
        sums = [tf.add_n([zeros, *(n for one, n in found if one is layer)]) for layer in self]
        return tf.concat(sums, axis=0)

    def report(
        self, lookups: Pairs, num_steps: int, row_bytes: Callable[[int, int], int]
    ) -> Mapping[str, Mapping[str, float]]:
        """The values of a report of `num_steps` steps, each by the name of the layer."""
        found: dict[str, dict[str, float]] = collections.defaultdict(dict)
        for layer in self:
            table, (unique, number) = layer.table, lookups[layer.name]
            sent = unique * row_bytes(layer.width, tf.as_dtype(table.dtype).size) / num_steps
            found["table_unique_share"][layer.name] = unique / max(number, 1)
            found["table_bytes_per_step"][layer.name] = round(sent)
            counts = table.counts()._asdict() if layer.is_dynamic else {"rows": table.shape[0]}
            for name, count in counts.items():
                found[f"table_{name}"][layer.name] = count
        return found

    def dynamic_slots(self) -> list[tf.TensorSpec]:
        """The optimizer slots of tables of dynamic ids, without their numbers of rows."""
        return [
            tf.TensorSpec([None, *slot.shape[1:]], slot.dtype, f"{layer.table.path}/{name}")
            for layer in self
            if layer.is_dynamic
            for name, slot in list(layer.parts[0].variables.items())[1:]
        ]

    def hooks(self, executor: Executor) -> list[Hook]:
        """A hook for each table from which ids are removed."""
        # The uses of ids are counted in updates, so a table that is not trained would lose all.
        evicting = [layer for layer in self if layer.evicts and layer.trainable]
        return [Evict(la.table, executor, every_steps=la.evict_every) for la in evicting]

    def staged(
        self, store: Store, io_device: str, on_piece: Callable[[], None], complete_every: int
    ) -> StagedTables:
        """The files of the tables in checkpoints, of which nothing is written yet."""
        return StagedTables([la.table for la in self], store, io_device, on_piece, complete_every)

    def rows_in(self, checkpoint: str) -> dict[int, npt.NDArray[np.generic] | None]:
        """The rows in a checkpoint, by the `id` of the table; None if it lacks the table."""
        values = table_values(checkpoint, rows_only=True)
        return {id(layer.table): values.get(f"{n}/rows") for n, layer in enumerate(self)}


def _has_rows(layer: "ShardedEmbedding") -> bool:
    """Returns True if a layer of dynamic ids has rows, maybe as the constants of an export."""
    return bool(layer.frozen[0].shape[0] if layer.frozen else layer.table.counts().rows)


@dataclass(eq=False)
class Evict(PeriodicHook):
    """Removes the ids that the arguments of the layer say. Every task that runs the loop has it."""

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
