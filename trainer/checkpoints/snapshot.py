"""A copy of all variables, which another thread writes to disk while training continues.

    snapshot = Snapshot(checkpoint_of(learner), device="CPU:0")
    snapshot.take()                             # copies the values; no step may be in flight
    snapshot.write("path/variables", options)   # on any thread; the files of Checkpoint.write

TensorFlow's asynchronous checkpoints (`experimental_enable_async_checkpoint`) fail with Keras 3,
whose variables create a tf.Variable inside the tf.function that copies.
"""

import keras
import tensorflow as tf

from data.system.compat.checkpoint_graph import saves_values
from trainer.learner import Learner
from trainer.learner.variables import SplitVariable, saved_arrays


def checkpoint_of(learner: Learner) -> tf.train.Checkpoint:
    """Returns the objects that a checkpoint saves, without tables, which have their own files."""
    state = {
        name: [v for v in variables if not isinstance(v, SplitVariable)]
        for name, variables in learner.state.items()
    }
    checkpoint = tf.train.Checkpoint(model=learner.model, optimizer=learner.optimizer, **state)
    reached = {id(node) for node in tf.train.TrackableView(checkpoint).descendants()}
    # keras.random.SeedGenerator is not a Trackable: the state of dropout would be left out.
    checkpoint.missed = {
        str(index): variable
        for index, variable in enumerate(saved_arrays(learner.model))
        if not isinstance(variable, SplitVariable)
        and id(variable) not in reached
        and id(getattr(variable, "value", None)) not in reached
    }
    return checkpoint


def tensorflow_variables(checkpoint: tf.train.Checkpoint) -> list[tf.Variable]:
    """The variables below `checkpoint`, each once.

    Empty if a checkpoint has something else, too, such as a lookup table that changes.
    """
    found: dict[int, tf.Variable] = {}
    for node in tf.train.TrackableView(checkpoint).descendants():
        if isinstance(node, keras.Variable | tf.Variable):
            # `value` of a tf.Variable is a method.
            own = node.value if isinstance(node, keras.Variable) else node
            found[id(own)] = own
        elif saves_values(node):
            return []
    return list(found.values())


class Snapshot:
    """Copies of all variables below a tf.train.Checkpoint, on `device`.

    They have the names of the original, and so the same files. On a CPU `take` is cheap: both
    variables share one buffer, which TensorFlow copies when a step changes one (copy on write).
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, *, device: str) -> None:
        self._pairs: list[tuple[tf.Variable, tf.Variable]] = []  # (original, copy)
        with tf.device(device):
            self._copy = self._copy_graph(checkpoint)
        # Now, not in the first `take`: under ps all tasks must answer meanwhile.
        self.take.get_concrete_function()

    # In one graph, so that parameter servers are read in parallel.
    @tf.function(autograph=False)
    def take(self) -> None:
        """Copies the current values. Waits for devices and for parameter servers.

        Raises tf.errors.UnavailableError if a parameter server was lost.
        """
        for variable, copy in self._pairs:
            copy.assign(variable.read_value())

    def write(self, prefix: str, options: tf.train.CheckpointOptions) -> None:
        """Writes the copies to files that begin with `prefix`. Do not call `take` meanwhile.

        Raises OSError or tf.errors.OpError if a file cannot be written.
        """
        self._copy.write(prefix, options=options)

    def _copy_graph(self, checkpoint: tf.train.Checkpoint) -> tf.train.Checkpoint:
        view = tf.train.TrackableView(checkpoint)
        # Holds a reference to each node: an id is unique only while its object lives.
        nodes = view.descendants()
        copies: dict[int, tf.Variable | tf.train.Checkpoint] = {}
        inner = []
        for node in nodes:
            if isinstance(node, keras.Variable | tf.Variable):
                variable = node.value if isinstance(node, keras.Variable) else node
                name = variable.name.partition(":")[0]
                copy = tf.Variable(variable.read_value(), trainable=False, name=name)
                self._pairs.append((variable, copy))
                copies[id(node)] = copy
            # Other leaves are not copied: a lookup table is written as it is.
            elif view.children(node):
                copies[id(node)] = tf.train.Checkpoint()
                inner.append(node)
        for node in inner:
            for name, child in view.children(node).items():
                setattr(copies[id(node)], name, copies.get(id(child), child))
        return copies[id(checkpoint)]
