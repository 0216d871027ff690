"""The data of the cluster tests."""

from tests.cluster.conftest import digits as digits
from tests.cluster.conftest import numbered as numbered
