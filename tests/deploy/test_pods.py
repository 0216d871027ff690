"""Pods whose names come late, and whose addresses change and are used again by other pods."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.journal import pause_of
from tests.cluster.hosts import needs_hosts
from tests.cluster.runs import assert_nothing_left, largest_difference, train
from tests.deploy.pods import Job, Late, pods
from tests.unit.test_deploy import KUBERNETES, Started, kind, pods_of_job, tasks_of

pytestmark = needs_hosts

NUM_EVENTS = 50
COUNTED_STEPS = 5000
USUAL = ("--num_threads=1", "--stall_timeout_secs=40")
SLOW, COUNTING = "--config=tests/cluster/configs/slow.py", "--config=tests/chaos/counting.py"
FLAGS = {
    False: (SLOW, "--config.checkpoint_every_steps=20", "--config.train_steps=1200", *USUAL),
    True: (COUNTING, f"--train_steps={COUNTED_STEPS}", *USUAL),
}
# Pods that stop at once, or are gone; and names that lead nowhere, or to another pod.
KINDS = ("evicted", "killed", "late", "stale", "swapped")
# The clusters of the pods, on one host.
SAME_SIZE = {"multiworker": "multiworker-4", "ps-sync": "ps-sync-3+1"}


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
@pytest.mark.parametrize("mode", [*SAME_SIZE, "ps-async"])
def test_run_finishes_after_fifty_random_events(mode: str, digits: Path, tmp_path: Path) -> None:
    """While a worker of asynchronous ps is away the others train: this run pauses meanwhile."""
    tasks = four_workers() if mode == "multiworker" else tasks_of("kubernetes/jobset-ps.yaml")
    sync = ("--sync_replicas",) if mode == "ps-sync" else ()
    events = list(KINDS) * (NUM_EVENTS // len(KINDS))
    began, chance = time.monotonic(), random.Random(38)
    chance.shuffle(events)
    pause = pause_of(tmp_path / "run")
    if mode == "ps-async":
        pause.write_text("1.0")  # After every 5 steps.
    flags = (*FLAGS[mode == "ps-async"], *sync, f"--data_dir={digits}")
    with pods(tasks, tmp_path, flags, chance) as job:
        disturb_all(job, events, chance, began)
        assert mode != "ps-async" or job.step < COUNTED_STEPS, "the run was over too early"
        pause.unlink(missing_ok=True)
        run, *_ = job.finish()
    assert_nothing_left(tmp_path / "run")
    if mode == "ps-async":
        (weight,) = run.weights().values()
        assert weight == run.result["step"] >= COUNTED_STEPS, "each update adds 1"
        assert run.result["batches"]["handed_out"] == run.result["batches"]["finished"]
        return
    assert run.result["step"] == 1200
    other = train(SAME_SIZE[mode], tmp_path / "other", *flags, timeout_secs=600.0)
    assert largest_difference(run.weights(), other.weights()) == 0.0
