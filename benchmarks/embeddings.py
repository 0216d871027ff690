"""Bytes and steps/s of a ShardedEmbedding against its number of rows, and against TensorFlow's own.

    python -m benchmarks.embeddings --rows=100000,1000000,10000000

Each size trains in a process and a network namespace of its own: two parameter servers, one worker
and the chief are threads of that process, so the bytes on its loopback are those of all steps. All
sizes get the same ids, below the smallest number of rows. With `--kinds=dynamic` the table has
dynamic ids, and the number of rows is ignored. The peer is the same step with
ParameterServerStrategy's ShardedVariable, tf.nn.embedding_lookup and scatter_sub. Its input is
shuffled and batched by tf.data; `peer-ready` gets batches that were made before, and does no work
for its input.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH, BATCH, IDS_OF_EXAMPLE = 64, 4096, 4
NUM_PS, STEPS_PER_CALL = 2, 64
_STEPS_OF_CLOSURE = 16  # Of the peer; ours chooses it.
_WARM_UP_CALLS = 4  # Ours traces its graphs.


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (fields,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(fields[0])


def _measure(kind: str, rows: int, calls: int) -> dict[str, float]:
    """The steps/s and the bytes a step of `calls` calls after a warm-up."""
    kinds = {"ours": _ours, "ours-sync": _ours_synchronous, "dynamic": _dynamic}
    kinds |= {"peer": _peer, "peer-ready": _peer_with_ready_batches}
    run = kinds[kind](rows)
    for _ in range(_WARM_UP_CALLS):
        run()
    first, started = _loopback_bytes(), time.monotonic()
    for _ in range(calls):
        run()
    seconds, sent = time.monotonic() - started, _loopback_bytes() - first
    steps = calls * STEPS_PER_CALL
    return {"rows": rows, "steps_per_sec": steps / seconds, "bytes_per_step": sent / steps}


def _examples() -> list[bytes]:
    import numpy as np

    # Zipf: rank r has about 1/r of the probability; all below 100,000.
    random = np.random.default_rng(0)
    ids = np.exp(random.uniform(0, np.log(1e5), (8 * BATCH, IDS_OF_EXAMPLE))) - 1
    labels = random.integers(0, 2, (8 * BATCH, 1))
    return [row.tobytes() for row in np.concatenate([ids, labels], axis=1).astype(np.int32)]


def _cluster() -> Any:  # A Cluster and a resolver; both are imported late.
    import tensorflow as tf

    from strategies.cluster.tf_config import Task, local_cluster
    from strategies.ps.servers import start_server

    cluster = local_cluster("ps", 1, NUM_PS)
    for task in cluster.trainers:
        if task.job != "chief":
            start_server(cluster.for_task(task))
    chief = cluster.for_task(Task("chief", 0))
    os.environ["TF_CONFIG"] = chief.training_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return chief, resolver


def _ours(rows: int | None, *, is_synchronous: bool = False) -> Callable[[], None]:
    import tempfile

    import keras
    import tensorflow as tf

    from data.order import Order
    from data.reader import Reader
    from strategies.position import Position
    from strategies.ps.asynchronous import AsynchronousExecutor
    from strategies.ps.sync.executor import SynchronousExecutor
    from tests.shards import write_shards
    from trainer.embeddings import SGD, ShardedEmbedding
    from trainer.learner import Learner
    from trainer.step.losses import sparse_categorical_crossentropy

    examples = _examples()
    directory = tempfile.mkdtemp()
    split = write_shards(examples, directory, "ids", "train", 1, len(examples))

    def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.io.decode_raw(serialized, tf.int32, fixed_length=4 * (IDS_OF_EXAMPLE + 1))
        values = tf.reshape(values, [-1, IDS_OF_EXAMPLE + 1])
        return values[:, :-1], values[:, -1]

    order = Order(split.shard_lengths, split.chunk_examples, BATCH, BATCH, 4, 0, True)
    reader = Reader(split, order, parse, num_threads=1, cache_bytes=1 << 30)
    chief, resolver = _cluster()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    executor: AsynchronousExecutor | SynchronousExecutor
    if is_synchronous:
        executor = SynchronousExecutor(strategy, chief, 1)
    else:
        executor = AsynchronousExecutor(strategy, chief)

    def make() -> Learner:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((IDS_OF_EXAMPLE,), dtype="int32"),
                ShardedEmbedding(rows, WIDTH, optimizer=SGD(0.1)),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )
        loss = sparse_categorical_crossentropy
        return Learner(model, keras.optimizers.SGD(0.1), loss, {}, batch_size=BATCH)

    learner = executor.build(make)
    executor.start(learner, reader, reader, Position())

    def run() -> None:
        executor.run(STEPS_PER_CALL)

    return run


def _dynamic(_: int) -> Callable[[], None]:
    return _ours(None)


def _ours_synchronous(rows: int) -> Callable[[], None]:
    return _ours(rows, is_synchronous=True)


def _peer_with_ready_batches(rows: int) -> Callable[[], None]:
    return _peer(rows, has_ready_batches=True)


def _peer(rows: int, *, has_ready_batches: bool = False) -> Callable[[], None]:
    import keras
    import numpy as np
    import tensorflow as tf

    _, resolver = _cluster()
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(NUM_PS)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = tf.Variable(tf.random.uniform([rows, WIDTH], -0.05, 0.05), name="table")
        kernel = tf.Variable(tf.zeros([IDS_OF_EXAMPLE * WIDTH, 2]), name="kernel")
        bias = tf.Variable(tf.zeros([2]), name="bias")
    values = np.frombuffer(b"".join(_examples()), np.int32).reshape(-1, IDS_OF_EXAMPLE + 1)
    shards = list(table.variables)
    dense = [v for part in (kernel, bias) for v in getattr(part, "variables", [part])]
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def make_dataset() -> tf.data.Dataset:
        if has_ready_batches:
            batches = values.reshape(-1, BATCH, values.shape[1])
            ready = tf.data.Dataset.from_tensor_slices((batches[..., :-1], batches[..., -1]))
            return ready.repeat().prefetch(4)
        rows_of = tf.data.Dataset.from_tensor_slices((values[:, :-1], values[:, -1]))
        return rows_of.shuffle(len(values)).repeat().batch(BATCH, drop_remainder=True).prefetch(4)

    iterator = iter(coordinator.create_per_worker_dataset(make_dataset))

    @tf.function
    def steps(batches: Any) -> tf.Tensor:
        def step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            ids, labels = batch
            with tf.GradientTape() as tape:
                found = tf.nn.embedding_lookup(table, ids)
                hidden = tf.reshape(found, [BATCH, IDS_OF_EXAMPLE * WIDTH])
                logits = tf.matmul(hidden, tf.convert_to_tensor(kernel)) + tf.convert_to_tensor(
                    bias
                )
                loss = loss_of(labels, logits)
            gradients = tape.gradient(loss, [*shards, *dense])
            for variable, gradient in zip([*shards, *dense], gradients, strict=True):
                if isinstance(gradient, tf.IndexedSlices):
                    scaled = tf.IndexedSlices(0.1 * gradient.values, gradient.indices)
                    variable.scatter_sub(scaled)
                else:
                    variable.assign_sub(0.1 * gradient)
            return loss

        total = tf.constant(0.0)
        for _ in tf.range(_STEPS_OF_CLOSURE):
            total += strategy.run(step, args=(next(batches),))
        return total

    def run() -> None:
        for _ in range(STEPS_PER_CALL // _STEPS_OF_CLOSURE):
            coordinator.schedule(steps, args=(iterator,))
        coordinator.join()

    return run


def main() -> None:
    """Prints a line of JSON for each measurement; kinds and sizes in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="100000,1000000,10000000")
    parser.add_argument("--kinds", default="ours,ours-sync,peer,peer-ready")
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", default="")
    arguments = parser.parse_args()
    if arguments.one:
        kind, rows = arguments.one.split(",")
        print(json.dumps(_measure(kind, int(rows), arguments.calls)), flush=True)
        os._exit(0)  # Servers cannot be stopped.
    inside = "ip link set lo up && exec " + sys.executable + " -m benchmarks.embeddings"
    for _ in range(arguments.rounds):
        for kind in arguments.kinds.split(","):
            for rows in arguments.rows.split(","):
                command = f"{inside} --one={kind},{rows} --calls={arguments.calls}"
                isolated = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", command]
                found = subprocess.run(isolated, capture_output=True, text=True, check=False)
                lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
                print(f"{kind:10s}", lines[-1] if lines else found.stderr[-2000:], flush=True)


if __name__ == "__main__":
    main()
