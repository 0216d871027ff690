"""Without config.virtual_replicas, the graph of a training step has none of its ops."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from strategies.gradients import layer_state, parts
from strategies.gradients.compression import Compression
from strategies.mirrored import MirroredExecutor
from strategies.position import Position
from tests.unit.replicas import replicas
from tests.unit.test_worker_loop import Desk, _worker
from tests.unit.toy import BATCH, CLASSES, make_reader, write_split
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
            if frame.name == layer_state.gradients_of_virtual_replicas.__name__:
                found.add("layer_state.py")
        if op.type == "Round":
            found.add("rounded totals")
        if op.type == "Bitcast" and op.outputs[0].dtype == tf.int32:
            found.add("digests")
    return found


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
    assert kinds(on.get_concrete_function().graph) == {*OF_THE_MODE, "layer_state.py"}
    assert kinds(off.get_concrete_function().graph) == set()


@pytest.mark.parametrize("num_unrolled", [1, 4])
def test_worker_loop_has_no_op_of_a_mode_that_is_off(num_unrolled: int) -> None:
    on, off = (
        Desk(num_unrolled, Compression(), number).loop.graph.get_concrete_function()
        for number in (2, 0)
    )
    assert kinds(on.graph) >= OF_THE_MODE
    assert not kinds(off.graph) & OF_THE_MODE
