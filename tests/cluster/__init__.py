"""Whole runs, in processes of their own."""

import pytest

pytest.register_assert_rewrite("tests.cluster.runs")
