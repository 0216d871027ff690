"""Uses that change a whole process, each in a process of its own."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.unit.compat.in_forks import PROGRAMS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the programs use /proc and prctl")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[int, Any]]:
    # One process imports TensorFlow for all of them.
    ended = subprocess.run(
        [sys.executable, "-m", "tests.unit.compat.in_forks"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=250,
        check=True,
    )
    found: dict[str, tuple[int, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", [program.__name__ for program in PROGRAMS])
def test_use_works_and_is_still_needed(name: str, outcomes: dict[str, tuple[int, Any]]) -> None:
    exit_code, said = outcomes[name]
    assert exit_code == 0, said
