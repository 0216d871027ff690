"""`--ps_standby`: copies of the variables of each server, also on another server.

    standby = Standby(devices)
    standby.begin(variables)                        # in the chief, before training
    standby.copy(Reached(step, position, counts))   # while no step is in flight
    reached, values = standby.find(former) or ...     # in the next chief, if a ps was lost

Each server keeps its own values of a step, which share memory with the variables until the next
step changes them. While training continues, each server sends these values to the next server, and
the last server to the first. When all values have arrived, a record on each server says that the
copy is complete, and the copy before it is dropped. So there is a complete copy at any time. If one
server is lost, the next server has its part of the copy.
"""

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any  # JSON values.

import tensorflow as tf

from strategies.base import Tensor, read_now
from strategies.position import Position, Reached
from strategies.ps.former_state import FormerState, NamedTensors

_GENERATIONS = (0, 1)


class Standby:
    """Two generations of copies: while one is written, the other one is complete."""

    def __init__(self, devices: Sequence[str]) -> None:
        """`devices` are those of all ps tasks."""

        def stored(name: str, on: Sequence[str]) -> list[list[NamedTensors]]:
            return [[NamedTensors(device, f"{name} {g}") for device in on] for g in _GENERATIONS]

        # By generation, then by ps: its values, on itself and on the next ps; records.
        self._own = stored("own values", devices)
        self._mirrored = stored("values of the ps before", [*devices[1:], devices[0]])
        self._records = stored("complete copy", devices)
        self._variables: Sequence[tf.Variable] = ()
        self._generation = 0
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "standby")
        self._write: concurrent.futures.Future[None] | None = None

    def begin(self, variables: Sequence[tf.Variable]) -> None:
        """Prepares `copy` of `variables`. Traces its graphs, while all tasks answer."""
        self._variables = variables
        graphs = [(self._keep(g), self._mirror(g)) for g in _GENERATIONS]
        self._graphs = [tuple(f.get_concrete_function() for f in pair) for pair in graphs]

    def clear(self) -> None:
        """Drops all copies, also of a former chief, and waits for a copy that is being written."""
        self.wait()
        for generation in _GENERATIONS:
            self._drop(generation)

    def wait(self) -> None:
        """Returns when no copy is being written. Raises tf.errors.OpError if that has failed."""
        if self._write is not None:
            write, self._write = self._write, None
            write.result()

    def copy(self, reached: Reached) -> None:
        """Copies the present values, which are those of `reached`. No step may be in flight.

        Waits until the former copy is complete. Returns before this one is.
        """
        self.wait()
        generation = self._generation = 1 - self._generation
        keep, mirror = self._graphs[generation]
        keep(tf.constant(reached.step, tf.int64))

        def write() -> None:
            mirror()
            record = [reached.step, dataclasses.astuple(reached.position), reached.counts]
            for stored in self._records[generation]:
                stored.store_json(record)
            self._drop(1 - generation)

        self._write = self._writer.submit(write)

    def find(self, former: FormerState) -> tuple[Reached, list[Tensor]] | None:
        """The newest complete copy of the saved variables of `former`; None if there is none."""
        found = []
        for generation in _GENERATIONS:
            for stored in self._records[generation]:
                if record := stored.load_json():
                    found.append((_reached(record), generation))
        for reached, generation in sorted(found, key=lambda pair: -pair[0].step):
            values = self._values(former, reached.step, generation)
            if values is not None:
                return reached, values
        return None

    def _values(self, former: FormerState, step: int, generation: int) -> list[Tensor] | None:
        values: dict[int, Tensor] = {}
        for own, mirrored in zip(self._own[generation], self._mirrored[generation], strict=True):
            found = former.stored_values(own, own.device, step)
            if found is None:
                found = former.stored_values(mirrored, own.device, step)
            if found is None:
                return None
            values |= found
        return [values[index] for index in range(len(values))]

    def _drop(self, generation: int) -> None:
        for of_each in (self._records, self._own, self._mirrored):
            for stored in of_each[generation]:
                stored.clear()

    def _keep(self, generation: int) -> tf.types.experimental.PolymorphicFunction:
        @tf.function(input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)
        def keep(step: Tensor) -> None:
            for own in self._own[generation]:
                with tf.device(own.device):
                    values = [read_now(v) for v in self._variables if v.device == own.device]
                    own.store([tf.identity(step), *values])

        return keep

    def _mirror(self, generation: int) -> tf.types.experimental.PolymorphicFunction:
        @tf.function(input_signature=[], autograph=False)
        def mirror() -> None:
            for own, other in zip(self._own[generation], self._mirrored[generation], strict=True):
                dtypes = [v.dtype for v in self._variables if v.device == own.device]
                values = own.get([tf.int64, *dtypes])
                with tf.device(other.device):
                    other.store([tf.identity(value) for value in values])

        return mirror


def _reached(values: Sequence[Any]) -> Reached:
    step, (next_batch, open_sub_batches, skipped), counts = values
    open_parts = tuple((batch, first, last) for batch, first, last in open_sub_batches)
    return Reached(step, Position(next_batch, open_parts, tuple(skipped)), counts)
