"""A short `python -m tests.chaos` of each strategy: promises that hold after any fault."""

import math
from pathlib import Path

import pytest

from tests.chaos import on_hosts
from tests.chaos.__main__ import ASYNC, SYNC, flags_for
from tests.chaos.chaos import (
    LocalRun,
    check_complete,
    check_counts,
    check_same,
    disturb,
    outcomes,
)
from tests.chaos.faults import Fault
from tests.chaos.on_hosts import HostsRun
from tests.cluster.hosts import needs_hosts
from tests.cluster.runs import Topology, train
from tests.faults.disks import mounted

pytestmark = pytest.mark.nightly

EVERY_STEPS = 40
PLANS = {
    Topology("mirrored-2"): ["kill worker 0", "kill launcher"],
    Topology("multiworker-2"): ["kill worker 1", "term worker 0", "kill worker 0"],
    SYNC: ["kill worker 1", "stop worker 0", "kill ps 0"],
    ASYNC: ["kill worker 1", "term worker 0", "kill chief 0"],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("topology", PLANS)
def test_disturbed_run_finishes_with_nothing_lost_damaged_or_left(
    topology: Topology, digits: Path, tmp_path: Path
) -> None:
    faults = []
    for number, words in enumerate(PLANS[topology], 1):
        kind, _, task = words.partition(" ")
        faults.append(Fault(kind, task, EVERY_STEPS * number, delay_secs=0.3, secs=2.0))
    num_steps = EVERY_STEPS * (len(faults) + 2)
    flags = flags_for(topology, digits, num_steps)

    story = disturb(LocalRun(topology, tmp_path / "run", (*flags, "--max_restarts=3")), faults)

    assert len(story.events) == len(faults), "the run was over before its faults"
    check_complete(story, num_steps)
    if topology == ASYNC:
        check_counts(story)
    else:
        check_same(story, train(topology, tmp_path / "undisturbed", *flags))
    for event, outcome in zip(story.events, outcomes(story), strict=True):
        is_alone = topology.strategy == "ps" and event.fault.task.startswith("worker")
        killed = "alone" if is_alone else "started again"
        expected = {"kill": killed, "stop": "wait", "term": "all save"}[event.fault.kind]
        if event.fault.task == "launcher":
            expected = "end by themselves"
        assert expected in outcome.seen, event


@pytest.mark.timeout(240)
@needs_hosts
def test_disturbed_run_on_hosts_finishes_after_a_full_disk_and_a_host_that_is_lost(
    digits: Path, tmp_path: Path
) -> None:
    faults = [
        Fault("disk", "chief 0", 40, delay_secs=0, secs=2.0),
        Fault("cut", "worker 1", 80, delay_secs=0, secs=5.0, direction="both", peer="ps 0"),
        Fault("lose", "worker 1", 120, delay_secs=0, secs=math.inf, direction="from"),
    ]
    num_steps = 1000
    timeouts = ("--stall_timeout_secs=20", "--chief_timeout_secs=20")
    flags = flags_for(SYNC, digits, num_steps)
    model_dir = tmp_path / "run"
    model_dir.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=32m", "tmpfs", at=model_dir):
        run = HostsRun(SYNC, model_dir, (*flags, *timeouts), timeout_secs=20)
        story = disturb(run, faults)
        assert len(story.events) == len(faults), "the run was over before its faults"
        check_complete(story, num_steps)
        check_same(story, train(SYNC, tmp_path / "undisturbed", *flags))
        assert [ending.task for ending in run.endings][:1] == ["worker 1"]
        *_, lost = on_hosts.outcomes(story, run)
    assert lost.seen == "it ends"
    assert lost.named_secs is not None
    assert lost.named_secs < 20, "the stall timeout"
