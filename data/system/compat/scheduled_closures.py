"""Traces a function as `ClusterCoordinator.schedule` would, without sending it to a worker.

Outside `schedule` TensorFlow 2.21 (`parameter_server_strategy_v2.py`) warns for each `strategy.run`
under ParameterServerStrategy. Can be deleted when it no longer warns.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def as_scheduled(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Within it, `strategy.run` prints no warning."""
    extended = strategy.extended
    extended._being_scheduled = True
    try:
        yield
    finally:
        extended._being_scheduled = False
