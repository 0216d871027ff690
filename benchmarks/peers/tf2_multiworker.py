"""TensorFlow 2's multi-worker tutorial: MultiWorkerMirroredStrategy, a ring, a loop in the graph.

python -m benchmarks.peers.tf2_multiworker --mnist_source=DIRECTORY_WITH_THE_IDX_FILES
"""

import argparse
import json
import os
from typing import Any

from benchmarks.peers.common import (
    CONFIGS,
    Window,
    batches_of,
    load_mnist,
    parser,
    print_result,
    run_tasks,
)
from strategies.cluster.ports import free_ports

_STEPS_PER_CALL = 50


def work(
    job: str, index: int, answer: Any, options: argparse.Namespace, cluster: dict[str, list[str]]
) -> None:
    """Runs one process."""
    task = {"type": job, "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})

    import keras
    import tensorflow as tf

    from trainer.config import load_recipe

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
    )
    recipe = load_recipe(CONFIGS["mlp"])
    with strategy.scope():
        model = recipe.build_model(recipe.config)
        optimizer = keras.optimizers.Adam(recipe.config.learning_rate)
        optimizer.build(model.trainable_variables)
    images, labels = load_mnist(options.mnist_source)
    share = options.batch_size // options.workers
    batches = batches_of((images.reshape(-1, 28, 28, 1), labels), share)

    def dataset(context: Any) -> Any:
        batches_of_all = tf.data.Dataset.from_tensor_slices(batches)
        own = batches_of_all.shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.repeat().prefetch(4)

    def replica_step(images: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=options.batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def steps(iterator: Any) -> None:
        for _ in tf.range(_STEPS_PER_CALL):
            strategy.run(replica_step, args=next(iterator))

    iterator = iter(strategy.distribute_datasets_from_function(dataset))
    window, done = Window(options), 0
    while True:
        steps(iterator)
        done += _STEPS_PER_CALL
        # The others go on until they are ended.
        if window.is_over(done) and index == 0:
            answer.send(window.rate)
            answer.close()


def main() -> None:
    """Prints the rate."""
    flags = parser(__doc__, 200)
    flags.add_argument("--workers", type=int, default=2)
    options = flags.parse_args()
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(options.workers)]}
    tasks = [("worker", index) for index in range(options.workers)]
    print_result("steps_per_sec", run_tasks(work, tasks, options, cluster))


if __name__ == "__main__":
    main()
