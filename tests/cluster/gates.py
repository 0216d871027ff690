"""Places in a graph where a ps worker waits: for some time, or while a file exists.

In the graph, because Python does not run in a worker: configs of tests put them into a model.
"""

from typing import Any

import tensorflow as tf

Tensor = Any

_LOOK_MS = 20


def late(value: Tensor, delay_ms: int) -> Tensor:
    """`value`, later: the data set sleeps before its element and before its end."""
    variant = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(value)),
        sleep_microseconds=tf.constant(delay_ms * 500, tf.int64),
        output_types=[value.dtype],
        output_shapes=[value.shape],
    )
    element = tf.data.experimental.from_variant(variant, tf.TensorSpec(value.shape, value.dtype))
    return element.get_single_element()


class Hold:
    """A file `hold-<worker>` in `directory`, by which a test holds one ps worker back.

    Looked for once, in the forward pass, so that all gradients of a step agree on it.
    """

    def __init__(self, directory: str, worker: Tensor) -> None:
        self._worker = tf.strings.as_string(worker)
        self._directory = directory
        self._held = self._exists()

    @classmethod
    def of(cls, directory: str) -> "Hold | None":
        """That of the worker whose graph is made; None where it is none's, or no directory."""
        try:
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        except RuntimeError:
            return None
        return cls(directory, worker) if directory else None

    def gradient_of(self, value: Tensor, name: str, *, waits: bool) -> Tensor:
        """`value`, whose gradient is written to `<name>-<worker>` if the worker is held.

        If it `waits`, it goes no further until the hold is gone.
        """

        @tf.custom_gradient
        def gate(value: Tensor) -> tuple[Tensor, Any]:
            def gradient(upstream: Tensor) -> Tensor:
                return tf.cond(self._held, lambda: seen(upstream), lambda: upstream)

            return tf.identity(value), gradient

        def seen(upstream: Tensor) -> Tensor:
            written = tf.io.write_file(self._path(name), tf.io.serialize_tensor(upstream))
            with tf.control_dependencies([written]):
                looks = tf.constant(0)
                if waits:
                    looks = tf.while_loop(
                        lambda _: self._exists(), lambda n: late(n + 1, _LOOK_MS), [looks]
                    )
            with tf.control_dependencies(tf.nest.flatten(looks)):
                return tf.identity(upstream)

        # A tensor, not a variable: those a custom gradient treats apart.
        return gate(tf.identity(value))

    def _path(self, name: str) -> Tensor:
        return tf.strings.join([self._directory, "/", name, "-", self._worker])

    def _exists(self) -> Tensor:
        return tf.size(tf.io.matching_files(self._path("hold"))) > 0
