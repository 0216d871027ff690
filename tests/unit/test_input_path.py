"""The way of a batch from memory or disk to the device that computes, read from the graph."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels  # noqa: TID251

from strategies.mirrored import MirroredExecutor
from strategies.position import Position
from tests.unit.comparing import assert_close, assert_same
from tests.unit.replicas import ancestors
from tests.unit.test_config_file import COMPLETE, written
from trainer.config import load_recipe
from trainer.inputs import open_inputs
from trainer.learner import Learner
from trainer.session import build_session

READ, COMPUTE = "/device:CPU:0", "/device:CPU:1"
AUGMENT = """
    def augment(images, labels, seeds):
        import tensorflow as tf
        return images + tf.cast(seeds[:, :1, None, None] % 7, tf.float32), labels
"""


class ComputesElsewhere(MirroredExecutor):
    """Its replica is on the second CPU, which stands in for a GPU."""

    _has_gpus = True


def started(
    kind: type[MirroredExecutor], path: str, data: Path, cached: bool
) -> tuple[MirroredExecutor, Learner]:
    recipe = load_recipe(path)
    recipe.config.data_dir = str(data)
    recipe.config.data.cache_bytes = cached << 30
    executor = kind.on([COMPUTE if kind is ComputesElsewhere else READ])
    inputs, _, learner = build_session(recipe, open_inputs(recipe), executor.build)
    executor.start(learner, inputs.train, inputs.evaluation, Position())
    return executor, learner


def loop_body(executor: MirroredExecutor) -> tf.Graph:
    graph = executor._run_in_graph.get_concrete_function().graph
    (loop,) = (op for op in graph.get_operations() if op.type == "While")
    return graph._get_function(loop.get_attr("body").name).graph


@pytest.fixture
def body(digits: Path, tmp_path: Path) -> tf.Graph:
    """The graph of a step on augmented batches that a GPU finishes."""
    path = written(tmp_path, COMPLETE + AUGMENT)
    return loop_body(started(ComputesElsewhere, path, digits, cached=True)[0])


def test_length_of_examples_may_differ_between_batches(digits: Path, tmp_path: Path) -> None:
    source = """
    def parse(serialized):
        import tensorflow as tf
        lengths = tf.strings.length(serialized)
        rows = tf.sequence_mask(lengths - 50, dtype=tf.float32)
        return rows, tf.zeros_like(lengths, tf.int64)

    def build_model(config):
        import keras
        inputs = keras.Input((None,))
        return keras.Model(inputs, keras.layers.Dense(2)(keras.ops.sum(inputs, 1, True)))
    """
    executor, _ = started(MirroredExecutor, written(tmp_path, COMPLETE + source), digits, False)
    executor.run(20)
    assert executor.position.next_batch == 20


def test_augmented_examples_are_the_same_in_a_compiled_step(digits: Path, tmp_path: Path) -> None:
    """XLA draws other numbers, and lacks this op."""
    augment = """
    def augment(images, labels, seeds):
        import tensorflow as tf
        images = tf.image.resize(images, (8, 8), "bicubic")
        return images + tf.random.stateless_uniform([], tf.cast(seeds[0], tf.int32)), labels
    """
    weights = []
    for compiles in (False, True):
        config = COMPLETE.replace("train_steps=3", f"train_steps=3, jit_compile={compiles}")
        path = written(tmp_path, config + augment, f"compiles{compiles}.py")
        executor, learner = started(MirroredExecutor, path, digits, cached=True)
        assert learner.compiles is compiles
        executor.run(3)
        weights.append(learner.weights())
    assert_close(*weights, atol=1e-5)


def users(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """The ops that compute with `tensor`."""
    for op in tensor.consumers():
        if op.type == "Identity":
            yield from users(op.outputs[0])
        else:
            yield op


def test_next_batch_is_copied_narrow_and_does_not_wait_for_the_step(body: tf.Graph) -> None:
    (last,) = (out for out in body.outputs if out.dtype == tf.uint8 and out.shape[0] == 8)
    # A loop's results wait for all changes of an iteration, but the copy in them does not.
    copy = last.op.inputs[0].op
    assert copy.type == "Identity"
    assert copy.device.endswith(COMPUTE)
    read = copy.inputs[0].op
    before = {read, *ancestors(read)}
    assert not any(op.device.endswith(COMPUTE) for op in before)
    changes = {op.type for op in body.get_operations() if "Apply" in op.type}
    assert changes, "the step changes variables in this graph"
    assert not changes & {op.type for op in before}
    (images,) = (t for t in body.inputs if t.dtype == tf.uint8 and t.shape[0] == 8)
    widening = list(users(images))
    assert widening
    assert all(op.device.endswith(COMPUTE) for op in widening), "widened where it is used"


def test_no_op_of_a_step_has_to_leave_the_gpu(body: tf.Graph) -> None:
    computing = {op.type for op in body.get_operations() if op.device.endswith(COMPUTE)}
    assert {"MatMul", "ResourceApplyAdam"} <= computing
    devices = {
        name: {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(name).kernel}
        for name in computing
    }
    # DEFAULT is any device. `from_bytes` has another op for GPUs, which this device is not.
    on_cpus = {name for name, found in devices.items() if found and not found & {"GPU", "DEFAULT"}}
    assert on_cpus == {"Dequantize"}


@pytest.mark.slow
@pytest.mark.parametrize("augment", [AUGMENT, ""], ids=["augmented", "plain"])
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "read"])
def test_equal_bits_wherever_batches_are_finished(
    digits: Path, tmp_path: Path, cached: bool, augment: str
) -> None:
    path = written(tmp_path, COMPLETE + augment)
    weights = []
    for kind in (MirroredExecutor, ComputesElsewhere):
        executor, learner = started(kind, path, digits, cached)
        executor.run(5)
        executor.run(8)
        weights.append(learner.weights())
        assert executor.position.next_batch == 13
    assert_same(*weights)
