"""A disturbed run of multiworker on several hosts, each with a launcher, as docs/clusters.md says.

    run = LaunchersRun(topology, model_dir, flags)
    story = disturb(run, faults)        # of tasks, and of `launcher 2`

The launchers are started in any order, with the same command. A launcher that was killed is started
again, with the same command, when its task has ended by itself. Nothing else is done by hand.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import psutil
from typing_extensions import override

from benchmarks.hosts import Host, hosts
from tests.chaos.chaos import Disturbed, tasks_of
from tests.chaos.faults import LAUNCHER, Fault
from tests.cluster.runs import Process, Run, Topology, assert_nothing_left

_END_SECS = 100.0


class LaunchersRun(Disturbed):
    """Launcher i is on host i, with worker i."""

    patience_secs = 300.0

    def __init__(self, topology: Topology, model_dir: Path, flags: Sequence[str]) -> None:
        super().__init__(topology, model_dir, flags)
        self._num = len(tasks_of(topology))
        self._launchers: dict[str, Process] = {}
        self._num_launches = 0

    @override
    def _start(self) -> None:
        self._places: tuple[Host, ...] = self._stack.enter_context(hosts(self._num))
        order = list(range(self._num))
        random.Random(0).shuffle(order)
        for index in order:
            self._launch(index)

    def _launch(self, index: int) -> None:
        argv = [flag for flag in self.topology.argv if not flag.startswith("--workers=")]
        listed = ",".join(place.address for place in self._places)
        argv += [f"--hosts={listed}", f"--model_dir={self.model_dir}", *self._flags]
        process = Process(tuple(argv), self.model_dir, under=self._places[index].command)
        self._launchers[f"{LAUNCHER} {index}"] = self._stack.enter_context(process)
        self._num_launches += 1

    @override
    def _is_over(self) -> bool:
        for name, process in self._launchers.items():
            code = process.popen.poll()
            assert code in (None, 0), f"{name} has ended with {code}:\n{process.output()}"
        return self._launchers[f"{LAUNCHER} 0"].popen.poll() == 0

    @override
    def _output(self) -> str:
        return "\n".join(f"{n}:\n{process.output()}" for n, process in self._launchers.items())

    @override
    def _process_of(self, task: str) -> psutil.Process:
        if launcher := self._launchers.get(task):
            return psutil.Process(launcher.popen.pid)
        return self._launchers[f"{LAUNCHER} 0"].task(task)

    @override
    def _handle_end(self, fault: Fault) -> bool:
        if fault.task.startswith(LAUNCHER):
            process = self._launchers[fault.task]
            if process.wait_alone().exit_code == 0:  # It was done just before.
                return False
            process.wait_for_family_to_end()
            self._launch(int(fault.task.split()[1]))
        return True

    @override
    def finish(self) -> Run:
        runs = [process.wait_alone(_END_SECS) for _, process in sorted(self._launchers.items())]
        assert [run.exit_code for run in runs] == [0] * self._num, self._output()
        for process in self._launchers.values():
            process.wait_for_family_to_end()
        assert_nothing_left(self.model_dir)
        return runs[0]

    @override
    def num_endings(self) -> int:
        return self._num_launches + self._num_starts("worker-*")
