"""The data of the cluster tests."""

from tests.cluster.conftest import digits as digits
