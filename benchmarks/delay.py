"""A slow worker, made in the graph: Python does not run in a worker of parameter servers."""

from typing import Any

import tensorflow as tf

Tensor = Any


def late(value: Tensor, delay_ms: int) -> Tensor:
    """`value`, later: the data set sleeps before its element and before its end."""
    variant = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(value)),
        sleep_microseconds=tf.constant(delay_ms * 500, tf.int64),
        output_types=[value.dtype],
        output_shapes=[value.shape],
    )
    element = tf.data.experimental.from_variant(variant, tf.TensorSpec(value.shape, value.dtype))
    return element.get_single_element()


def late_on_worker(index: int, value: Tensor, delay_ms: int) -> Tensor:
    """`value`, later if ps worker `index` runs the graph; at once on others, and in the chief."""
    worker = this_worker()
    if worker is None:
        return value
    return tf.cond(
        tf.equal(worker, index), lambda: late(value, delay_ms), lambda: tf.identity(value)
    )


def this_worker() -> Tensor | None:
    """The index of the ps worker that will run the graph that is made; None where it is none's."""
    if not isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy):
        return None
    # In a loop or a branch it cannot be had, but what is in the graph around it can be used.
    graph = tf.zeros([]).graph
    while (outer := getattr(graph, "outer_graph", None)) is not None and outer.building_function:
        graph = outer
    with graph.as_default():
        return tf.distribute.coordinator.experimental_get_current_worker_index()
