"""Small sums of two workers are exchanged, with the same bits as the sums of a ring."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strategies.cluster.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]

# Each of two workers prints for each type and size: whether both sums are equal, whether something
# was added, and whether the graph has an exchange.
PROGRAM = """
import json, sys
import numpy as np
import tensorflow as tf

from strategies.cluster.tf_config import parse_hosts
from strategies.gradients.all_reduce import all_reduced
from strategies.gradients.compression import Compression
from strategies.multiworker import MultiWorkerExecutor

index, hosts = int(sys.argv[1]), sys.argv[2]
executor = MultiWorkerExecutor.connect(
    parse_hosts({"worker": hosts}, "worker", index, "multiworker"), "ring"
)
strategy, compression = executor.strategy, Compression()
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
            return all_reduced(parts, compression), context.all_reduce("sum", parts)
        return strategy.run(sums)

    ours, ring = both()
    ops = {op.type for op in both.get_concrete_function().graph.get_operations()}
    equal = all(
        np.array_equal(tf.cast(a, tf.float64), tf.cast(b, tf.float64)) and a.shape == b.shape
        for a, b in zip(ours, ring)
    )
    added = any(np.any(tf.cast(a, tf.float64) != tf.cast(b, tf.float64))
                for a, b in zip(ours, parts))
    return [bool(equal), bool(added), "CollectiveGatherV2" in ops]

found = {
    f"{dtype} {size}": compared(dtype, size)
    for dtype in ("float32", "float16", "bfloat16", "float64")
    for size in (7, 1 << 21)
}
executor.close()
print(json.dumps(found))
"""


@pytest.mark.timeout(200)
def test_two_workers_exchange_small_sums_with_the_bits_of_a_ring() -> None:
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
        for name, (equal, added, exchanged) in found.items():
            assert equal, f"{name}: not the bits of a ring"
            assert added, f"{name}: nothing was added"
            assert exchanged == name.endswith(" 7"), f"{name}: exchanged is {exchanged}"
