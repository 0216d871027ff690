"""A copy of all variables, which another thread writes to disk while training continues.

    snapshot = Snapshot(tf.train.Checkpoint(model=model, optimizer=optimizer), device="CPU:0")
    snapshot.take()                             # copies the values; no step may be in flight
    snapshot.write("path/variables", options)   # on any thread; the files of Checkpoint.write

TensorFlow's asynchronous checkpoints (`experimental_enable_async_checkpoint`) fail with Keras 3,
whose variables create a tf.Variable inside the tf.function that copies.
"""

from collections.abc import Mapping

import keras
import tensorflow as tf

from data.autograph import no_autograph
from trainer.embeddings.dynamic import DynamicTable
from trainer.embeddings.table import Rows


def tensorflow_variables(checkpoint: tf.train.Checkpoint) -> list[tf.Variable]:
    """The variables below `checkpoint`, each once; of a table, its parts.

    Empty if a checkpoint has something else, too, such as a lookup table that changes.
    """
    found: dict[int, tf.Variable] = {}
    base = tf.__internal__.tracking.Trackable
    for node in tf.train.TrackableView(checkpoint).descendants():
        if isinstance(node, keras.Variable | tf.Variable | Rows):
            # `value` of a tf.Variable is a method.
            own = node.value if isinstance(node, keras.Variable) else node
            parts = own.parts if isinstance(own, Rows) else [own]
            found.update({id(part): part for part in parts})
        elif type(node)._serialize_to_tensors is not base._serialize_to_tensors:
            return []
    return list(found.values())


class Snapshot:
    """Copies of all variables below a tf.train.Checkpoint, on `device`.

    They have the names of the original, and so the same files. On a CPU `take` is cheap: both
    variables share one buffer, which TensorFlow copies when a step changes one (copy on write).
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, *, device: str) -> None:
        self._pairs: list[tuple[tf.Variable | Rows, tf.Variable]] = []  # (original, copy)
        self._tables: list[tuple[DynamicTable, _Values]] = []
        with tf.device(device):
            self._copy = self._copy_graph(checkpoint)
        # Now, not in the first `take`: under ps all tasks must answer meanwhile.
        self.take.get_concrete_function()

    @tf.function  # In one graph, so that parameter servers are read in parallel.
    def take(self) -> None:
        """Copies the current values. Waits for devices and for parameter servers.

        Raises tf.errors.UnavailableError if a parameter server was lost.
        """
        for variable, copy in self._pairs:
            copy.assign(variable.read_value())
        for table, values in self._tables:
            values.assign(table.values())

    def write(self, prefix: str, options: tf.train.CheckpointOptions) -> None:
        """Writes the copies to files that begin with `prefix`. Do not call `take` meanwhile.

        Raises OSError or tf.errors.OpError if a file cannot be written.
        """
        self._copy.write(prefix, options=options)

    def _copy_graph(self, checkpoint: tf.train.Checkpoint) -> tf.train.Checkpoint:
        view = tf.train.TrackableView(checkpoint)
        # Holds a reference to each node: an id is unique only while its object lives.
        nodes = view.descendants()
        copies: dict[int, tf.Variable | tf.train.Checkpoint | _Values] = {}
        inner = []
        for node in nodes:
            if isinstance(node, keras.Variable | tf.Variable | Rows):
                copies[id(node)] = self._copy_variable(node)
            elif isinstance(node, DynamicTable):
                copies[id(node)] = values = _Values(node.values())
                self._tables.append((node, values))
            # Other leaves are not copied: a lookup table is written as it is.
            elif view.children(node):
                copies[id(node)] = tf.train.Checkpoint()
                inner.append(node)
        for node in inner:
            for name, child in view.children(node).items():
                setattr(copies[id(node)], name, copies.get(id(child), child))
        return copies[id(checkpoint)]

    def _copy_variable(self, node: keras.Variable | tf.Variable | Rows) -> tf.Variable:
        variable = node.value if isinstance(node, keras.Variable) else node
        name = variable.name.partition(":")[0]
        copy = tf.Variable(variable.read_value(), trainable=False, name=name)
        self._pairs.append((variable, copy))
        return copy


class _Values(tf.__internal__.tracking.Trackable):
    """Copies of the values of a DynamicTable, whose sizes change from one `take` to the next."""

    def __init__(self, values: Mapping[str, tf.Tensor]) -> None:
        self._variables = {
            name: tf.Variable(value, shape=[None, *value.shape[1:]], trainable=False)
            for name, value in values.items()
        }

    @no_autograph
    def assign(self, values: Mapping[str, tf.Tensor]) -> None:
        for name, value in values.items():
            self._variables[name].assign(value)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {name: variable.read_value() for name, variable in self._variables.items()}
