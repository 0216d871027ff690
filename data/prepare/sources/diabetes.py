"""Diabetes: 442 patients with ten measurements, and how the disease progressed; from scikit-learn.

Efron, Hastie, Johnstone, Tibshirani, "Least Angle Regression" (2004). No download.
"""

import numpy as np
from sklearn.datasets import load_diabetes

from data.prepare.sources import Options, Source
from data.prepare.sources.columns import TableColumn
from data.prepare.sources.examples import scalar
from data.prepare.sources.tables import Chunk, table_source


def source(name: str, path: str, options: Options) -> Source:
    """Ten columns of numbers, and `target`, a number. No file is read: `path` is not used.

    Each column of numbers has mean 0 and a sum of squares of 1.
    """
    found = load_diabetes()
    columns = dict(
        zip([*found.feature_names, "target"], [*found.data.T, found.target], strict=True)
    )
    num_rows = len(found.target)
    chunk = Chunk("", num_rows, lambda names: iter([(range(num_rows), columns)]))
    column = TableColumn(scalar("float32"), 8, lambda values, classes: values.astype(np.float32))
    return table_source(name, {"": [chunk]}, dict.fromkeys(columns, column), {}, options)
