import pytest
import tensorflow as tf

from strategies.step_errors import OutOfMemoryError, memory_explained

# As Keras passes it on.
MESSAGE = """Exception encountered when calling Tile.call().

\x1b[1m{{function_node __wrapped__Tile}} OOM when allocating tensor with shape[60,9] \
by allocator GPU_0_bfc [Op:Tile]\x1b[0m

Arguments received"""


def test_lack_of_memory_is_explained_in_one_line() -> None:
    with pytest.raises(OutOfMemoryError) as raised, memory_explained("Lower --batch_size"):
        raise tf.errors.ResourceExhaustedError(None, None, MESSAGE)
    assert str(raised.value).startswith(
        "There is not enough memory: OOM when allocating tensor with shape[60,9] by allocator "
        "GPU_0_bfc. Lower --batch_size. "
    )


def test_full_disk_is_no_lack_of_memory() -> None:
    with pytest.raises(tf.errors.ResourceExhaustedError), memory_explained("Lower --batch_size"):
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")
