"""Handwritten digits: 1,797 scans of 8x8 pixels from scikit-learn. No download.

The test half of UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998).
"""

import numpy as np

from data.prepare.sources import Options, Source
from data.prepare.sources.examples import Classes, array_split, labelled_images
from data.system.files import DataError

_NUM_TEST = 360


def source(name: str, path: str, options: Options) -> Source:
    """1,437 digits for training and 360 for testing; every call returns the same splits.

    Pixels are scaled from scikit-learn's 0..16 to 0..255. No file is read: `path` is not used.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "The digits data set comes with scikit-learn, which is not installed: "
            "pip install scikit-learn"
        ) from None
    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    labels = digits.target.astype(np.int64)
    # Every fifth scan of each digit is a test scan, so the digits have equal parts in both splits.
    # No random numbers, because their streams may change between versions of NumPy.
    rank = np.empty(len(labels), np.int64)
    for digit in range(10):
        of_digit = np.flatnonzero(labels == digit)
        rank[of_digit] = np.arange(len(of_digit))
    test = np.zeros(len(labels), bool)
    test[np.argsort(-(rank % 5), kind="stable")[:_NUM_TEST]] = True
    splits = {
        "train": array_split(images[~test], labels[~test]),
        "test": array_split(images[test], labels[test]),
    }
    return labelled_images(name, (8, 8, 1), {"label": Classes(10)}, splits, options)
