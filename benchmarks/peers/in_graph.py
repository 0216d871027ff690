"""One process, its loop in one graph, written by hand: the limit for one process.

    python -m benchmarks.peers.in_graph --model=mlp --mnist_source=DIRECTORY_WITH_THE_IDX_FILES

The network is that of the project's config, and its maths functions of tensors, so that XLA can
have gradient and update in one piece. (The loop itself compiled too was many times slower.) Nothing
is augmented: `--model=resnet20` reads random images.
"""

import functools
from typing import Any

import numpy as np

from benchmarks.peers.common import (
    CONFIGS,
    Arrays,
    Window,
    batches_of,
    load_mnist,
    parser,
    print_result,
)

_NUM_RANDOM = 1280


def main() -> None:
    """Prints the rate."""
    flags = parser(__doc__, 100)
    flags.add_argument("--model", choices=CONFIGS, default="mlp")
    flags.add_argument("--xla", type=int, choices=(0, 1), default=1, help="Whether XLA compiles.")
    flags.add_argument("--steps_per_call", type=int, default=50, help="Steps in one graph.")
    flags.add_argument("--num_threads", type=int, default=0, help="0: TensorFlow chooses.")
    options = flags.parse_args()

    import tensorflow as tf

    from trainer.config import load_recipe

    tf.config.threading.set_intra_op_parallelism_threads(options.num_threads)
    tf.config.threading.set_inter_op_parallelism_threads(options.num_threads)
    recipe = load_recipe(CONFIGS[options.model])
    model = recipe.build_model(recipe.config)
    rate, l2 = recipe.config.learning_rate, recipe.config.penalty.l2

    def adam(values: Any, gradients: Any, slots: Any) -> Any:
        count, means, squares = slots
        count += 1.0
        means = [m + 0.1 * (g - m) for m, g in zip(means, gradients, strict=True)]
        squares = [s + 0.001 * (g * g - s) for s, g in zip(squares, gradients, strict=True)]
        scale = rate * tf.sqrt(1 - tf.pow(0.999, count)) / (1 - tf.pow(0.9, count))
        moved = zip(values, means, squares, strict=True)
        return [v - scale * m / (tf.sqrt(s) + 1e-7) for v, m, s in moved], (count, means, squares)

    def momentum(values: Any, gradients: Any, slots: Any) -> Any:
        count, speeds, squares = slots
        speeds = [0.9 * s - rate * g for s, g in zip(speeds, gradients, strict=True)]
        return [v + s for v, s in zip(values, speeds, strict=True)], (count, speeds, squares)

    update = momentum if recipe.build_optimizer else adam

    def step(state: Any, images: Any, labels: Any) -> Any:
        trainable, others, slots = state
        with tf.GradientTape() as tape:
            tape.watch(trainable)
            logits, others = model.stateless_call(trainable, others, images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
            if l2:
                loss += l2 * tf.add_n([tf.reduce_sum(tf.square(weights)) for weights in trainable])
        trainable, slots = update(trainable, tape.gradient(loss, trainable), slots)
        return trainable, others, slots

    if options.xla:
        step = tf.function(step, jit_compile=True, autograph=False)

    @tf.function
    def run(state: Any, images: Any, labels: Any, first: Any) -> Any:
        for number in tf.range(options.steps_per_call):
            batch = (first + number) % tf.shape(images)[0]
            state = step(state, images[batch], labels[batch])
        return state

    trainable = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
    others = [tf.convert_to_tensor(v.value) for v in model.non_trainable_variables]
    zeros = [tf.zeros_like(value) for value in trainable]
    state: Any = (trainable, others, (tf.constant(0.0), zeros, zeros))
    images, labels = batches_of(_arrays(options, model.input_shape[1:]), options.batch_size)
    run = functools.partial(run, images=tf.constant(images), labels=tf.constant(labels))
    window, done = Window(options), 0
    while True:
        state = run(state, first=tf.constant(done))
        done += options.steps_per_call
        state[0][0].numpy()
        if window.is_over(done):
            break
    print_result("steps_per_sec", window.rate)


def _arrays(options: Any, shape: tuple[int, ...]) -> Arrays:
    if options.model == "resnet20":
        random = np.random.default_rng(0)
        images = random.uniform(size=(_NUM_RANDOM, *shape)).astype(np.float32)
        return images, random.integers(0, 10, _NUM_RANDOM)
    images, labels = load_mnist(options.mnist_source)
    return images.reshape(-1, *shape), labels


if __name__ == "__main__":
    main()
