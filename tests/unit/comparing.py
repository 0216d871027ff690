"""Compares lists of arrays, such as the weights of two models, one by one."""

from collections.abc import Iterable
from typing import Any

import numpy as np


def assert_same(left: Iterable[Any], right: Iterable[Any]) -> None:
    """Both have the same number of arrays, and these are equal."""
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(
    left: Iterable[Any], right: Iterable[Any], *, atol: float = 1e-6, rtol: float = 1e-7
) -> None:
    """Both have the same number of arrays, and these are equal up to rounding."""
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=rtol)
