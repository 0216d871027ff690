"""Places in a graph where a ps worker waits while a file exists.

In the graph, because Python does not run in a worker: configs of tests put them into a model.
"""

from typing import Any

import tensorflow as tf

from tests.cluster.delay import this_worker

Tensor = Any


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
        worker = this_worker()
        return None if worker is None or not directory else cls(directory, worker)

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
                    # No op with side effects (such as sleeping): it would delay the complete step.
                    looks = tf.while_loop(lambda _: self._exists(), lambda n: n + 1, [looks])
            with tf.control_dependencies(tf.nest.flatten(looks)):
                return tf.identity(upstream)

        # A tensor, not a variable: those a custom gradient treats apart.
        return gate(tf.identity(value))

    def _path(self, name: str) -> Tensor:
        return tf.strings.join([self._directory, "/", name, "-", self._worker])

    def _exists(self) -> Tensor:
        return tf.size(tf.io.matching_files(self._path("hold"))) > 0
