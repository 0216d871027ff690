"""A second set of variables, which a thread writes while the first are trained on.

    snapshot = Snapshot(tf.train.Checkpoint(model=model, optimizer=optimizer), device="CPU:0")
    snapshot.take()                     # the values of now; no step may be in flight
    snapshot.write("path/variables")    # on any thread: what Checkpoint.write would have written

TensorFlow's own way (`experimental_enable_async_checkpoint`) fails with Keras 3, whose variables
make a tf.Variable inside of its tf.function.
"""

from typing import Any

import keras
import tensorflow as tf


class Snapshot:
    """The values that all variables below a tf.train.Checkpoint had when they were last taken.

    The copies hang on objects of their own, by the same names, so the files are those of the
    original. On CPUs a value is not copied when it is taken: TensorFlow lets both variables share
    it until the next step changes one of them, and copies it then.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, *, device: str) -> None:
        """Takes the values for the first time; the second set is on `device`."""
        self._pairs: list[tuple[Any, Any]] = []
        with tf.device(device):
            self._copy = self._copied(checkpoint)
        self._take = self._make_take()

    def take(self) -> None:
        """Sets all values to what they are now. Waits for devices and for parameter servers.

        Raises:
            tf.errors.UnavailableError: a parameter server is gone.
        """
        self._take()

    def write(self, prefix: str, options: tf.train.CheckpointOptions) -> None:
        """Writes what was taken to files that begin with `prefix`; no `take` may come meanwhile.

        Raises:
            OSError, tf.errors.OpError: a file cannot be written.
        """
        self._copy.write(prefix, options=options)

    def _copied(self, checkpoint: tf.train.Checkpoint) -> tf.train.Checkpoint:
        """The graph of objects below `checkpoint`, with other variables in it."""
        view = tf.train.TrackableView(checkpoint)
        # Kept, because an id says something only while its object lives.
        nodes = view.descendants()
        copies: dict[int, Any] = {}
        inner: list[Any] = []
        for node in nodes:
            if isinstance(node, keras.Variable | tf.Variable):
                copies[id(node)] = self._second(node)
            # Another one without children stands for itself: a lookup table is written as it is.
            elif view.children(node):
                copies[id(node)] = tf.train.Checkpoint()
                inner.append(node)
        for node in inner:
            for name, child in view.children(node).items():
                setattr(copies[id(node)], name, copies.get(id(child), child))
        return copies[id(checkpoint)]

    def _second(self, node: Any) -> Any:
        variable = node.value if isinstance(node, keras.Variable) else node
        name = variable.name.partition(":")[0]
        second = tf.Variable(variable.read_value(), trainable=False, name=name)
        self._pairs.append((variable, second))
        return second

    def _make_take(self) -> Any:
        # In one graph: parameter servers are read side by side.
        @tf.function
        def take() -> None:
            for variable, second in self._pairs:
                second.assign(variable.read_value())

        return take
