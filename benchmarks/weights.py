"""The variables in checkpoints, and how much those of two runs differ.

left, right = (weights(checkpoint, "model/") for checkpoint in checkpoints)
print(largest_difference(left, right))
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def weights(checkpoint: Path, *starts: str) -> dict[str, npt.NDArray[Any]]:
    """The variables in the directory `checkpoint` whose keys begin with one of `starts`."""
    import tensorflow as tf  # Here, after main has made it quiet.

    reader = tf.train.load_checkpoint(str(checkpoint / "variables"))
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith(starts)]
    return {name: reader.get_tensor(name) for name in names}


def largest_difference(
    left: Mapping[str, npt.NDArray[Any]], right: Mapping[str, npt.NDArray[Any]]
) -> float:
    """The largest absolute difference of an element. Raises KeyError if `right` lacks a name."""
    # NumPy's max is NaN if one value is; Python's passes over it.
    return float(np.max([np.max(np.abs(left[name] - right[name])) for name in left]))
