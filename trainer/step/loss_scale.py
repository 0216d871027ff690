"""Loss scaling: keeps small gradients above zero when a model computes in float16.

    loss_scale = LossScale(config.loss_scale)       # in the strategy's scope
    scale = loss_scale.read()
    gradients = unscaled(tape.gradient(loss * scale, variables), scale)
    is_finite = all_finite(summed)                  # of the sum, so all replicas agree
    loss_scale.adjust(strategy, is_finite)          # in cross-replica context

Micikevicius et al., "Mixed Precision Training", 2018, section 3.2. A step whose gradient overflowed
counts, but changes only the scale, which is halved, and moving statistics that are finite; after
`growth_steps` finite steps in a row the scale is doubled. Asynchronous workers may change it twice
for one reason; the next steps correct this.
"""

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from data.system.compat.keras_layers import all_layers
from strategies.base import Tensor, read_now
from trainer.step.optimizers import OptimizerError
from trainer.step.options import LossScaleConfig

# A gradient that overflows without scaling does not fit float16, so a lower scale does not help.
_MINIMUM = 1.0


class LossScale:
    """A factor of the loss that adapts to the range of float16.

    Attributes:
        variables: The scale, the finite steps since it changed, and the number of skipped steps in
            the whole run, all scalars. A checkpoint must have them.
        skipped: The last of them, int64.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        """Creates the variables. Called in the strategy's scope."""
        self._growth_steps = config.growth_steps
        self._scale = tf.Variable(float(config.initial), trainable=False, name="loss_scale")
        self._finite = tf.Variable(0, trainable=False, dtype=tf.int64, name="good_steps")
        self.skipped = tf.Variable(0, trainable=False, dtype=tf.int64, name="skipped_steps")
        self.variables = [self._scale, self._finite, self.skipped]

    def read(self) -> tf.Tensor:
        """Returns the scale to divide the gradient by: another worker may change the variable."""
        return tf.convert_to_tensor(self._scale)

    def adjust(self, strategy: tf.distribute.Strategy, is_finite: tf.Tensor) -> list[tf.Tensor]:
        """Adapts the scale after a step; `is_finite` is a bool scalar. In cross-replica context.

        Returns tensors that must be computed before the step is counted.
        """

        def scale(variable: tf.Variable) -> tf.Tensor:
            now = read_now(variable)
            grows = tf.convert_to_tensor(self._finite) + 1 >= self._growth_steps
            # The scale stays if its double overflows float32.
            grows = tf.logical_and(grows, tf.math.is_finite(2 * now))
            grown = tf.where(grows, 2 * now, now)
            variable.assign(tf.where(is_finite, grown, tf.maximum(now / 2, _MINIMUM)))
            return read_now(variable)

        def finite(variable: tf.Variable) -> tf.Tensor:
            # Additions, so that concurrent updates by asynchronous workers are all counted.
            variable.assign_add(tf.where(is_finite, tf.ones([], tf.int64), -read_now(variable)))
            now = read_now(variable)
            variable.assign_sub(tf.where(now >= self._growth_steps, now, tf.zeros_like(now)))
            return read_now(variable)

        def skipped(variable: tf.Variable) -> tf.Tensor:
            variable.assign_add(tf.cast(tf.logical_not(is_finite), tf.int64))
            return read_now(variable)

        changes = zip(self.variables, (scale, finite, skipped), strict=True)
        return [strategy.extended.update(v, change, group=False) for v, change in changes]

    @property
    def num_skipped(self) -> int:
        """Steps with a gradient that overflowed, in the whole run."""
        return int(self.skipped.numpy())

    @property
    def is_at_minimum(self) -> bool:
        """True if the scale cannot be lowered."""
        return float(self._scale.numpy()) <= _MINIMUM

    def report(self) -> Mapping[str, float | int]:
        """Returns the values for a training report."""
        return {"loss_scale": float(self._scale.numpy()), "skipped_steps": self.num_skipped}


def computes_in_float16(model: keras.Model) -> bool:
    """Returns True if a layer of `model` computes in float16, where small gradients become 0.

    Raises OptimizerError if a trainable variable is float16.
    """
    for variable in model.trainable_variables:
        if variable.dtype == "float16":
            raise OptimizerError(
                f"Variable {variable.path!r} is float16, which is too imprecise to train a weight. "
                "Use the policy 'mixed_float16', whose variables are float32: "
                "--config.precision=mixed_float16, or keras.DTypePolicy in build_model."
            )
    return any(layer.compute_dtype == "float16" for layer in all_layers(model))


def unscaled(gradients: Sequence[Tensor], scale: tf.Tensor) -> list[Tensor]:
    """Returns the `gradients` of a loss that was multiplied by `scale`, divided by it."""
    # The default scale is a power of two, so nothing is rounded.
    return [
        None if g is None else tf.math.scalar_mul(tf.cast(1 / scale, g.dtype), g) for g in gradients
    ]


def all_finite(gradients: Sequence[Tensor]) -> tf.Tensor:
    """Returns a bool scalar: True if no element of `gradients` is NaN or infinite."""
    are_finite = []
    for gradient in gradients:
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        with tf.device(values.device):  # It may be on another task.
            are_finite.append(tf.reduce_all(tf.math.is_finite(values)))
    return tf.reduce_all(are_finite)
