"""The graph of objects in TensorFlow's checkpoints, and which objects save something of their own.

The format is stable (`trackable_object_graph.proto`), but TensorFlow 2.21 has no public name for
the message, nor for what a Trackable saves. Can be deleted when `tf.train` has both.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

Node: TypeAlias = TrackableObjectGraph.TrackableObject


def nodes_of(graph: bytes) -> Sequence[Node]:
    """The objects of a checkpoint, of its tensor `_CHECKPOINTABLE_OBJECT_GRAPH`."""
    return list(TrackableObjectGraph.FromString(graph).nodes)


def saves_values(node: Any) -> bool:
    """Returns True if `node` itself has values in a checkpoint, as a lookup table has."""
    base = tf.__internal__.tracking.Trackable
    return type(node)._serialize_to_tensors is not base._serialize_to_tensors
