"""Two workers sum gradients in buckets, with the bits of one ring, while they still compute."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strategies.cluster.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]

# Each of two workers prints for each type, size and bucket size: whether both sums are equal,
# whether something was added, and the ops of the sums. Then, for a step with and without clipping
# by the global norm, and for a step as the executor makes it: for each bucket in their order, the
# number of matrix products that its sum waits for; the number of all matrix products; and for each
# update the number of sums it waits for.
PROGRAM = """
import json, math, sys
import keras
import numpy as np
import tensorflow as tf

from strategies.cluster.tf_config import parse_hosts
from strategies.gradients.all_reduce import TOTALS_KEY, all_reduced, summed_with_key
from strategies.gradients.compression import Compression
from strategies.multiworker import MultiWorkerExecutor
from strategies.step_marks import StepMarks
from strategies.transfer import Transfer
from tests.unit.replicas import ancestors
from trainer.learner import Learner
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.options import ClipConfig, Options, WeightDecayConfig

index, hosts = int(sys.argv[1]), sys.argv[2]
executor = MultiWorkerExecutor.connect(
    parse_hosts({"worker": hosts}, "worker", index, "multiworker"), Transfer("ring")
)
strategy = executor.strategy
random = np.random.default_rng(index)
SUMS = ("CollectiveGatherV2", "CollectiveReduceV2")

def sums_in(function):
    return [op for op in function.get_concrete_function().graph.get_operations() if op.type in SUMS]

tf.get_logger().setLevel("ERROR")  # Each function below is traced once, on purpose.

def compared(dtype, size, bucket_bytes):
    parts = [
        tf.cast(tf.constant(random.normal(size=shape) * 10.0 ** random.integers(-3, 3)), dtype)
        for shape in ((), (3, 5), (size,), (2,))
    ]

    @tf.function
    def ours():
        return strategy.run(lambda: all_reduced(parts, bucket_bytes=bucket_bytes))

    @tf.function
    def ring():
        return strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce("sum", parts)
        )

    summed, expected = ours(), ring()
    equal = all(
        np.array_equal(tf.cast(a, tf.float64), tf.cast(b, tf.float64)) and a.shape == b.shape
        for a, b in zip(summed, expected)
    )
    added = any(np.any(tf.cast(a, tf.float64) != tf.cast(b, tf.float64))
                for a, b in zip(summed, parts))
    return [bool(equal), bool(added), [SUMS.index(op.type) for op in sums_in(ours)]]

def in_buckets(gradients):
    return all_reduced(gradients, Compression("bfloat16", 2), 256)

def by_executor(gradients):
    executor._bucket_bytes = 256
    assert executor._marks
    return executor._marks.begun(executor._all_reduced(gradients))

def waits(sums=in_buckets, **options):
    def make():
        layers = [keras.layers.Dense(8, use_bias=False) for _ in range(4)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        loss, optimizer = sparse_categorical_crossentropy, keras.optimizers.SGD(0.1)
        return Learner(model, optimizer, loss, {}, batch_size=4, options=Options(**options))

    learner = executor.build(make)
    executor._marks = StepMarks(strategy, learner.step, learner.forward_state)

    @tf.function
    def step():
        def of_replica():
            gradients, _ = learner.gradients((tf.ones([2, 8]), tf.constant([0, 1])))
            return learner.apply(sums(gradients))
        return strategy.run(of_replica)

    step()
    operations = step.get_concrete_function().graph.get_operations()
    count = lambda ops, *types: sum(op.type in types for op in ops)
    updates = [op for op in operations if op.type == "ResourceApplyGradientDescent"]
    return {
        "products": [count(ancestors(op), "MatMul") for op in sums_in(step)],
        "all products": count(operations, "MatMul"),
        "sums of sums": [count(ancestors(op), *SUMS) for op in sums_in(step)],
        "sums of updates": [count(ancestors(op), *SUMS) for op in updates],
        "sums of decays": [
            count(ancestors(op), *SUMS) for op in operations if op.type == "AssignSubVariableOp"
        ],
    }

found = {
    f"{dtype} {size} {bucket_bytes}": compared(dtype, size, bucket_bytes)
    for dtype in ("float32", "float16", "bfloat16", "float64")
    for size in (7, 1 << 21)
    for bucket_bytes in (math.inf, 16)
}
found["step"] = waits()
found["executor"] = waits(by_executor, weight_decay=WeightDecayConfig(rate=0.1))
found["clipped"] = waits(clip=ClipConfig(global_norm=1.0))

@tf.function
def totals():
    return summed_with_key(tf.ones([3]), executor.strategy, TOTALS_KEY)

found["keys"] = [op.inputs[3].op.type for op in sums_in(totals)]
executor.close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outputs() -> list[dict[str, Any]]:
    hosts = ",".join(f"localhost:{port}" for port in free_ports(2))
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(index), hosts],
            cwd=ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        printed = [worker.communicate(timeout=250)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in printed]


@pytest.mark.timeout(300)
def test_sums_have_the_bits_of_a_ring_in_buckets_of_any_size(outputs: list[dict[str, Any]]) -> None:
    exchange, ring = 0, 1
    for found in outputs:
        compared = {name: value for name, value in found.items() if " " in name}
        assert len(compared) == 16
        for name, (equal, added, ops) in compared.items():
            _, size, bucket_bytes = name.split()
            assert equal, f"{name}: not the bits of a ring"
            assert added, f"{name}: nothing was added"
            large = exchange if size == "7" else ring
            if bucket_bytes == "inf":
                assert ops == [large], name
            else:  # The last bucket has the first variables.
                assert large in ops, name
                assert exchange in ops, name
                assert len(ops) >= 3, name


@pytest.mark.timeout(300)
def test_a_sum_waits_only_for_its_gradients_and_an_update_only_for_its_sum(
    outputs: list[dict[str, Any]],
) -> None:
    for found in outputs:
        for step in (found["step"], found["executor"], found["clipped"]):
            products = step["products"]
            assert len(products) == 4
            assert products == sorted(set(products)), "a bucket waits for a later one"
            # Each layer is another product or two of the backward pass.
            assert products[0] < products[-1] - 2
            assert products[-1] <= step["all products"]
            assert step["sums of sums"] == [0] * 4
        assert found["step"]["sums of updates"] == [1] * 4
        # A step changes no variable before all sums have arrived.
        assert found["executor"]["sums of updates"] == [4] * 4
        assert found["executor"]["sums of decays"] == [4] * 4
        assert found["clipped"]["sums of updates"] == [4] * 4


@pytest.mark.timeout(300)
def test_sums_of_totals_use_one_key_in_all_calls(outputs: list[dict[str, Any]]) -> None:
    """TensorFlow keeps each key for ever, and makes a new one for each call of its own sums."""
    for found in outputs:
        assert found["keys"] == ["Const"]
