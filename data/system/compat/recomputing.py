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
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, get_stateless_scope, set_keras_mask
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
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
            if scope is not None and not scope.state_mapping:  # Keras only asks for shapes.
                return function(*args, **kwargs)
            call = _Call(function, args, kwargs, self._replaying())
            return call.in_tape() if scope is None else call.in_scope(scope)

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


# Of Keras: the argument `training` of the layers outside, and the type in which they compute.
_CONTEXTS = "current_call_ctx", "autocast_scope"


class _Call:
    """A call of a function that its gradient repeats: at the same values, with the same draws."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replay: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._function, self._given, self._replay = function, (args, kwargs), replay
        self._leaves = tf.nest.flatten(self._given, expand_composites=True)
        self._places = [i for i, leaf in enumerate(self._leaves) if _has_gradient(leaf)]
        self._inputs = [self._leaves[i] for i in self._places]
        self._masks = list(map(get_keras_mask, self._inputs))  # Some layers remove them.
        self._contexts = {name: copy.copy(get_global_attribute(name)) for name in _CONTEXTS}

    def _first(self) -> Any:
        args, kwargs = self._given
        return self._function(*args, **kwargs)

    def _again(self, inputs: Sequence[tf.Tensor], state: Mapping[int, Any]) -> Any:
        """Repeats the call for other tensors of the same values; assigns nothing."""
        leaves = list(self._leaves)
        for i, mask, value in zip(self._places, self._masks, inputs, strict=True):
            set_keras_mask(value, mask)
            leaves[i] = value
        args, kwargs = tf.nest.pack_sequence_as(self._given, leaves, expand_composites=True)
        scope = keras.StatelessScope(collect_losses=True)
        scope.state_mapping = dict(state)
        with self._replay(), _attributes(self._contexts), scope:
            return self._function(*args, **kwargs)

    def in_tape(self) -> Any:
        """Returns the results outside of a scope, with the gradient of TensorFlow."""
        is_first = True

        def compute(*inputs: tf.Tensor) -> Any:
            nonlocal is_first
            if not is_first:
                return self._again(inputs, {})
            is_first = False
            return self._first()

        return _original(compute)(*self._inputs)

    def in_scope(self, scope: keras.StatelessScope) -> Any:
        """Returns the results at the values of `scope`, and assigns to it."""
        given = dict(scope.state_mapping)
        first = _Reads(scope)
        first.losses = scope.losses
        with first:
            results = self._first()
        scope.state_mapping.update(first.state_mapping)
        if first.reads_others:
            return results
        keys = [key for key in first.keys if _has_gradient(given.get(key))]
        sources, num_inputs = [*self._inputs, *(given[key] for key in keys)], len(self._inputs)

        def gradient(*upstream: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                again = _after(sources, upstream)
                tape.watch(again)
                state = {**given, **dict(zip(keys, again[num_inputs:], strict=True))}
                outputs = self._again(again[:num_inputs], state)
            outputs = filter(_has_gradient, tf.nest.flatten(outputs, expand_composites=True))
            return tape.gradient(list(outputs), again, output_gradients=list(upstream))

        # The original results stay on the tape: a penalty that a layer adds may depend on them.
        flat = tf.nest.flatten(results, expand_composites=True)
        with record.stop_recording():
            copies = [tf.identity(x) if _has_gradient(x) else x for x in flat]
        record.record_operation("recompute", [*filter(_has_gradient, copies)], sources, gradient)
        return tf.nest.pack_sequence_as(results, copies, expand_composites=True)


@contextlib.contextmanager
def _attributes(values: Mapping[str, Any]) -> Iterator[None]:
    """Sets attributes of Keras' global state within the context."""
    before = {name: get_global_attribute(name) for name in values}
    for name, value in values.items():
        set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            set_global_attribute(name, value)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_complex)


def _after(values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns `values`, which exist only after `upstream`: without it XLA computes nothing again.

    No number is infinite and not a number, so that 0 is added; but XLA does not know this.
    """
    (first, *_) = (x for x in upstream if x is not None)
    number = tf.reduce_max(tf.math.real(tf.reshape(first, [-1])[:1]))
    zero = tf.math.is_nan(number) & tf.math.is_inf(number)
    return [value + tf.cast(zero, value.dtype) for value in values]
