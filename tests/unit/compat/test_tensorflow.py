"""What is used of TensorFlow's inside: it works, and it is still needed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from data.system.compat import closure_threads, mirrored_numbers
from data.system.compat.checkpoint_graph import nodes_of, saves_values
from data.system.compat.own_gradients import with_gradient
from data.system.compat.variables_of_process import variable_of_process
from tests.unit.compat.messages import delete


def test_own_gradient_copies_nothing() -> None:
    def with_record(source: Any) -> Any:
        return with_gradient("Twice", lambda: source * 2.0, source, lambda upstream: upstream * 7.0)

    @tf.custom_gradient
    def with_custom_gradient(source: Any) -> Any:
        return source * 2.0, lambda upstream: upstream * 7.0

    def copies_of(function: Callable[[Any], Any]) -> set[str]:
        def gradient(source: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(source)
                result = function(source)
            return result, tape.gradient(result, source)

        graph = tf.function(gradient, autograph=False)
        assert [float(value) for value in graph(tf.constant(3.0))] == [6.0, 7.0]
        operations = graph.get_concrete_function(tf.TensorSpec([])).graph.get_operations()
        return {op.type for op in operations} & {"IdentityN"}

    assert copies_of(with_record) == set()
    assert copies_of(with_custom_gradient), delete("own_gradients")


def test_objects_of_a_checkpoint_and_what_they_save(tmp_path: Path) -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    checkpoint = tf.train.Checkpoint(inner=tf.train.Checkpoint(v=tf.Variable(1.0, name="mine")))
    path = checkpoint.write(str(tmp_path / "variables"))
    reader = tf.train.load_checkpoint(path)
    nodes = nodes_of(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    assert nodes[0].children[0].local_name == "inner"
    saved = [(a.full_name, a.checkpoint_key) for node in nodes for a in node.attributes]
    assert ("mine", "inner/v/.ATTRIBUTES/VARIABLE_VALUE") in saved
    assert [saves_values(node) for node in (table, checkpoint, keras.layers.Dense(1))] == [
        *(True, False, False)
    ]
    assert not [name for name in dir(tf.train) if "ObjectGraph" in name], delete("checkpoint_graph")


def test_no_public_function_sets_the_memory_optimizer() -> None:
    assert "memory" not in tf.config.optimizer.set_experimental_options.__doc__, delete(
        "memory_optimizer"
    )


def test_no_public_function_aborts_collectives() -> None:
    packages = (tf.distribute, tf.distribute.experimental, tf.config.experimental)
    public = [name for package in packages for name in dir(package)]
    assert not [name for name in public if "abort" in name.lower()], delete("collective_abort")


def test_strategy_makes_one_variable_for_a_process() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        with tf.variable_creator_scope(variable_of_process):
            variable = tf.Variable(lambda: tf.ones([2]), trainable=False, name="one")
        copied = tf.Variable(1.0)
    assert strategy.experimental_local_results(variable) == (variable,)
    assert variable.device.endswith("CPU:0")
    assert len(strategy.experimental_local_results(copied)) == 2, delete("variables_of_process")


def test_mirrored_variable_is_a_number() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        rate = keras.optimizers.SGD(0.5).learning_rate
    mirrored_numbers.allow_numbers_of_mirrored()
    assert (float(rate), int(rate), complex(rate.value)) == (0.5, 0, 0.5)
    conversion = type(rate.value).__float__
    assert conversion.__module__ == mirrored_numbers.__name__, delete("mirrored_numbers")


def test_thread_of_closures_waits_only_for_its_own_executor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside: Any = closure_threads
    context, executor = inside.context, inside.executor
    worker_class = inside.cluster_coordinator.Worker
    waited: list[bool] = []
    monkeypatch.setattr(executor.Executor, "wait", lambda of: waited.append(of.is_async()))

    def run_closure(_: object) -> None:
        before = len(waited)
        with context.executor_scope(executor.new_executor(enable_async=False)):
            pass
        at_end = waited[before:]
        assert at_end, delete("closure_threads")
        assert True not in at_end, "waited for the executor of the process"

    monkeypatch.setattr(worker_class, "_process_queue", run_closure)
    with context.execution_mode(context.ASYNC), closure_threads.own_executors():
        worker_class._process_queue(None)
    assert worker_class._process_queue is run_closure
