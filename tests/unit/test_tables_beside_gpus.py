"""Tables are on the CPU, once in a process, while a replica computes on another device.

The second logical CPU stands in for a GPU.
"""

from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels  # noqa: TID251

from data.tfrecord.split import Split
from strategies.mirrored import MirroredExecutor
from strategies.position import Position
from tests.unit.test_input_path import COMPUTE, READ, ComputesElsewhere, loop_body
from tests.unit.toy import BATCH, CLASSES, make_reader
from trainer.embeddings import ShardedEmbedding
from trainer.embeddings.optimizers import OPTIMIZERS
from trainer.learner import Learner
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.options import Options

OF_TABLES = ("ResourceGather", "ResourceSparse", "ResourceScatter", "Lookup", "Unique", "Mutex")


@pytest.fixture(autouse=True)
def _placement_is_strict() -> Iterator[None]:
    """An op that cannot be where it is placed is an error: it is not moved."""
    tf.config.set_soft_device_placement(False)
    yield
    tf.config.set_soft_device_placement(True)


def make_learner() -> Learner:
    """A table for each optimizer, and a table of dynamic ids."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,))
    ids = keras.ops.cast(keras.ops.abs(inputs) * 9, "int64")
    found = [ShardedEmbedding(60, 4, optimizer=name, l2=0.01)(ids) for name in OPTIMIZERS]
    found = [keras.layers.Flatten()(rows) for rows in found]
    found.append(ShardedEmbedding(None, 4, combiner="mean", max_rows=20)(ids))
    outputs = keras.layers.Dense(CLASSES)(keras.layers.Concatenate()(found))
    model = keras.Model(inputs, outputs)
    optimizer, loss = keras.optimizers.Adam(0.01), sparse_categorical_crossentropy
    options = Options(marks_changed_rows=True)
    return Learner(model, optimizer, loss, {}, batch_size=BATCH, options=options)


def started(
    kind: type[MirroredExecutor], device: str, split: Split
) -> tuple[MirroredExecutor, Learner]:
    executor, reader = kind.on([device]), make_reader(split)
    learner = executor.build(make_learner)
    executor.start(learner, reader, reader, Position())
    return executor, learner


def operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Those of `graph`, and of its branches and loops."""
    for op in graph.get_operations():
        yield op
        for name in ("then_branch", "else_branch", "body", "cond"):
            if name in op.node_def.attr:
                yield from operations(graph._get_function(op.get_attr(name).name).graph)


def has_gpu_kernel(op: tf.Operation) -> bool:
    """True if TensorFlow has a kernel of `op`, with its types, for GPUs or for any device."""
    return any(
        kernel.device_type in ("GPU", "DEFAULT")
        and all(
            op.node_def.attr[one.name].type in one.allowed_values.list.type
            for one in kernel.constraint
        )
        for kernel in kernels.get_registered_kernels_for_op(op.type).kernel
    )


def test_tables_and_all_that_they_compute_are_on_the_cpu(split: Split) -> None:
    executor, learner = started(ComputesElsewhere, COMPUTE, split)
    dense, tables = learner.variables[: learner.num_dense], learner.variables[learner.num_dense :]
    assert len(tables) == len(OPTIMIZERS) + 1
    slots = [part for rows in learner.state["table_slots"] for part in rows.parts]
    assert all(variable.device.endswith(READ) for variable in [*tables, *slots])
    for variable in dense:
        (copy,) = executor.strategy.experimental_local_results(variable)
        assert copy.device.endswith(COMPUTE)

    found = list(operations(loop_body(executor)))
    of_tables = [op for op in found if op.type.startswith(OF_TABLES)]
    assert {"ResourceGather", "ResourceSparseApplyFtrl", "LookupTableInsertV2"} <= {
        op.type for op in of_tables
    }
    assert [op.type for op in of_tables if not op.device.endswith(READ)] == []
    assert not all(map(has_gpu_kernel, of_tables)), "some exist for CPUs only"
    computing = [op for op in found if op.device.endswith(COMPUTE)]
    assert {"MatMul", "ResourceApplyAdam", "UnsortedSegmentSum"} <= {op.type for op in computing}
    assert {op.type for op in computing if not has_gpu_kernel(op)} == set()


@pytest.mark.slow
def test_device_of_the_replica_does_not_change_a_bit(split: Split) -> None:
    ends = []
    for kind, device in ((MirroredExecutor, READ), (ComputesElsewhere, COMPUTE)):
        executor, learner = started(kind, device, split)
        executor.run(12)
        assert learner.tables
        table = learner.tables[-1].table
        dynamic = table.index(), table.values_of(table.ids(table.index()))
        ends.append((learner.weights(), dynamic, executor.evaluate()["loss"]))
    tf.nest.map_structure(np.testing.assert_array_equal, *ends)
