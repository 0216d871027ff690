"""keras.RematScope and tf.recompute_grad in a step: the second computation repeats the first.

    recomputing.install(replaying)      # before the model is built

TensorFlow 2.21 computes a function again with new draws, so that the gradient belongs to another
dropout mask; assigns the state of layers twice; gives no gradient to values that a
keras.StatelessScope has in place of variables (XLA and parameter servers need one); and refuses
keyword arguments, which Keras 3.15 passes: `fit` fails with every layer of a RematScope. `install`
replaces tf.recompute_grad, which Keras calls too. Can be deleted when the tests of
tests/unit/compat/test_recomputing.py pass with the original.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, get_stateless_scope, set_keras_mask
from keras.src.backend.common.global_state import get_global_attribute
from tensorflow.python.eager import record

from data.system.compat.keras_layers import all_layers

_original = tf.recompute_grad
# Returns a function whose context repeats the draws of random layers from now on.
Replaying = Callable[[], Callable[[], contextlib.AbstractContextManager[None]]]


class _Recomputation:
    """Replaces tf.recompute_grad.

    Attributes:
        layers: The outermost layers, or models, in whose calls it was used.
    """

    def __init__(self, replaying: Replaying) -> None:
        self._replaying = replaying
        self.layers: weakref.WeakSet[keras.Layer] = weakref.WeakSet()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that computes `function`, and computes it again for its gradient.

        In a step this is a function of its arguments and of the values in the step's scope.
        """

        @functools.wraps(function)
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if context := get_global_attribute("current_call_ctx"):
                self.layers.add(context.entry_layer)
            scope = get_stateless_scope()
            if scope is None:
                return _original(lambda *args: function(*args, **kwargs))(*args)
            if not scope.state_mapping:  # Keras only asks for shapes.
                return function(*args, **kwargs)
            return _compute_in(scope, function, args, kwargs, self._replaying())

        return recomputed


def install(replaying: Replaying) -> None:
    """Replaces tf.recompute_grad, once in a process."""
    if not isinstance(tf.recompute_grad, _Recomputation):
        tf.recompute_grad = _Recomputation(replaying)


def is_used_by(model: keras.Model) -> bool:
    """Returns True if a layer of `model` recomputes, as its call or its RematScope said."""
    used = getattr(tf.recompute_grad, "layers", ())
    return any(layer._remat_mode or layer in used for layer in all_layers(model))


def compute_once() -> None:
    """Called in a layer that reads variables which are not in the scope: parts of tables.

    The functions in which it is called are not computed again.
    """
    scope = get_stateless_scope()
    while isinstance(scope, _Reads):
        scope.reads_others, scope = True, scope.outer


class _Reads(keras.StatelessScope):
    """A scope with the values of another one, `outer`. It notes which of them are read.

    Attributes:
        keys: The `id` of each variable that was read.
        reads_others: True after `compute_once`.
    """

    reads_others = False

    def __init__(self, outer: keras.StatelessScope) -> None:
        super().__init__(collect_losses=outer.collect_losses)
        self.outer, self.state_mapping = outer, dict(outer.state_mapping)
        self.keys: dict[int, None] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.keys[id(variable)] = None
        self.outer.get_current_value(variable)  # A function within one also notes it.
        return super().get_current_value(variable)


def _compute_in(
    scope: keras.StatelessScope,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    replay: Callable[[], contextlib.AbstractContextManager[None]],
) -> Any:
    """Returns `function(*args, **kwargs)`. Its gradient computes it again, at the same values."""
    leaves = tf.nest.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if _has_gradient(leaf)]
    masks = [get_keras_mask(leaves[i]) for i in places]  # Some layers remove them.
    given = dict(scope.state_mapping)
    first = _Reads(scope)
    first.losses = scope.losses
    with first:
        results = function(*args, **kwargs)
    # What the function assigned.
    scope.state_mapping.update(first.state_mapping)
    if first.reads_others:
        return results
    keys = [key for key in first.keys if _has_gradient(given.get(key))]
    sources = [*(leaves[i] for i in places), *(given[key] for key in keys)]

    def gradient(*upstream: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, replay():
            again = _after(sources, upstream)
            tape.watch(again)
            second = keras.StatelessScope(collect_losses=True)
            second.state_mapping = {**given, **dict(zip(keys, again[len(places) :], strict=True))}
            inputs = list(leaves)
            for i, mask, value in zip(places, masks, again, strict=False):
                set_keras_mask(value, mask)
                inputs[i] = value
            same_args, same_kwargs = tf.nest.pack_sequence_as((args, kwargs), inputs)
            with second:
                outputs = function(*same_args, **same_kwargs)
        outputs = filter(_has_gradient, tf.nest.flatten(outputs))
        return tape.gradient(list(outputs), again, output_gradients=list(upstream))

    # The original results stay on the tape: a penalty that a layer adds may depend on them.
    flat = tf.nest.flatten(results)
    with record.stop_recording():
        copies = [tf.identity(x) if _has_gradient(x) else x for x in flat]
    record.record_operation("recompute", [*filter(_has_gradient, copies)], sources, gradient)
    return tf.nest.pack_sequence_as(results, copies)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating


def _after(values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns `values`, which exist only after `upstream`: without it XLA computes nothing again.

    No number is infinite and not a number, so that 0 is added; but XLA does not know this.
    """
    (first, *_) = (x for x in upstream if x is not None)
    number = tf.reduce_max(tf.reshape(first, [-1])[:1])
    zero = tf.math.is_nan(number) & tf.math.is_inf(number)
    return [value + tf.cast(zero, value.dtype) for value in values]
