"""float(), int() and complex() of a variable that has a copy on each replica.

    allow_numbers_of_mirrored()
    float(optimizer.learning_rate)      # made in the scope of a strategy

Callbacks of Keras users do this. Keras asks the variable of TensorFlow: `tf.Variable` has these,
but `DistributedVariable` of TensorFlow 2.21 (`tensorflow/python/distribute/values.py`) lacks them,
which is a TypeError. Can be deleted when it has them.
"""

from tensorflow.python.distribute.values import DistributedVariable


def allow_numbers_of_mirrored() -> None:
    """Gives the methods to the class, for the whole process, unless it has them."""
    for kind in (float, int, complex):
        if not hasattr(DistributedVariable, name := f"__{kind.__name__}__"):
            setattr(DistributedVariable, name, lambda self, kind=kind: kind(self.numpy()))
