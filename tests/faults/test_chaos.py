"""A short `python -m tests.chaos` of each strategy: promises that hold after any fault."""

from pathlib import Path

import pytest

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
from tests.cluster.runs import TOPOLOGIES, Topology, train

EVERY_STEPS = 40
PLANS = {
    TOPOLOGIES["mirrored-2"]: ["kill worker 0", "kill launcher"],
    TOPOLOGIES["multiworker-2"]: ["kill worker 1", "term worker 0", "kill worker 0"],
    SYNC: ["kill worker 1", "stop worker 0", "kill ps 0"],
    ASYNC: ["kill worker 1", "term worker 0", "kill chief 0"],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("topology", PLANS, ids=str)
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
        expected = {
            ("kill", False): "started again",
            ("kill", True): "alone",
            ("stop", False): "wait",
            ("stop", True): "wait",
            ("term", False): "all save",
            ("term", True): "all save",
        }[event.fault.kind, is_alone]
        if event.fault.task == "launcher":
            expected = "end by themselves"
        assert expected in outcome.seen, event
