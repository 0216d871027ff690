"""Objects of keras.metrics that create no variables, for files that only describe metrics.

    with metrics_without_variables(import_keras):
        ...                         # imports a user's file
    metric = made_anew(described)   # with variables

A described metric remembers the arguments of its class: many classes have no `get_config`, or one
that lacks arguments. Keras is changed when it is first imported within the context, since the
importing process may not need it. Python 3.11 to 3.13 have no documented way to act before the
first import of a module by any code: `builtins.__import__` is replaced until then. Keras 3.15 has
no public way to make a metric without variables. Can be deleted when keras.metrics makes variables
at the first update.
"""

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


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
    """Returns a metric as `metric`, with variables; or `metric`, if its arguments are unknown."""
    import keras  # The importing process may not need it.

    if (arguments := vars(metric).get("__arguments")) is None:
        return metric
    args, kwargs = keras.tree.map_structure(
        lambda part: made_anew(part) if isinstance(part, keras.metrics.Metric) else part, arguments
    )
    made = type(metric)(*args, **kwargs)
    made.name = metric.name  # Keras gives each object without a name another one.
    return made
