"""Ops that delay a worker. Python code does not run in a parameter-server worker, so ops do it."""

from typing import Any

import tensorflow as tf

Tensor = Any


def late(value: Tensor, delay_ms: int) -> Tensor:
    """Returns `value` after a delay. The dataset sleeps before its element and before its end."""
    variant = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(value)),
        sleep_microseconds=tf.constant(delay_ms * 500, tf.int64),
        output_types=[value.dtype],
        output_shapes=[value.shape],
    )
    element = tf.data.experimental.from_variant(variant, tf.TensorSpec(value.shape, value.dtype))
    return element.get_single_element()


def late_on_worker(index: int, value: Tensor, delay_ms: int) -> Tensor:
    """Returns `value`, after a delay if ps worker `index` runs the graph."""
    worker = this_worker()
    if worker is None:
        return value
    return tf.cond(
        tf.equal(worker, index), lambda: late(value, delay_ms), lambda: tf.identity(value)
    )


def this_worker() -> Tensor | None:
    """The index of the ps worker that will run the current graph; None for another strategy."""
    if not isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy):
        return None
    # The index is not available in a loop or a branch, so it is taken from the outermost graph.
    graph = tf.zeros([]).graph
    while (outer := getattr(graph, "outer_graph", None)) is not None and outer.building_function:
        graph = outer
    with graph.as_default():
        return tf.distribute.coordinator.experimental_get_current_worker_index()
