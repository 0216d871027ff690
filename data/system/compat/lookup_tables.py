"""Lookup tables of layers such as StringLookup, inside branches and loops of a worker's graph.

    capture_outside_of_branches()       # once in the chief, before the first graph is traced

ParameterServerStrategy keeps a copy of each static table on every worker. A graph captures the copy
of its worker when it is called. TensorFlow makes this capture in the graph that is being traced:
if that is a branch of `tf.cond` or the body of a loop, no call gives it a value ("You must feed a
value for placeholder tensor"). Here the outermost graph captures the table. Branches capture the
result, as they capture any other tensor. Seen with TensorFlow 2.21, `ps_values.py`. Can be deleted
when a worker looks up words inside of `tf.cond` without it.
"""

import tensorflow as tf
from tensorflow.python.distribute.ps_values import DistributedTable

_STOCK = DistributedTable.resource_handle


def capture_outside_of_branches() -> None:
    """Changes how DistributedTable captures its table, for this process."""
    DistributedTable.resource_handle = property(_resource_handle)


def _resource_handle(table: DistributedTable) -> tf.Tensor:
    if tf.executing_eagerly():
        return _STOCK.fget(table)
    with _outermost_graph().as_default():
        return _STOCK.fget(table)


def _outermost_graph() -> tf.Graph:
    graph = tf.zeros([]).graph  # The graph that is being traced.
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
    return graph
