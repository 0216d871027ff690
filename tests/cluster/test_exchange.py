"""Small sums of two workers: the same bits as over a ring, and really not over one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strategies.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]

# What a worker of two prints: for each type and size whether both sums are alike, and whether the
# graph of the program's has an exchange.
PROGRAM = """
import json, sys
import numpy as np
import tensorflow as tf

from strategies.cluster import parse_hosts
from strategies.multiworker import MultiWorkerExecutor

index, hosts = int(sys.argv[1]), sys.argv[2]
executor = MultiWorkerExecutor.connect(
    parse_hosts({"worker": hosts}, "worker", index, "multiworker"), "ring", 60.0
)
strategy, wire = executor.strategy, executor._wire
random = np.random.default_rng(index)

def compared(dtype, size):
    parts = [
        tf.cast(tf.constant(random.normal(size=shape) * 10.0 ** random.integers(-3, 3)), dtype)
        for shape in ((), (3, 5), (size,))
    ]

    @tf.function
    def both():
        def sums():
            context = tf.distribute.get_replica_context()
            return wire.all_reduced(parts), context.all_reduce("sum", parts)
        return strategy.run(sums)

    ours, rings = both()
    ops = {op.type for op in both.get_concrete_function().graph.get_operations()}
    alike = all(
        np.array_equal(tf.cast(a, tf.float64), tf.cast(b, tf.float64)) and a.shape == b.shape
        for a, b in zip(ours, rings)
    )
    moved = any(np.any(tf.cast(a, tf.float64) != tf.cast(b, tf.float64))
                for a, b in zip(ours, parts))
    return [bool(alike), bool(moved), "CollectiveGatherV2" in ops]

found = {
    f"{dtype} {size}": compared(dtype, size)
    for dtype in ("float32", "float16", "bfloat16", "float64")
    for size in (7, 1 << 21)
}
executor.close()
print(json.dumps(found))
"""


@pytest.mark.timeout(200)
def test_two_workers_exchange_what_is_small_and_both_have_the_bits_of_a_ring() -> None:
    hosts = ",".join(f"localhost:{port}" for port in free_ports(2))
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(index), hosts],
            cwd=ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=150)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0]
    for output in outputs:
        found = json.loads(output.splitlines()[-1])
        assert len(found) == 8
        for name, (alike, moved, exchanged) in found.items():
            assert alike, f"{name}: other bits than a ring"
            assert moved, f"{name}: nothing was added"
            assert exchanged == name.endswith(" 7"), f"{name}: exchanged is {exchanged}"
