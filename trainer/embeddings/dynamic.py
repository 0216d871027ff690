"""A table without a fixed number of rows: any int64 id may get a row, and may lose it again.

    table = DynamicTable([DynamicPart(layer, 0, num_parts=1)], layer)
    ids, rows = table.ids_and_rows()                # sorted by id
    table.evict(step)                               # no step may be in flight

A hash table maps an id to its place (the index of its row), its sightings (the number of steps that
used it), and the last of these steps. An id without a row has place -1. Rows and optimizer slots
are variables that grow. All changes are made on the server of the part (dynamic_part.py):

| when | what |
| --- | --- |
| in the update of a step | sightings are counted; ids with enough of them get their initial row |
| between steps, by a hook | ids that were not used for long are removed |

So all decisions depend on steps and ids only, and not on the order in which workers answer.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import override

from data.system.compat.autograph import no_autograph
from strategies.base import value_of
from trainer.embeddings.dynamic_part import NUM_VALUES, Counts, DynamicPart
from trainer.embeddings.table import IDS, Graph, Ids, Index, Table

if TYPE_CHECKING:
    from trainer.embeddings.layer import ShardedEmbedding

log = logging.getLogger(__name__)


class DynamicTable(Table):
    """A table without a fixed number of rows, and its optimizer slots."""

    def __init__(self, parts: Sequence[DynamicPart], layer: "ShardedEmbedding") -> None:
        path = f"{layer.path}/embeddings"
        super().__init__([part.rows for part in parts], (None, layer.width), path)
        self._parts: Sequence[DynamicPart] = parts
        self.layer = layer
        self._has_warned = False
        self._saved_step = 0
        step = tf.TensorSpec([], tf.int64)
        use = tf.TensorSpec([None, NUM_VALUES], tf.int64)
        self._graphs = made = list[Graph]()

        def graph(methods: Sequence[Callable[..., object]], *specs: tf.TensorSpec) -> Graph:
            def call(*arguments: tf.Tensor) -> list[object]:
                return [method(*arguments) for method in methods]

            made.append(tf.function(no_autograph(call), input_signature=specs))
            return made[-1]

        self._last_steps_in_graph = graph([part.last_steps for part in parts])
        self._index_in_graph = graph([part.index for part in parts])
        self._evict_in_graph = graph([part.evict for part in parts], step)
        self._set_index_in_graph = graph([part.set_index for part in parts], IDS, use)

    @property
    def slot_names(self) -> list[str]:
        """The names of the optimizer slots."""
        return self.value_names[1:]

    @override
    def index(self) -> dict[str, Ids]:
        ids, use = _joined(self._index_in_graph())
        order = np.argsort(ids)
        return {"ids": ids[order], "use": use[order]}

    @override
    def take_changed_ids(self, index: Index, step: int) -> Ids:
        """All ids that were used count as changed."""
        has_row, last_step = index["use"][:, 0] == 1, index["use"][:, 2]
        found: Ids = index["ids"][has_row & (last_step > self._saved_step)]
        self._saved_step = step
        return found

    @override
    def set_index(self, index: Index, step: int = 0) -> None:
        """Replaces all ids by those of `index`; their rows are zeros.

        Rows whose last use was not kept count as used at `step`: otherwise rows in use would be
        removed if a run is resumed with other arguments of the layer.
        """
        use, unknown = index["use"], (index["use"][:, 0] == 1) & (index["use"][:, 2] == 0)
        if self._parts[0].keeps_last and unknown.any():
            use = np.where(unknown[:, np.newaxis] & (np.arange(NUM_VALUES) == 2), step, use)
            if self.layer.evicts:
                log.warning(
                    "%s: the checkpoint does not say when %s of its rows were last used, because "
                    "no id was removed so far. They count as used at its step, %s.",
                    self.path,
                    f"{np.count_nonzero(unknown):,}",
                    f"{step:,}",
                )
        self._set_index_in_graph(tf.constant(index["ids"]), tf.constant(use))

    def ids_and_rows(self) -> tuple[Ids, npt.NDArray[np.generic]]:
        """The ids that have rows, sorted, and these rows."""
        if frozen := self.layer.frozen:
            ids, rows = (np.asarray(weight.numpy()) for weight in frozen)
            return ids, rows
        ids = self.ids(self.index())
        return ids, value_of(self.values_of(ids)["rows"])

    def set_ids_and_rows(self, ids: Ids, rows: npt.NDArray[np.generic]) -> None:
        """Replaces all ids by `ids`, which count as used at step 0; there are no slots yet."""
        use = np.tile(np.array([1, self.layer.admit_after, 0]), (len(ids), 1))
        for part in self._parts:
            part.set_index(tf.constant(ids), tf.constant(use))
        # Not by a graph, which would be traced without the slots.
        self._set_values(tf.constant(ids), {"rows": tf.constant(rows)})

    def counts(self) -> Counts:
        """The sums of all parts."""
        counts = [value_of(part.counts) for part in self._parts]
        return Counts(*np.sum(counts, axis=0).tolist())

    def evict(self, step: int) -> None:
        """Removes ids, as the layer's arguments say; `step` steps are done, and none is in flight.

        With `max_rows` ids of the same last step stay, or go, together. So the result does not
        depend on an order of ids or parts. Those of the last step stay, however many they are.
        """
        first = 0  # Ids whose last step is before are removed.
        if self.layer.evict_after:
            first = max(0, step + 1 - self.layer.evict_after)
        if self.layer.max_rows:
            first = max(first, self._first_within(self.layer.max_rows, first))
        if first:
            self._evict_in_graph(tf.constant(first, tf.int64))

    def _first_within(self, max_rows: int, first: int) -> int:
        """Returns the lowest step since which at most `max_rows` ids with rows were used."""
        found, numbers = _joined(self._last_steps_in_graph())
        steps, places = np.unique(found, return_inverse=True)
        of_steps = np.bincount(places, numbers).astype(np.int64)
        since = np.cumsum(of_steps[::-1])[::-1]
        beyond = steps[since > max_rows]
        if not len(beyond):
            return 0
        if beyond[-1] < steps[-1]:
            return int(beyond[-1]) + 1
        if steps[-1] >= first and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: step %d alone used %d ids with rows, more than max_rows=%d. They stay. Set "
                "max_rows to several times the different ids of a batch.",
                self.path,
                steps[-1],
                of_steps[-1],
                max_rows,
            )
        return int(steps[-1])


def _joined(found: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> tuple[Ids, Ids]:
    """The values of all parts, one after the other."""
    firsts, seconds = (np.concatenate([*map(value_of, v)]) for v in zip(*found, strict=True))
    return firsts, seconds
