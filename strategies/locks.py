"""A lock on one device, held by ops of a graph; servers use it against updates at the same time.

    locks = make_locks("applying")                  # on the current device
    held = take(locks, [gradient])                  # waits for `gradient`, then for the lock
    with tf.control_dependencies(held):
        done = ...
    with tf.control_dependencies([free(held, done)]):
        ...

TensorFlow frees a lock with the graph that holds it, however that ends. It also frees a lock when
an op that waits for it is cancelled, which happens when a worker ends. The next op then waits for a
second lock. Two graphs hold both only if several workers end while others wait.
"""

import uuid
from collections.abc import Sequence

import tensorflow as tf

from data.system.compat.autograph import no_autograph


def make_locks(name: str) -> list[tf.Tensor]:
    """Makes the two locks on the current device: resources with a unique name."""
    unique = f"{name}-{uuid.uuid4().hex}"
    return [tf.raw_ops.MutexV2(shared_name=f"{unique}-{i}") for i in range(2)]


@no_autograph
def take(locks: Sequence[tf.Tensor], waited_for: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Takes the locks when `waited_for` are computed; ops that depend on the result hold them."""
    held: list[tf.Tensor] = []
    for lock in locks:
        with tf.control_dependencies(list(waited_for)):
            held.append(tf.raw_ops.MutexLock(mutex=lock))
        waited_for = held[-1:]
    return held


@no_autograph
def free(held: Sequence[tf.Tensor], done: tf.Tensor | tf.Operation) -> tf.Operation:
    """Frees the locks when `done` is computed; returns the op that frees the last one."""
    for lock in reversed(held):
        with tf.control_dependencies([done]):
            done = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    return done
