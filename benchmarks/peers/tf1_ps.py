r"""A TensorFlow 1 program: sessions, between-graph replication, parameter servers.

    python -m benchmarks.peers.tf1_ps --mnist_source=DIRECTORY_WITH_THE_IDX_FILES [--sync_replicas]
    python -m benchmarks.peers.tf1_ps --model=deep --task=ps:0 \
        --hosts='{"ps": ["10.0.0.3:2222"], "worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}'

Like TensorFlow 1's distributed MNIST example: `replica_device_setter`, a Supervisor's session,
batches fed from NumPy; with `--sync_replicas` SyncReplicasOptimizer. Hidden layer of 100, Adam at
0.01. `--model=deep` trains the perceptron of benchmarks/deep.py with SGD on random images. With
`--task` this process is one task, and the others are on other hosts; worker 0 prints the rate and
ends, the others run until they are killed. The rate counts global steps: one for each gradient, or
for each sum of all workers.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from typing import Any

from benchmarks.peers.common import (
    Window,
    batches_of,
    load_mnist,
    parser,
    print_result,
    random_images,
    run_tasks,
)
from strategies.cluster.ports import free_ports


def work(
    job: str, index: int, answer: Any, options: argparse.Namespace, cluster: dict[str, list[str]]
) -> None:
    """Runs one process of a cluster on this machine."""

    def send(rate: float) -> None:
        answer.send(rate)
        answer.close()

    run_task(job, index, options, cluster, send)


def run_task(
    job: str,
    index: int,
    options: argparse.Namespace,
    cluster: dict[str, list[str]],
    on_rate: Callable[[float], None],
) -> None:
    """Runs one task; worker 0 calls `on_rate` with its steps/s, and returns after it."""
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    threads = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    server = tf.train.Server(cluster, job_name=job, task_index=index, config=threads)
    if job == "ps":
        server.join()
    worker = f"/job:worker/task:{index}"
    with tf.device(tf.train.replica_device_setter(cluster=cluster, worker_device=worker)):
        global_step = tf.train.get_or_create_global_step()
        images = tf.placeholder(tf.float32, [None, 784])
        labels = tf.placeholder(tf.int64, [None])
        is_deep = options.model == "deep"
        widths = [784, *[1024] * 12, 10] if is_deep else [784, 100, 10]
        outputs = images
        for layer, (rows, columns) in enumerate(itertools.pairwise(widths)):
            weights = tf.get_variable(f"w{layer}", [rows, columns])
            outputs = (tf.nn.relu(outputs) if layer else outputs) @ weights
            outputs += tf.get_variable(f"b{layer}", [columns])
        loss = tf.losses.sparse_softmax_cross_entropy(labels, outputs)
        optimizer = tf.train.AdamOptimizer(0.01)
        if is_deep:
            optimizer = tf.train.GradientDescentOptimizer(0.001)
        if options.sync_replicas:
            optimizer = tf.train.SyncReplicasOptimizer(
                optimizer, options.workers, total_num_replicas=options.workers
            )
        train = optimizer.minimize(loss, global_step=global_step)
    is_chief = index == 0
    more = {}
    if options.sync_replicas:
        more["local_init_op"] = optimizer.local_step_init_op
        if is_chief:
            more["local_init_op"] = optimizer.chief_init_op
            queue_runner, tokens = (
                optimizer.get_chief_queue_runner(),
                optimizer.get_init_tokens_op(),
            )
        more["ready_for_local_init_op"] = optimizer.ready_for_local_init_op
    supervisor = tf.train.Supervisor(
        is_chief=is_chief,
        init_op=tf.global_variables_initializer(),
        global_step=global_step,
        recovery_wait_secs=1,
        summary_op=None,
        saver=None,
        **more,
    )
    session = supervisor.prepare_or_wait_for_session(server.target, config=threads)
    if options.sync_replicas and is_chief:
        session.run(tokens)
        supervisor.start_queue_runners(session, [queue_runner])
    arrays = random_images(2 * options.batch_size) if is_deep else load_mnist(options.mnist_source)
    batches = batches_of(arrays, options.batch_size)
    window, number = Window(options), index
    while True:
        number = (number + options.workers) % len(batches[1])
        feed = {images: batches[0][number], labels: batches[1][number]}
        _, step = session.run([train, global_step], feed)
        # The other workers run until they are killed, so this worker never runs alone.
        if is_chief and window.is_over(int(step)):
            on_rate(window.rate)
            return


def main() -> None:
    """Prints the rate."""
    flags = parser(__doc__, 100)
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--sync_replicas", action="store_true")
    flags.add_argument("--model", choices=("mlp", "deep"), default="mlp")
    flags.add_argument("--task", help="This task, such as worker:0, with --hosts.")
    flags.add_argument("--hosts", help="JSON: the addresses of the jobs ps and worker.")
    options = flags.parse_args()
    if options.task:
        job, index = options.task.split(":")
        options.workers = len(json.loads(options.hosts)["worker"])

        def print_rate(rate: float) -> None:
            print_result("steps_per_sec", rate)

        run_task(job, int(index), options, json.loads(options.hosts), print_rate)
        return
    ports = free_ports(1 + options.workers)
    hosts = [f"localhost:{port}" for port in ports]
    cluster = {"ps": hosts[:1], "worker": hosts[1:]}
    tasks = [("ps", 0), *(("worker", index) for index in range(options.workers))]
    print_result("steps_per_sec", run_tasks(work, tasks, options, cluster))


if __name__ == "__main__":
    main()
