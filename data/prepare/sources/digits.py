"""Handwritten digits: 1,797 scans of 8x8 pixels. No download.

digits.csv.gz is a copy of scikit-learn's file. A line has the 64 pixels of a scan, 0 to 16, and
the digit. Source: the test half of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49, CC BY 4.0.
"""

from pathlib import Path

import numpy as np

from data.prepare.sources import Options, Source
from data.prepare.sources.examples import Classes, labelled_images

_FILE = Path(__file__).with_name("digits.csv.gz")
_NUM_TEST = 360


def source(name: str, path: str, options: Options) -> Source:
    """1,437 digits for training and 360 for testing; every call returns the same splits.

    Pixels are scaled from 0..16 to 0..255. `path` is not used.
    """
    rows = np.loadtxt(_FILE, np.int64, delimiter=",")
    images = np.round(rows[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    labels = rows[:, -1]
    # Every fifth scan of each digit is a test scan, so the digits have equal parts in both splits.
    # No random numbers, because their streams may change between versions of NumPy.
    rank = np.empty(len(labels), np.int64)
    for digit in range(10):
        of_digit = np.flatnonzero(labels == digit)
        rank[of_digit] = np.arange(len(of_digit))
    test = np.zeros(len(labels), bool)
    test[np.argsort(-(rank % 5), kind="stable")[:_NUM_TEST]] = True
    splits = {"train": (images[~test], labels[~test]), "test": (images[test], labels[test])}
    return labelled_images(name, splits, {"label": Classes(10)}, options)
