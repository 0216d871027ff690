"""Cuts the link of a host during an elastic run of multiworker, and prints what follows.

    python -m tests.chaos.links

Three hosts (network namespaces, which need root) train with --min_workers=2. In each of three runs
the packets of the first host, whose task is the chief, are dropped without an error: those that it
sends, for 20 s; all, for 20 s; all, for good. After 20 s all three must continue together. Without
the host the others must continue within --rejoin_secs + 10 s. The weights must be those of an
undisturbed run to 1e-5. Ends with 0 if all of this holds.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.hosts import dropped, hosts, num_dropped, reason_why_not
from tests.chaos.journal import journal_of
from tests.cluster.elastic import Launchers, difference_from, flags_for, group
from tests.cluster.runs import Run, lines_so_far, train

_STEPS = 600
_CUT_SECS = 20.0
_REJOIN_SECS = 40.0  # Longer than a cut, and the time that connections need to recover.
_LATE_SECS = 10.0
_FIRST_STEP = 60  # After which the link is cut.
_CALL_SECS = 3.0  # A call of the executor that had begun before may end this much later.


class Cut(NamedTuple):
    """A kind of cut. One that is for good lasts until the end of the run."""

    name: str
    is_one_way: bool
    is_for_good: bool


_CUTS = (
    Cut("what it sends, for 20 s", True, False),
    Cut("all, for 20 s", False, False),
    Cut("all, for good", False, True),
)


class Seen(NamedTuple):
    """What followed a cut. `secs` is from its begin to the next step."""

    num_packets: int
    secs: float
    num_members: int
    difference: float


def steps_after(model_dir: Path, when: float) -> list[float]:
    """The times of the chief's calls after `when`."""
    lines = lines_so_far(journal_of(model_dir))
    return [line["time"] for line in lines if not line["begins"] and line["time"] > when]


def disturbed(cut: Cut, model_dir: Path, undisturbed: Run) -> Seen:
    """Runs until the end, with one cut."""
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(hosts(3))
        launchers = Launchers(
            stack,
            model_dir,
            ",".join(host.address for host in places),
            (*flags_for(_STEPS), "--min_workers=2", f"--rejoin_secs={_REJOIN_SECS:g}"),
            tuple(host.command for host in places),
        )
        launchers.start(0, 1, 2)
        launchers.on[0].wait_for_step(_FIRST_STEP)
        directions = [(places[0], other) for other in places[1:]]
        if not cut.is_one_way:
            directions += [(other, host) for host, other in directions]

        def wait_for_step_after(when: float) -> None:
            launchers.on[1].wait_until(lambda: bool(steps_after(model_dir, when)), "a step")

        with contextlib.ExitStack() as cuts:
            cuts.enter_context(dropped(*directions))
            began = time.time()
            if cut.is_for_good:
                wait_for_step_after(began + _CALL_SECS)
                launchers.finish(_STEPS)
            else:
                time.sleep(_CUT_SECS)
            num_packets = num_dropped(*directions)
        if not cut.is_for_good:
            wait_for_step_after(began + _CUT_SECS)
            launchers.finish(_STEPS)
    secs = min(steps_after(model_dir, began + _CALL_SECS)) - began
    num_members = len(group(model_dir)) or len(places)
    return Seen(num_packets, secs, num_members, difference_from(undisturbed, model_dir))


def check(cut: Cut, seen: Seen) -> None:
    """Raises AssertionError if what followed is not what must follow."""
    assert seen.num_packets > 0, "there was no fault"
    assert seen.difference < 1e-5, seen
    if cut.is_for_good:
        assert seen.num_members == 2, seen
        assert seen.secs <= _REJOIN_SECS + _LATE_SECS, seen
    else:
        assert seen.num_members == 3, seen
        assert seen.secs >= _CUT_SECS - _CALL_SECS, "steps were made during the cut"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    if why_not := reason_why_not():
        sys.exit(f"error: Hosts cannot be made here: {why_not}")
    print("| dropped packets of host 0 | packets | s to the next step | hosts then | difference |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        undisturbed = train("mirrored-2", Path(name) / "undisturbed", *flags_for(_STEPS))
        for number, cut in enumerate(_CUTS):
            seen = disturbed(cut, Path(name) / f"run-{number}", undisturbed)
            print(
                f"| {cut.name} | {seen.num_packets} | {seen.secs:.1f} | {seen.num_members} "
                f"| {seen.difference:.1e} |",
                flush=True,
            )
            check(cut, seen)


if __name__ == "__main__":
    # So that contexts are left, and the run with them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
