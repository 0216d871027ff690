"""Diabetes: 442 patients with ten measurements, and how the disease progressed; from scikit-learn.

Efron, Hastie, Johnstone, Tibshirani, "Least Angle Regression" (2004). No download.
"""

import functools
from collections.abc import Iterator, Mapping

from data.prepare.sources import Options, Source
from data.prepare.sources.examples import scalar
from data.prepare.sources.tables import Table, encoded, table_source
from data.system.extras import import_extra
from data.tfrecord.examples import Value


def source(name: str, path: str, options: Options) -> Source:
    """Ten columns of numbers, and `target`, a number. No file is read: `path` is not used.

    Each column of numbers has mean 0 and a sum of squares of 1.
    """
    found = import_extra("sklearn.datasets", "samples", "The data set diabetes").load_diabetes()
    columns = [*found.feature_names, "target"]

    def rows() -> Iterator[Mapping[str, Value]]:
        for values, target in zip(found.data, found.target, strict=True):
            yield dict(zip(columns, [*map(float, values), float(target)], strict=True))

    examples = functools.partial(encoded, rows)
    table = Table(len(found.target), 30 * len(columns), examples)
    return table_source(name, {"": table}, dict.fromkeys(columns, scalar("float32")), {}, options)
