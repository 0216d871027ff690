"""Without config.virtual_replicas, the graph of a training step has none of its ops."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from strategies import mirrored
from strategies.gradients import parts
from strategies.gradients.compression import Compression
from strategies.mirrored import MirroredExecutor
from strategies.position import Position
from tests.unit.replicas import replicas
from tests.unit.test_worker_loop import Desk, _worker
from tests.unit.toy import BATCH, CLASSES, make_reader, write_split
from trainer.inputs import batch_at
from trainer.learner import Learner
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.options import Options

__all__ = ["_worker"]  # A fixture.

# config.micro_batches uses them, too.
SHARED = {parts.part_of_batch.__name__, parts.add_gradients.__name__}
OF_THE_MODE = {"parts.py", "rounded totals", "digests"}


def ops_of(graph: Any) -> Iterator[tf.Operation]:
    """The ops of a graph and of the functions that it calls."""
    for op in graph.get_operations():
        yield op
        for attribute in op.op_def.attr:
            if attribute.type == "func":
                yield from ops_of(graph._get_function(op.get_attr(attribute.name).name).graph)


def kinds(graph: Any) -> set[str]:
    """What a graph has of config.virtual_replicas."""
    found = set()
    for op in ops_of(graph):
        for frame in op.traceback or ():
            if frame.filename == parts.__file__ and frame.name not in SHARED:
                found.add("parts.py")
            if frame.name == parts.gradients_of_virtual_replicas.__name__:
                found.add("state of layers")
        if op.type == "Round":
            found.add("rounded totals")
        if op.type == "Bitcast" and op.outputs[0].dtype == tf.int32:
            found.add("digests")
    return found


def of_step(graph: Any, path: str) -> list[tf.Operation]:
    """The ops of a function `step` of the file `path`."""
    return [
        op
        for op in ops_of(graph)
        if any((f.filename, f.name) == (path, "step") for f in op.traceback or ())
    ]


def counts(ops: Sequence[tf.Operation]) -> Mapping[tuple[str, int], int]:
    """The number of ops of each type, by the number of ops that they wait for."""
    return Counter((op.type, len(op.control_inputs)) for op in ops)


def started(directory: Path, num_replicas: int, virtual_replicas: int) -> MirroredExecutor:
    """An executor of a model with a dense layer, a normalisation and its moving statistics."""

    def make() -> Learner:
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(CLASSES)]
        return Learner(
            keras.Sequential([keras.Input((3,)), *layers]),
            keras.optimizers.Adam(0.01),
            sparse_categorical_crossentropy,
            {},
            batch_size=BATCH,
            options=Options(virtual_replicas=virtual_replicas),
        )

    reader = make_reader(write_split(directory))
    executor = MirroredExecutor(replicas(num_replicas))
    executor.start(executor.build(make), reader, reader, Position())
    return executor


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_training_step_has_no_op_of_a_mode_that_is_off(num_replicas: int, tmp_path: Path) -> None:
    on, off = (
        started(tmp_path / str(number), num_replicas, number)._run_in_graph
        for number in (2 * num_replicas, 0)
    )
    assert kinds(on.get_concrete_function().graph) == {*OF_THE_MODE, "state of layers"}
    assert kinds(off.get_concrete_function().graph) == set()


def test_training_step_of_one_replica_has_only_the_ops_of_the_learner_and_a_sum(
    tmp_path: Path,
) -> None:
    executor = started(tmp_path, 1, 0)
    learner = executor._learner
    graph = executor._run_in_graph.get_concrete_function().graph

    @tf.function(autograph=False)
    def alone(totals: tf.Tensor, batch: Any) -> tf.Tensor:
        def step(totals: tf.Tensor, batch: Any) -> tf.Tensor:
            gradients, metrics = learner.gradients(batch)
            learner.apply(gradients)
            return totals + metrics

        return executor.strategy.run(step, args=(totals, batch))

    totals = tf.zeros([learner.num_totals], tf.float64)
    batch = batch_at(executor._source, 0)
    reference = alone.get_concrete_function(totals, batch).graph
    expected = counts(of_step(reference, __file__))
    assert expected["MatMul", 0] > 0  # The origins of ops are known.
    assert counts(of_step(graph, mirrored.__file__)) == expected


@pytest.mark.parametrize("num_unrolled", [1, 4])
def test_worker_loop_has_no_op_of_a_mode_that_is_off(num_unrolled: int) -> None:
    on, off = (
        Desk(num_unrolled, Compression(), number).loop.closure.function.get_concrete_function()
        for number in (2, 0)
    )
    assert kinds(on.graph) >= OF_THE_MODE
    assert not kinds(off.graph) & OF_THE_MODE
