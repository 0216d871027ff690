"""Which cores workers of one machine keep to, and that they do."""

import os
import subprocess
import sys

import pytest

from data.cores import cores
from trainer.binding import core_env, core_shares

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds processes")

_KEEPS = """
import os, threading
from trainer.binding import keep_to_cores
found, is_bound = [], threading.Event()
def look():
    is_bound.wait()
    found.append(sorted(os.sched_getaffinity(0)))
before = threading.Thread(target=look)
before.start()
keep_to_cores()
is_bound.set()
after = threading.Thread(target=look)
after.start()
before.join()
after.join()
assert found[0] == found[1], found
print(*found[0], "TRAINER_CORES" in os.environ)
"""


@pytest.mark.parametrize(
    ("num_tasks", "shares"),
    [
        (1, [[0, 1, 4, 5, 9]]),
        (2, [[0, 1], [4, 5, 9]]),
        (5, [[0], [1], [4], [5], [9]]),
        (6, [[], [], [], [], [], []]),
    ],
)
def test_cores_that_this_process_may_run_on_are_divided(
    num_tasks: int, shares: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 5, 4, 1, 0})
    assert core_shares(num_tasks) == shares


@pytest.mark.parametrize("ours", [[], cores()[-1:], [*cores()[:1], 100_000]])
def test_task_and_its_threads_keep_to_the_cores_that_the_launcher_names(ours: list[int]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _KEEPS],
        env={**os.environ, **core_env(ours)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    # Of those that are there.
    wanted = [core for core in ours if core in cores()] or cores()
    assert ended.stdout.split() == [*map(str, wanted), "False"]
