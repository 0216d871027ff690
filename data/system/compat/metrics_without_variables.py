"""Objects of keras.metrics that create no variables, for files that only describe metrics.

    with metrics_without_variables(import_keras):
        ...                         # imports a user's file
    metric = made_anew(described)   # with variables

A described metric remembers the arguments of its class: many classes have no `get_config`, or one
that lacks arguments. What a file sets afterwards is copied if it is plain. Keras is changed when it
is first imported within the context, since the importing process may not need it. Python 3.11 to
3.13 have no documented way to act before the first import of a module by any code:
`builtins.__import__` is replaced until then. Keras 3.15 has no public way to make a metric without
variables. Can be deleted when keras.metrics makes variables at the first update.
"""

import builtins
import contextlib
import numbers
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, NoneType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

_PLAIN = (numbers.Number, str, NoneType, FunctionType)


@contextlib.contextmanager
def metrics_without_variables(import_keras: Callable[[], None]) -> Iterator[None]:
    """Within it, metrics create no variables. `import_keras` is called before the first import."""
    import_of_python = builtins.__import__
    with contextlib.ExitStack() as stack:

        def import_keras_first(name: str, *args: Any, **kwargs: Any) -> ModuleType:
            if name.partition(".")[0] in ("keras", "tensorflow"):
                builtins.__import__ = import_of_python
                stack.enter_context(_without_variables(import_keras))
            return import_of_python(name, *args, **kwargs)

        if "keras" in sys.modules:
            stack.enter_context(_without_variables(import_keras))
        else:
            builtins.__import__ = import_keras_first
        try:
            yield
        finally:
            if builtins.__import__ is import_keras_first:  # Keras was not imported.
                builtins.__import__ = import_of_python


@contextlib.contextmanager
def _without_variables(import_keras: Callable[[], None]) -> Iterator[None]:
    import_keras()
    import keras

    kind = keras.metrics.Metric
    kind.__new__ = staticmethod(_new)  # It stays: Python cannot take it back from a class.
    add_variable = kind.add_variable
    kind.add_variable = lambda *_, **__: None
    try:
        yield
    finally:
        kind.add_variable = add_variable


def _new(kind: type["keras.metrics.Metric"], *args: Any, **kwargs: Any) -> "keras.metrics.Metric":
    metric = object.__new__(kind)
    vars(metric)["__arguments"] = args, kwargs  # Keras saves no attribute with this prefix.
    return metric


def made_anew(metric: "keras.metrics.Metric") -> "keras.metrics.Metric":
    """Returns a metric as `metric`, with variables; or `metric`, if it is not only described."""
    import keras  # The importing process may not need it.

    arguments = vars(metric).get("__arguments")
    if arguments is None or metric.variables:
        return metric
    args, kwargs = keras.tree.map_structure(
        lambda part: made_anew(part) if isinstance(part, keras.metrics.Metric) else part, arguments
    )
    made = type(metric)(*args, **kwargs)
    vars(made).update(
        {name: x for name, x in vars(metric).items() if _was_set(x, vars(made).get(name))}
    )
    return made


def _was_set(value: object, made: object) -> bool:
    """Returns True if a file may have set an attribute to `value`; `made`: of the new metric."""
    if value is None:  # A described metric has None in place of a variable, too.
        return isinstance(made, _PLAIN)
    if isinstance(value, FunctionType):  # A function of __init__ may refer to its own metric.
        return value.__code__ is not getattr(made, "__code__", None)
    if isinstance(value, (list, tuple, dict)):
        parts = list(value.values() if isinstance(value, dict) else value)
        is_plain = all(part is not None and isinstance(part, _PLAIN) for part in parts)
        return bool(parts) and is_plain and value != made
    return isinstance(value, _PLAIN)
