"""Complete runs in separate processes. `runs.py` starts them; read it first."""

import pytest

pytest.register_assert_rewrite("tests.cluster.runs")
