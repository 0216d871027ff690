"""CPU affinity of workers on one machine."""

import os
import sys

import pytest

from data.system.cores import affinity_env, cores, cpu_groups
from tests.commands import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has CPU affinity")

_PIN = """
import os, threading
from data.system.cores import pin_to_cpus
found, is_pinned = [], threading.Event()
def look():
    is_pinned.wait()
    found.append(sorted(os.sched_getaffinity(0)))
before = threading.Thread(target=look)
before.start()
pin_to_cpus()
is_pinned.set()
after = threading.Thread(target=look)
after.start()
before.join()
after.join()
assert found[0] == found[1], found
print(*found[0], "TRAINER_CORES" in os.environ)
"""


@pytest.mark.parametrize(
    ("num_tasks", "groups"),
    [
        (1, [[0, 1, 4, 5, 9]]),
        (2, [[0, 1], [4, 5, 9]]),
        (5, [[0], [1], [4], [5], [9]]),
        (6, [[], [], [], [], [], []]),
    ],
)
def test_cores_that_this_process_may_run_on_are_divided(
    num_tasks: int, groups: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 5, 4, 1, 0})
    assert cpu_groups(num_tasks) == groups


@pytest.mark.parametrize("ours", [[], cores()[-1:], [*cores()[:1], 100_000]])
def test_task_and_its_threads_run_on_the_cores_that_the_launcher_names(ours: list[int]) -> None:
    ended = run_python("-c", _PIN, env={**os.environ, **affinity_env(ours)}, check=True)
    # Cores that do not exist are ignored.
    wanted = [core for core in ours if core in cores()] or cores()
    assert ended.stdout.split() == [*map(str, wanted), "False"]
