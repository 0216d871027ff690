"""One training run under a strategy, disturbed at random moments, and checks of its result.

    python -m tests.chaos --strategy=ps --sync_replicas --kills=50 --seed=1
    python -m tests.chaos --strategy=multiworker --minutes=5 --faults=kill,stop,term

Prints a table of the faults and their outcomes, and ends with 0 if everything holds:

| of | what holds |
| --- | --- |
| every run | it finishes; no process is left; no file is damaged |
| synchronous strategies | weights and optimizer are bit for bit those of an undisturbed run |
| asynchronous | every update that was applied is counted, and every batch was done |
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from data.prepare.preparing import prepare
from tests.chaos.chaos import (
    check_complete,
    check_counts,
    check_same,
    disturb,
    outcomes,
    table,
    tasks_of,
)
from tests.chaos.faults import KINDS, STALL_TIMEOUT_SECS, plan
from tests.cluster.runs import TOPOLOGIES, Topology, train

# About the rate on two cores, with the recoveries.
_FAULTS_A_MINUTE = 5
_EVERY_STEPS = 40
# An asynchronous run continues while a worker restarts: about as long as a restart takes.
_EVERY_STEPS_ASYNC = 400

SYNC = Topology(
    "ps-sync-2+1",
    "ps",
    ("--workers=2", "--ps=1", "--sync_replicas", "--num_threads=1"),
    ("chief-0", "worker-0", "worker-1", "ps-0"),
)
ASYNC = TOPOLOGIES["ps-2+1"]
_TOPOLOGIES = {
    ("mirrored", False): TOPOLOGIES["mirrored-2"],
    ("multiworker", False): TOPOLOGIES["multiworker-2"],
    ("ps", False): ASYNC,
    ("ps", True): SYNC,
}


def flags_for(topology: Topology, data_dir: Path, num_steps: int) -> tuple[str, ...]:
    """The flags of a run that can be disturbed for `num_steps` steps, and checked afterwards."""
    name = "counting" if topology == ASYNC else "digits"
    flags = (f"--config=tests/chaos/{name}.py", f"--data_dir={data_dir}")
    return (*flags, f"--train_steps={num_steps}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--strategy", choices=("mirrored", "multiworker", "ps"), required=True)
    parser.add_argument("--sync_replicas", action="store_true")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="about how long")
    length.add_argument("--kills", type=int, help="how many faults, whatever --faults they are")
    parser.add_argument("--faults", default="kill", help=f"of {','.join(KINDS)}")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--directory", type=Path, help="for the runs; it stays afterwards")
    arguments = parser.parse_args()
    kinds = arguments.faults.split(",")
    topology = _TOPOLOGIES.get((arguments.strategy, arguments.sync_replicas))
    if topology is None:
        parser.error("--sync_replicas is for --strategy=ps")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--faults has {', '.join(unknown)}, but knows only {', '.join(KINDS)}")
    num_faults = arguments.kills or max(1, round(arguments.minutes * _FAULTS_A_MINUTE))
    every_steps = _EVERY_STEPS_ASYNC if topology == ASYNC else _EVERY_STEPS
    num_steps = num_faults * every_steps
    seed = f"{topology} {arguments.seed}"
    faults = plan(tasks_of(topology), kinds, num_faults, every_steps, seed)
    with tempfile.TemporaryDirectory() as temporary:
        data_dir = Path(temporary) / "digits"
        prepare("digits", str(data_dir))
        flags = flags_for(topology, data_dir, num_steps)
        patience = (f"--stall_timeout_secs={STALL_TIMEOUT_SECS}",) if "stall" in kinds else ()
        directory = arguments.directory or Path(temporary)
        disturbed = (*flags, f"--max_restarts={num_faults}", *patience)
        story = disturb(topology, directory / "disturbed", disturbed, faults)
        for event, outcome in zip(story.events, outcomes(story), strict=True):
            print(event.fault, outcome, file=sys.stderr)
        print(table([story]), flush=True)
        print(
            f"{len(story.events)} faults, {story.num_kills} of them SIGKILL, in one run of "
            f"{num_steps:,} steps and {story.seconds:.0f} s; {story.num_endings} processes have "
            "ended, and none is left."
        )
        check_complete(story, num_steps)
        print("The run is done, and no file is damaged.")
        if topology == ASYNC:
            check_counts(story)
            print(f"Every update is counted: {story.run.result['batches']}.")
        else:
            check_same(story, train(topology, directory / "undisturbed", *flags))
            print("Its variables are bit for bit those of a run without faults.")


if __name__ == "__main__":
    # So that contexts are left, and the run with them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
