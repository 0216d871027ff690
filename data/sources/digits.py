"""Handwritten digits: the 1,797 scans of 8x8 pixels that scikit-learn carries. No download.

The test half of UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from data.files import DataError
from data.sources import Options, Source
from data.sources.examples import Classes, ImageSplit, labelled_images

NUM_TRAIN = 1437
NUM_TEST = 360


def source(options: Options) -> Source:
    """1,437 digits to train on and 360 to test on, the same ones for everyone.

    Pixels are scaled from scikit-learn's 0..16 to 0..255.

    Raises:
        DataError: scikit-learn is not installed.
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
    # Every fifth scan of each digit is a test scan, so both splits hold the digits in equal parts;
    # without random numbers, whose streams may change from version to version.
    rank = np.empty(len(labels), np.int64)
    for digit in range(10):
        of_digit = np.flatnonzero(labels == digit)
        rank[of_digit] = np.arange(len(of_digit))
    test = np.zeros(len(labels), bool)
    test[np.argsort(-(rank % 5), kind="stable")[:NUM_TEST]] = True
    return labelled_images(
        "digits",
        (8, 8, 1),
        {"label": Classes(10)},
        {
            "train": _image_split(images[~test], labels[~test]),
            "test": _image_split(images[test], labels[test]),
        },
        options,
    )


def _image_split(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64]) -> ImageSplit:
    def rows(first: int, last: int) -> Iterator[tuple[bytes, Sequence[int]]]:
        for number in range(first, last):
            yield images[number].tobytes(), (int(labels[number]),)

    return ImageSplit(len(images), rows)
