"""What TensorFlow says if XLA cannot compile a function.

if is_of_xla(error):
    log.warning("XLA: %s", described(error))        # "it lacks the operation DecodeJpeg."
"""

import re

import tensorflow as tf

_OF_XLA = re.compile(r"XLA_\w+_JIT|tf2xla conversion failed|XLA compilation requires")
# "unsupported operations ... on XLA_CPU_JIT: DecodeJpeg (No registered ...".
_LACKING = re.compile(r"unsupported operations .* on XLA_\w+: (\w+)")


def is_of_xla(error: tf.errors.OpError) -> bool:
    """Returns True if XLA could not compile; nothing of the function was computed."""
    return _OF_XLA.search(error.message) is not None


def described(error: tf.errors.OpError) -> str:
    """Returns the reason of an error of XLA, one sentence."""
    lacking = _LACKING.search(error.message)
    if lacking is None:
        return f"it cannot compile the step ({error.message.strip().splitlines()[0]})."
    return "it takes no text." if lacking[1] == "_Arg" else f"it lacks the operation {lacking[1]}."
