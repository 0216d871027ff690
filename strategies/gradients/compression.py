"""Gradients in 16 bits with error feedback, or unchanged (float32).

    compression = Compression("bfloat16", num_senders=2)
    sent = compression.compress(gradient, key=0)        # bfloat16
    compression.forget_residuals()                      # then trace the graph again

The process that compresses a gradient keeps its rounding error, the *residual*, and adds it to the
next gradient (Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019):

    sent = rounded(gradient + residual);    residual = gradient + residual - sent

So a value that is too small for the type is accumulated and sent later. If a gradient is dropped,
or skipped because it overflowed, the residual that was added to it is lost. Residuals belong to the
process and are not saved: a restarted task starts with none, so a resumed run is equal up to the
rounding of one gradient, not bit for bit. A sum over replicas is rounded again, without a residual.
"""

import uuid
from collections.abc import Sequence

import tensorflow as tf

from data.system.compat.autograph import no_autograph
from strategies.base import Tensor


class Compression:
    """Rounds gradients to the type in which they are sent.

    Sparse gradients (rows of an embedding) are rounded to bfloat16, whose range is that of float32,
    and without a residual: it would be as large as the table, and the residual of a row that never
    occurs again would never be sent. Gradients of 16 bits are not rounded.
    """

    def __init__(self, dtype: str = "float32", num_senders: int = 1) -> None:
        """Clips so that a sum of `num_senders` gradients is finite in the type named `dtype`."""
        self._dtype = None if dtype == "float32" else tf.as_dtype(dtype)
        # Less than the maximum, because rounding may increase a value.
        self._limit = 0.99 * float(self._dtype.max) / num_senders if self._dtype else 0.0
        self.forget_residuals()

    @property
    def is_lossy(self) -> bool:
        """True if gradients are rounded, so that there are residuals."""
        return self._dtype is not None

    def value_bytes(self, value_bytes: int) -> int:
        """The bytes that are sent for a value of `value_bytes`."""
        return min(value_bytes, int(self._dtype.size)) if self._dtype else value_bytes

    def forget_residuals(self) -> None:
        """Starts without residuals in all graphs that are traced from now on."""
        # Residuals are found by this name, and live until the process ends.
        self._name = f"residual-{uuid.uuid4().hex}"

    @no_autograph
    def compress_all(
        self, gradients: Sequence[Tensor], is_assigned: tf.Tensor | None = None
    ) -> list[Tensor]:
        """Compresses each of `gradients`; the key is the index of the variable."""
        return [
            None if gradient is None else self.compress(gradient, index, is_assigned)
            for index, gradient in enumerate(gradients)
        ]

    @no_autograph
    def compress(self, gradient: Tensor, key: int, is_assigned: tf.Tensor | None = None) -> Tensor:
        """`gradient` in the type in which it is sent, with the residual of `key` added.

        If `is_assigned` (bool) is given and False, the gradient belongs to a skipped assignment,
        and the residual is left unchanged.
        """
        if isinstance(gradient, tf.IndexedSlices):
            return self.compress_rows(gradient)
        if self._dtype is None or gradient.dtype.size <= self._dtype.size:
            return gradient
        # A tf.function creates all handles in their order, so a handle waits for no gradient.
        residual = tf.raw_ops.VarHandleOp(
            dtype=gradient.dtype, shape=gradient.shape, shared_name=f"{self._name}-{key}"
        )
        # Each step of an unrolled graph has its own handle of the residual, and TensorFlow does not
        # order accesses through different handles. So control dependencies do: the residual is read
        # after its gradient is computed, and written before the gradient is sent. The caller must
        # order the next gradient after that.
        with tf.control_dependencies([gradient]):
            is_initialized = tf.raw_ops.VarIsInitializedOp(resource=residual)
        former = tf.cond(
            is_initialized,
            lambda: tf.raw_ops.ReadVariableOp(resource=residual, dtype=gradient.dtype),
            lambda: tf.zeros_like(gradient),
        )
        total = gradient + former
        sent, new_residual = self._round(total)
        if is_assigned is not None:
            new_residual = tf.cond(is_assigned, lambda: new_residual, lambda: former)
        written = tf.raw_ops.AssignVariableOp(resource=residual, value=new_residual)
        with tf.control_dependencies([written]):
            return tf.identity(sent)

    def compress_rows(self, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        """A sparse `gradient` in the type in which it is sent."""
        if self._dtype is None or gradient.dtype.size <= self._dtype.size:
            return gradient
        rows = tf.cast(gradient.values, tf.bfloat16)
        return tf.IndexedSlices(rows, gradient.indices, gradient.dense_shape)

    def _round(self, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Rounds `total` to the type in which it is sent; returns that, and the residual."""

        def residual_of(sent: tf.Tensor) -> tf.Tensor:
            return total - tf.cast(sent, total.dtype)

        def rounded() -> tuple[tf.Tensor, tf.Tensor]:
            sent = tf.cast(total, self._dtype)
            return sent, residual_of(sent)

        def clipped() -> tuple[tf.Tensor, tf.Tensor]:
            # A value out of range leaves no residual: the excess would be sent again and again.
            # Values that are not finite are sent, so that all tasks see them.
            within = tf.clip_by_value(total, -self._limit, self._limit)
            sent = tf.cast(tf.where(tf.math.is_finite(total), within, total), self._dtype)
            return sent, tf.where(is_in_range, residual_of(sent), tf.zeros_like(total))

        is_in_range = tf.abs(total) <= self._limit
        parts: tuple[tf.Tensor, tf.Tensor] = tf.cond(tf.reduce_all(is_in_range), rounded, clipped)
        return parts
