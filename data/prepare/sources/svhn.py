"""SVHN, cropped digits: {train,test,extra}_32x32.mat, http://ufldl.stanford.edu/housenumbers.

`X` is uint8 [32, 32, 3, N] with the first index running fastest. `y` has 10 for the digit 0.

SciPy reads a MAT file as a whole, so the images of all files are held in memory until they are
written: 0.3 GB for train and test, 1.9 GB with extra (a file of 1.3 GB). The processes that write
shards share this memory.
"""

import os
import subprocess
import sys

import numpy as np
import scipy.io

from data.prepare.sources import Options, Source
from data.prepare.sources.examples import Classes, ImageArrays, labelled_images
from data.system.files import DataError

_SHAPE = (32, 32, 3)
# SciPy only warns of a variable that it cannot read, and returns a text in its place.
_TRY_TO_LOAD = """
import sys, warnings, scipy.io
warnings.simplefilter("error", scipy.io.matlab.MatReadWarning)
scipy.io.loadmat(sys.argv[1])
"""


def source(name: str, path: str, options: Options) -> Source:
    """The files in directory `path`: train and test, and extra if it is there; labels 0 to 9."""
    splits = {}
    for split in ("train", "test", "extra"):
        file = os.path.join(path, f"{split}_32x32.mat")
        if os.path.isfile(file):
            splits[split] = _arrays(file)
        elif split != "extra":
            raise DataError(
                f"{path} has no {split}_32x32.mat. Bring train_32x32.mat and test_32x32.mat "
                f"(and extra_32x32.mat, if wanted), then: python -m data.prepare {name} "
                "--source=DIR"
            )
    return labelled_images(name, splits, {"label": Classes(10)}, options)


def _arrays(path: str) -> ImageArrays:
    # A wrong data type in a damaged file makes SciPy 1.17 read at a random address and die of
    # SIGSEGV. So another process reads the file first.
    tried = subprocess.run(
        [sys.executable, "-P", "-c", _TRY_TO_LOAD, path], capture_output=True, text=True
    )
    if tried.returncode:
        reason = (tried.stderr.splitlines() or [f"SciPy ended with {tried.returncode}"])[-1]
        raise DataError(
            f"{path} is not a MAT file, or is damaged or cut short ({reason}). Download it again, "
            "or save it again with scipy.io.savemat."
        )
    loaded = scipy.io.loadmat(path)
    variables = {key: array for key, array in loaded.items() if isinstance(array, np.ndarray)}
    if not {"X", "y"} <= variables.keys():
        raise DataError(
            f"{path} has variables {', '.join(variables) or 'none'}; needed are X and y."
        )
    pixels, labels = variables["X"], variables["y"].reshape(-1)
    if pixels.shape != (*_SHAPE, len(labels)) or pixels.dtype != np.uint8:
        raise DataError(
            f"{path} has X of {pixels.dtype} {list(pixels.shape)} and {len(labels)} labels; needed "
            "is uint8 [32, 32, 3, N] and N labels."
        )
    if labels.dtype.kind not in "iuf":
        raise DataError(f"{path}: y holds no real numbers.")
    if not np.isin(labels, range(1, 11)).all():
        raise DataError(f"{path} has labels other than 1 to 10: it is not SVHN's.")
    return pixels.transpose(3, 0, 1, 2), labels.astype(np.int64) % 10
