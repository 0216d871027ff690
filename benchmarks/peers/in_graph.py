"""One process with its loop in one graph, written by hand: the limit for one process.

    python -m benchmarks.peers.in_graph --model=mlp --mnist_source=DIRECTORY_WITH_THE_IDX_FILES

The network is that of the project's config; the update is TensorFlow's fused op. `--xla=auto` tries
what XLA should compile: nothing, the gradient, or gradient and update together. (The complete loop
was many times slower.) Images are not augmented; `--model=resnet20` reads random images.
"""

import functools
import time
from collections.abc import Callable
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

_COMPILED = ("none", "gradient", "step")
_NUM_RANDOM = 1280
_NUM_TRIALS = 4


def main() -> None:
    """Prints the rate."""
    flags = parser(__doc__, 100)
    flags.add_argument("--model", choices=CONFIGS, default="mlp")
    flags.add_argument(
        "--xla", choices=("auto", *_COMPILED), default="auto", help="What XLA compiles."
    )
    flags.add_argument("--steps_per_call", type=int, default=50, help="Steps in one graph.")
    flags.add_argument("--num_threads", type=int, default=0, help="0: TensorFlow chooses.")
    options = flags.parse_args()

    import tensorflow as tf

    from trainer.config import load_recipe

    tf.config.threading.set_intra_op_parallelism_threads(options.num_threads)
    tf.config.threading.set_inter_op_parallelism_threads(options.num_threads)
    recipe = load_recipe(CONFIGS[options.model])
    model = recipe.build_model(recipe.config)
    images, labels = batches_of(_arrays(options, model.input_shape[1:]), options.batch_size)
    batches = tf.constant(images), tf.constant(labels)

    def loop(compiled: str) -> Callable[[int], None]:
        compile_ = functools.partial(tf.function, jit_compile=True, autograph=False)
        gradients = functools.partial(_gradients, model, recipe.config.penalty.l2)
        if compiled == "gradient":
            gradients = compile_(gradients)
        slots = [[tf.Variable(tf.zeros_like(v.value)) for v in values] for _ in range(2)]
        update = _momentum if recipe.build_optimizer else _adam
        count = tf.Variable(0.0)

        def step(images: Any, labels: Any) -> None:
            update(values, gradients(images, labels), slots, recipe.config.learning_rate, count)

        if compiled == "step":
            step = compile_(step)

        @tf.function
        def run(first: Any) -> Any:
            images, labels = batches
            for number in tf.range(options.steps_per_call):
                batch = (first + number) % tf.shape(images)[0]
                step(images[batch], labels[batch])
            return count.read_value()

        return lambda first: run(tf.constant(first)).numpy()

    values = model.trainable_variables
    loops = {name: loop(name) for name in (_COMPILED if options.xla == "auto" else [options.xla])}
    run = min(loops.values(), key=_least_secs)
    window, done = Window(options), 0
    while not window.is_over(done):
        run(done)
        done += options.steps_per_call
    print_result("steps_per_sec", window.rate)


def _gradients(model: Any, l2: float, images: Any, labels: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses)
        if l2:
            squares = [tf.reduce_sum(tf.square(value)) for value in model.trainable_variables]
            loss += l2 * tf.add_n(squares)
    return tape.gradient(loss, [value.value for value in model.trainable_variables])


def _adam(values: Any, gradients: Any, slots: Any, rate: float, count: Any) -> None:
    import tensorflow as tf

    step = count.assign_add(1.0)
    powers = tf.pow(0.9, step), tf.pow(0.999, step)
    for value, mean, square, gradient in zip(values, *slots, gradients, strict=True):
        tf.raw_ops.ResourceApplyAdam(
            var=value.value.handle, m=mean.handle, v=square.handle,
            beta1_power=powers[0], beta2_power=powers[1], lr=rate, beta1=0.9, beta2=0.999,
            epsilon=1e-7, grad=gradient,
        )  # fmt: skip


def _momentum(values: Any, gradients: Any, slots: Any, rate: float, count: Any) -> None:
    import tensorflow as tf

    count.assign_add(1.0)
    for value, speed, gradient in zip(values, slots[0], gradients, strict=True):
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=value.value.handle, accum=speed.handle, lr=rate, grad=gradient, momentum=0.9
        )


def _least_secs(run: Callable[[int], None]) -> float:
    secs = []
    for _ in range(1 + _NUM_TRIALS):
        began = time.perf_counter()
        run(0)
        secs.append(time.perf_counter() - began)
    return min(secs[1:])


def _arrays(options: Any, shape: tuple[int, ...]) -> Arrays:
    if options.model == "resnet20":
        random = np.random.default_rng(0)
        images = random.uniform(size=(_NUM_RANDOM, *shape)).astype(np.float32)
        return images, random.integers(0, 10, _NUM_RANDOM)
    images, labels = load_mnist(options.mnist_source)
    return images.reshape(-1, *shape), labels


if __name__ == "__main__":
    main()
