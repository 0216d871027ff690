"""TensorFlow 2's parameter-server tutorial: ClusterCoordinator and asynchronous workers.

    python -m benchmarks.peers.tf2_ps --mnist_source=DIRECTORY_WITH_THE_IDX_FILES

In its better form: 10 steps a closure, in `tf.range`. As in the tutorial, Keras' optimizer applies
each gradient; its step counter loses counts, so scheduled steps are counted here.
"""

import argparse
import json
import os
import tempfile
from typing import Any

from benchmarks.peers.common import (
    CONFIGS,
    Window,
    load_mnist,
    parser,
    print_result,
    run_tasks,
)
from strategies.cluster.ports import free_ports

_STEPS_PER_CLOSURE = 10


def work(
    job: str, index: int, answer: Any, options: argparse.Namespace, cluster: dict[str, list[str]]
) -> None:
    """Runs one process."""
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    task = {"type": job, "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})

    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if job == "chief":
        with tempfile.TemporaryDirectory() as directory:
            answer.send(coordinate(resolver, options, directory))
        return
    # With one inter-op thread too, the server would deadlock.
    one_thread = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
    server = tf.distribute.Server(
        resolver.cluster_spec(), job, index, protocol="grpc", config=one_thread
    )
    server.join()


def coordinate(resolver: Any, options: argparse.Namespace, directory: str) -> float:
    """Runs the chief; returns steps a second. Workers load the files in `directory` to memory."""
    import keras
    import tensorflow as tf

    from trainer.config import load_recipe

    recipe = load_recipe(CONFIGS["mlp"])
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = recipe.build_model(recipe.config)
        optimizer = keras.optimizers.Adam(recipe.config.learning_rate)
        optimizer.build(model.trainable_variables)
    images, labels = load_mnist(options.mnist_source)
    images.tofile(f"{directory}/images")
    labels.tofile(f"{directory}/labels")

    def dataset(context: Any) -> Any:
        read = tf.io.read_file
        images = tf.io.decode_raw(read(f"{directory}/images"), tf.float32)
        labels = tf.io.decode_raw(read(f"{directory}/labels"), tf.int64)
        size = options.batch_size
        batches = tf.reshape(images, [-1, size, 28, 28, 1]), tf.reshape(labels, [-1, size])
        return tf.data.Dataset.from_tensor_slices(batches).shuffle(1000).repeat().prefetch(4)

    @tf.function
    def per_worker() -> Any:
        return strategy.distribute_datasets_from_function(dataset)

    def replica_step(images: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def steps(iterator: Any) -> None:
        for _ in tf.range(_STEPS_PER_CLOSURE):
            strategy.run(replica_step, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(per_worker))
    window, done = Window(options), 0
    # So many closures at a time that the wait for the last closure does not matter.
    closures = max(1, options.warmup_steps // _STEPS_PER_CLOSURE)
    while True:
        for _ in range(closures):
            coordinator.schedule(steps, args=(iterator,))
        coordinator.join()
        done += closures * _STEPS_PER_CLOSURE
        if window.is_over(done):
            return window.rate


def main() -> None:
    """Prints the rate."""
    flags = parser(__doc__, 100)
    flags.add_argument("--workers", type=int, default=2)
    options = flags.parse_args()
    hosts = [f"localhost:{port}" for port in free_ports(2 + options.workers)]
    cluster = {"chief": hosts[:1], "ps": hosts[1:2], "worker": hosts[2:]}
    tasks = [(job, index) for job, known in cluster.items() for index in range(len(known))]
    print_result("steps_per_sec", run_tasks(work, tasks, options, cluster))


if __name__ == "__main__":
    main()
