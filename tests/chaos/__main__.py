"""One training run under a strategy, disturbed at random moments, and checks of its result.

    python -m tests.chaos --strategy=ps --sync_replicas --kills=50 --seed=1
    python -m tests.chaos --strategy=multiworker --minutes=5 --faults=kill,stop,term
    python -m tests.chaos --strategy=ps --hosts --kills=30 --faults=drop
    python -m tests.chaos --strategy=multiworker --launchers --kills=50

With --hosts each task is on a host of its own (a network namespace, which needs root), and is
started again by hand where it ends with 75. With --launchers four workers are on hosts of their
own, each with a launcher, and launchers are killed too. Otherwise the tasks are a local cluster.
Prints a table of the faults and their outcomes, and ends with 0 if everything holds:

| of | what holds |
| --- | --- |
| every run | it finishes; no process is left; no file is damaged |
| synchronous strategies | weights and optimizer are bit for bit those of an undisturbed run |
| with a backup worker | every step has its number of gradients |
| asynchronous | every update that was applied is counted, and every batch was done |

The faults: kill (SIGKILL), stop (SIGSTOP for some seconds), stall (SIGSTOP; local clusters only),
term (SIGTERM), interrupt (Ctrl-C; local clusters only), disk (the disk of the run is full for some
seconds); and with --hosts drop (packets from a task, to it, or both, are dropped without an error
for 5 to 60 s), lose (until the task has ended by itself), cut (packets between two tasks are
dropped for 5 to 60 s). `python -m tests.chaos.times` compares recorded times with a clock.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.hosts import reason_why_not
from data.prepare.preparing import prepare
from tests.chaos import on_hosts
from tests.chaos.chaos import (
    Disturbed,
    LocalRun,
    check_backups,
    check_complete,
    check_counts,
    check_same,
    disturb,
    outcomes,
    table,
    tasks_of,
)
from tests.chaos.faults import KINDS, LAUNCHER, NETWORK, STALL_TIMEOUT_SECS, plan
from tests.chaos.launchers import LaunchersRun
from tests.cluster.runs import Topology, train
from tests.faults.disks import mounted

# About the rate on two cores, with the recoveries.
_FAULTS_A_MINUTE = 5
_EVERY_STEPS = 40
# An asynchronous run continues while a worker restarts: about as long as a restart takes.
_EVERY_STEPS_ASYNC = 400
# On hosts, with longer pauses. Most runs continue during most faults, some hundred steps.
_EVERY_STEPS_ON_HOSTS = 40
_STEPS_PER_FAULT_ON_HOSTS = 300
# On hosts. A task may be silent for half of the first; the second is --chief_timeout_secs.
_HOSTS_STALL_SECS, _HOSTS_CHIEF_SECS = 20, 40

SYNC, ASYNC, BACKUP = map(Topology, ("ps-sync-2+1", "ps-2+1", "ps-sync-3+1"))
ON_FOUR_HOSTS = Topology("multiworker-4")
_TOPOLOGIES = {
    ("mirrored", False, False): Topology("mirrored-2"),
    ("multiworker", False, False): Topology("multiworker-2"),
    ("ps", False, False): ASYNC,
    ("ps", True, False): SYNC,
    ("ps", True, True): BACKUP,
}


def flags_for(topology: Topology, data_dir: Path, num_steps: int) -> tuple[str, ...]:
    """The flags of a run that can be disturbed for `num_steps` steps, and checked afterwards."""
    name = "counting" if topology == ASYNC else "digits"
    backup = ("--replicas_to_aggregate=2",) if topology == BACKUP else ()
    flags = (f"--config=tests/chaos/{name}.py", f"--data_dir={data_dir}", *backup)
    return (*flags, f"--train_steps={num_steps}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--strategy", choices=("mirrored", "multiworker", "ps"), required=True)
    parser.add_argument("--sync_replicas", action="store_true")
    parser.add_argument("--backup", action="store_true", help="with a backup worker")
    parser.add_argument("--hosts", action="store_true", help="each task on a host of its own")
    parser.add_argument("--launchers", action="store_true", help="a launcher on each of 4 hosts")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="about how long")
    length.add_argument("--kills", type=int, help="how many faults, whatever --faults they are")
    parser.add_argument("--faults", default="kill", help=f"of {','.join(KINDS)}")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--directory", type=Path, help="for the runs; it stays afterwards")
    arguments = parser.parse_args()
    kinds = arguments.faults.split(",")
    mode = arguments.strategy, arguments.sync_replicas, arguments.backup
    topology = _TOPOLOGIES.get(mode)
    if topology is None:
        parser.error("--sync_replicas is for --strategy=ps, and --backup for --sync_replicas")
    if arguments.launchers:
        if arguments.hosts or arguments.strategy != "multiworker" or kinds != ["kill"]:
            parser.error("--launchers is for --strategy=multiworker and SIGKILL, without --hosts")
        topology = ON_FOUR_HOSTS
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--faults has {', '.join(unknown)}, but knows only {', '.join(KINDS)}")
    if arguments.hosts or arguments.launchers:
        if {"stall", "interrupt"} & set(kinds) or len(topology.tasks) < 2:
            parser.error(
                "--hosts needs tasks that end by themselves: no stall, interrupt or mirrored"
            )
        if why_not := reason_why_not():
            parser.error(f"Hosts cannot be made here: {why_not}")
    elif found := set(kinds) & set(NETWORK):
        parser.error(f"--faults={','.join(found)} needs --hosts")
    num_faults = arguments.kills or max(1, round(arguments.minutes * _FAULTS_A_MINUTE))
    every_steps = _EVERY_STEPS_ASYNC if topology == ASYNC else _EVERY_STEPS
    num_steps = num_faults * every_steps
    if arguments.hosts:
        every_steps = _EVERY_STEPS_ON_HOSTS
        num_steps = num_faults * _STEPS_PER_FAULT_ON_HOSTS
    seed = f"{topology} {arguments.seed}"
    targets = tasks_of(topology)
    if arguments.launchers:
        targets += [f"{LAUNCHER} {index}" for index in range(len(targets))]
    is_local = not (arguments.hosts or arguments.launchers)
    faults = plan(targets, kinds, num_faults, every_steps, seed, has_launcher=is_local)
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        data_dir = Path(temporary) / "digits"
        prepare("digits", str(data_dir))
        flags = flags_for(topology, data_dir, num_steps)
        directory = arguments.directory or Path(temporary)
        model_dir = directory / "disturbed"
        if "disk" in kinds:
            model_dir.mkdir(parents=True)
            stack.enter_context(mounted("-t", "tmpfs", "-o", "size=32m", "tmpfs", at=model_dir))
        run: Disturbed
        if arguments.hosts:
            timeouts = [f"--stall_timeout_secs={_HOSTS_STALL_SECS}"]
            if topology.strategy == "ps":
                timeouts.append(f"--chief_timeout_secs={_HOSTS_CHIEF_SECS}")
            run = on_hosts.HostsRun(
                topology, model_dir, (*flags, *timeouts), timeout_secs=_HOSTS_CHIEF_SECS
            )
        elif arguments.launchers:
            run = LaunchersRun(topology, model_dir, (*flags, f"--max_restarts={num_faults}"))
        else:
            patience = [f"--stall_timeout_secs={STALL_TIMEOUT_SECS}"] if "stall" in kinds else []
            run = LocalRun(topology, model_dir, (*flags, f"--max_restarts={num_faults}", *patience))
        story = disturb(run, faults)
        if isinstance(run, on_hosts.HostsRun):
            details: list[object] = [*on_hosts.outcomes(story, run)]
            found_table = on_hosts.table(story, run)
            ending = (
                f"{run.num_restarts} tasks were started again by hand; the last task ended "
                f"{run.last_secs:.0f} s after the chief"
            )
        else:
            details, found_table = [*outcomes(story)], table(story)
            ending = "none is left"
        for event, outcome in zip(story.events, details, strict=True):
            print(event.fault, outcome, file=sys.stderr)
        print(found_table, flush=True)
        print(
            f"{len(story.events)} faults, {story.num_kills} of them SIGKILL, in one run of "
            f"{num_steps:,} steps and {story.seconds:.0f} s; {story.num_endings} processes have "
            f"ended; {ending}."
        )
        check_complete(story, num_steps)
        print("The run is done, and no file is damaged.")
        if topology == ASYNC:
            check_counts(story)
            print(f"Every update is counted: {story.run.result['batches']}.")
        elif topology == BACKUP:
            check_backups(story, 2)
            print(f"Every step has 2 gradients: {story.run.result['worker_steps']}.")
        else:
            undisturbed = directory / "undisturbed"
            # Other programs may use the machine, too.
            timeout_secs = max(300.0, num_steps / 10)
            check_same(story, train(topology, undisturbed, *flags, timeout_secs=timeout_secs))
            print("Its variables are bit for bit those of a run without faults.")


if __name__ == "__main__":
    # So that contexts are left, and the run with them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
