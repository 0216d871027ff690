"""Names of TensorFlow's functions that are the same at each start, after a resume too.

    number_functions_by_name()      # before the first function is traced

TensorFlow 2.21 (`concrete_function.py`, `control_flow_util_v2.py`) ends a name with the number of
tensors and functions that the process had before. XLA's cache finds a program by these names, so a
resumed run would compile again. Can be deleted when two processes that trace the same function
after different others give it the same name.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator

from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.ops import control_flow_util_v2

_FIRST_NUMBER = 1_000_000_000  # Above the numbers of functions that exist already.


@functools.cache  # Once in a process.
def number_functions_by_name() -> None:
    """Numbers the functions of each name, instead of all functions and tensors."""
    numbers: dict[str, Iterator[int]] = collections.defaultdict(
        lambda: itertools.count(_FIRST_NUMBER)
    )

    def numbered(unique_name: Callable[..., str]) -> Callable[..., str]:
        def name_of(*args: str) -> str:
            name = unique_name(*args).rpartition("_")[0]
            return f"{name}_{next(numbers[name])}"

        return name_of

    for module, function in (
        (concrete_function, "_inference_name"),
        (control_flow_util_v2, "unique_fn_name"),
        (control_flow_util_v2, "unique_grad_fn_name"),
    ):
        setattr(module, function, numbered(getattr(module, function)))
