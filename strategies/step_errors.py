"""Errors of TensorFlow in a step or an evaluation that its data, its size or XLA has caused.

with errors_explained("Lower --batch_size"):
    run_in_graph(...)
"""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from data.system.errors import UsageError
from strategies.gpus import peak_bytes

# A full disk is a ResourceExhaustedError, too.
_MEMORY = re.compile(r"OOM when allocating|out of memory|failed to allocate", re.IGNORECASE)

_OF_XLA = re.compile(r"XLA_\w+_JIT|tf2xla conversion failed|XLA compilation requires")
# "unsupported operations ... on XLA_CPU_JIT: DecodeJpeg (No registered ...".
_LACKING = re.compile(r"unsupported operations .* on XLA_\w+: (\w+)")


class DataFaultError(RuntimeError):
    """TensorFlow could not read, parse or use the data of a step; its cause says more."""


@contextlib.contextmanager
def errors_explained(smaller: str) -> Iterator[None]:
    """Raises DataFaultError or UsageError in place of errors of TensorFlow.

    `smaller` says what to do if there was not enough memory.
    """
    try:
        with memory_explained(smaller):
            yield
    except (
        tf.errors.DataLossError,
        tf.errors.InvalidArgumentError,
        tf.errors.NotFoundError,
        tf.errors.PermissionDeniedError,
    ) as error:
        raise DataFaultError(error.message) from error


@contextlib.contextmanager
def memory_explained(smaller: str) -> Iterator[None]:
    """Raises UsageError in place of TensorFlow's error; `smaller` says what to do."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if not _MEMORY.search(error.message):
            raise
        raise UsageError(
            f"There is not enough memory: {_cause(error.message)}{_peaks()}. {smaller}. On a GPU, "
            "--config.precision=mixed_bfloat16 needs half of it for activations."
        ) from error


def reason_of_xla(error: BaseException) -> str:
    """Returns why XLA could not compile a function, one sentence; "" if `error` is another one.

    Nothing of the function was computed.
    """
    if not isinstance(error, tf.errors.OpError) or not _OF_XLA.search(error.message):
        return ""
    lacking = _LACKING.search(error.message)
    if lacking is None:
        return f"it cannot compile the step ({error.message.strip().splitlines()[0]})."
    return "it takes no text." if lacking[1] == "_Arg" else f"it lacks the operation {lacking[1]}."


def _cause(message: str) -> str:
    """The line of `message` about memory, without the nodes of the graph around it."""
    line = next(line for line in message.splitlines() if _MEMORY.search(line))
    return re.sub(r"\{\{.*?\}\}|\[Op:.*?\]( name: )?|\x1b\[\d+m", "", line).strip(" .:")


def _peaks() -> str:
    """The most memory that was in use on each GPU of this process, in words."""
    used = ", ".join(f"{name} {peak / 2**30:.1f} GiB" for name, peak in peak_bytes().items())
    return f" (at most in use before: {used})" if used else ""
