"""Pods whose names come late, and whose addresses change and are used again by other pods."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.hosts import reason_why_not
from tests.chaos.journal import pause_of
from tests.cluster.runs import Topology, assert_nothing_left, largest_difference, train
from tests.deploy.pods import Job, Late, pods
from tests.unit.test_deploy import KUBERNETES, Started, kind, pods_of_job, tasks_of

pytestmark = pytest.mark.skipif(
    bool(reason_why_not()), reason=reason_why_not() or "hosts can be made"
)

NUM_EVENTS = 50
FLAGS = (
    "--config=tests/cluster/configs/slow.py",
    "--config.checkpoint_every_steps=20",
    "--config.train_steps=1200",
    "--num_threads=1",
    "--stall_timeout_secs=40",
)
COUNTED_STEPS = 5000
COUNTING = (
    "--config=tests/chaos/counting.py",
    f"--train_steps={COUNTED_STEPS}",
    "--num_threads=1",
    "--stall_timeout_secs=40",
)
# Pods that stop at once, or are gone; and names that lead nowhere, or to another pod.
KINDS = ("evicted", "killed", "late", "stale", "swapped")
# The clusters of the pods, on one host.
SAME_SIZE = {
    "multiworker": Topology("multiworker", "multiworker", ("--workers=4",)),
    "ps-sync": Topology("ps-sync", "ps", ("--workers=3", "--ps=1", "--sync_replicas")),
}


def four_workers() -> list[Started]:
    job = kind(KUBERNETES / "indexed-job.yaml", "Job")
    spec = job["spec"] | {"completions": 4, "parallelism": 4}
    (container,) = spec["template"]["spec"]["containers"]
    container["args"].append("--workers=4")
    return list(pods_of_job(spec, job["metadata"]["name"], {}, job["metadata"]["name"]))


def disturb(job: Job, event: str, chance: random.Random) -> None:
    """Returns when the event has happened."""
    job.run_until(lambda: len(job.running()) > 1, "two pods that run")
    first, second = chance.sample(job.running(), 2)
    late = Late(chance.uniform(3, 8), is_stale=event in ("stale", "swapped"))
    if event == "swapped":
        former = first.place
        job.end(first, kills=True, late=late, place=second.place)
        job.end(second, kills=True, late=late, place=former)
    elif event in ("late", "stale"):
        job.end(first, kills=True, late=late)
    else:
        job.end(first, kills=event == "killed")
    process = first.process
    job.run_until(lambda: first.process is not process, f"end of {first.task.host}")


def disturb_all(job: Job, events: Sequence[str], chance: random.Random, began: float) -> None:
    for event in events:
        if chance.random() < 0.5:  # The others come while the run recovers.
            goal = job.step + 20
            job.run_until(lambda: job.step >= goal, f"step {goal}")  # noqa: B023
        print(f"{time.monotonic() - began:.0f} s: step {job.step}, {event}")
        disturb(job, event, chance)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_asynchronous_run_counts_every_update_after_fifty_random_events(
    digits: Path, tmp_path: Path
) -> None:
    """While a worker is away the others train, so the run pauses until all events have happened."""
    events = list(KINDS) * (NUM_EVENTS // len(KINDS))
    began, chance = time.monotonic(), random.Random(38)
    chance.shuffle(events)
    pause = pause_of(tmp_path / "run")
    pause.write_text("1.0")  # After every 5 steps.
    flags = (*COUNTING, f"--data_dir={digits}")
    with pods(tasks_of("kubernetes/jobset-ps.yaml"), tmp_path, flags, chance) as job:
        disturb_all(job, events, chance, began)
        assert job.step < COUNTED_STEPS, "the run was over too early"
        pause.unlink()
        runs = job.finish()
    assert_nothing_left(tmp_path / "run")
    result = runs[0].result
    (weight,) = runs[0].weights().values()
    assert weight == result["step"] >= COUNTED_STEPS, "each update adds 1"
    assert result["batches"]["handed_out"] == result["batches"]["finished"]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", SAME_SIZE)
def test_run_finishes_after_fifty_random_events(mode: str, digits: Path, tmp_path: Path) -> None:
    tasks = four_workers() if mode == "multiworker" else tasks_of("kubernetes/jobset-ps.yaml")
    sync = ("--sync_replicas",) if mode == "ps-sync" else ()
    events = list(KINDS) * (NUM_EVENTS // len(KINDS))
    began, chance = time.monotonic(), random.Random(38)
    chance.shuffle(events)
    flags = (*FLAGS, *sync, f"--data_dir={digits}")
    with pods(tasks, tmp_path, flags, chance) as job:
        disturb_all(job, events, chance, began)
        runs = job.finish()
    assert_nothing_left(tmp_path / "run")
    assert runs[0].result["step"] == 1200
    other = train(SAME_SIZE[mode], tmp_path / "other", *flags, timeout_secs=600.0)
    assert largest_difference(runs[0].weights(), other.weights()) == 0.0
