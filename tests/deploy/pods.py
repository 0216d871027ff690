"""Pods of a Kubernetes Job on this machine: their addresses and names change as they do there.

    with pods(tasks, tmp_path, flags, random.Random(1)) as job:
        job.run_until(lambda: job.step > 40, "step 40")
        job.end(job.pods[1], kills=True, late=Late(secs=5))
        runs = job.finish()

A pod that ends with 75, or by a signal, is started again at another address, as the files of
deploy/kubernetes say. Each place is a network namespace (benchmarks/hosts.py), so a user needs
root.
"""

import contextlib
import dataclasses
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.hosts import Host, hosts
from tests.cluster.hosts import etc
from tests.cluster.runs import ROOT, Process, Run, last_step
from tests.unit.test_deploy import Started
from trainer.exit_codes import EXIT_RESTART

_DOMAIN = "default.svc.cluster.local"
_RESTARTED = (EXIT_RESTART, -signal.SIGKILL, -signal.SIGTERM)
_TIMEOUT_SECS = 240.0
_POLL_SECS = 0.05


@dataclasses.dataclass(frozen=True)
class Late:
    """How a name follows a pod that starts again.

    Attributes:
        secs: From the start of the pod until its name has the new address.
        is_stale: The name has the former address until then; otherwise it is unknown.
    """

    secs: float = 0.0
    is_stale: bool = False


@dataclasses.dataclass
class Pod:
    """One task: where it runs, if it does, and when its name is known."""

    task: Started
    place: Host
    process: Process | None = None
    late: Late = Late()
    named_at: float | None = None
    run: Run | None = None

    @property
    def name(self) -> str:
        return f"{self.task.host}.{_DOMAIN}"


class Job:
    """The controller of the pods, and the names that they see."""

    def __init__(
        self,
        tasks: Sequence[Started],
        places: Sequence[Host],
        names: Path,
        model_dir: Path,
        flags: Sequence[str],
        chance: random.Random,
    ) -> None:
        self.pods = [Pod(task, place) for task, place in zip(tasks, places, strict=False)]
        self._places = places
        self._names = names
        self._addresses: dict[str, str] = {}
        self._model_dir = model_dir
        self._flags = tuple(flags)
        self._chance = chance

    @property
    def step(self) -> int:
        return last_step(self._model_dir)

    def running(self) -> list[Pod]:
        return [p for p in self.pods if p.process and p.process.popen.poll() is None]

    def end(
        self, pod: Pod, *, kills: bool, late: Late | None = None, place: Host | None = None
    ) -> None:
        """Ends `pod`, as an eviction or the loss of its node does; it starts again at `place`."""
        assert pod.process, f"{pod.task.host} does not run"
        pod.process.send(signal.SIGKILL if kills else signal.SIGTERM)
        used = [other.place for other in self.pods]
        free = [place for place in self._places if place not in used]
        pod.place, pod.late = place or self._chance.choice(free), late or Late()

    def run_until(self, condition: Callable[[], bool], what: str) -> None:
        """Does what the controller does until `condition` holds; fails at a time limit."""
        deadline = time.monotonic() + _TIMEOUT_SECS
        while not condition():
            for pod in self.pods:
                self._follow(pod)
            assert time.monotonic() < deadline, f"no {what}\n{self._output()}"
            time.sleep(_POLL_SECS)

    def _output(self) -> str:
        return "\n".join(pod.process.output() for pod in self.pods if pod.process)

    def finish(self) -> list[Run]:
        """Returns the last run of each pod once all have ended with 0."""
        self.run_until(lambda: all(pod.run for pod in self.pods), "end of the run")
        return [pod.run for pod in self.pods if pod.run]

    def start(self) -> None:
        for pod in self.pods:
            self._start(pod)

    def _follow(self, pod: Pod) -> None:
        if pod.run:
            return
        if pod.process is None:
            self._start(pod)
        elif pod.process.popen.poll() is not None:
            run = pod.process.wait_alone()
            if run.exit_code == 0:
                pod.run = run
            else:
                assert run.exit_code in _RESTARTED, f"{run.exit_code}\n{pod.process.output()}"
            self._close(pod)
        elif pod.named_at is not None and time.monotonic() >= pod.named_at:
            pod.named_at = None
            self._name(pod, pod.place.address)

    def _start(self, pod: Pod) -> None:
        if not pod.late.is_stale:
            self._name(pod, None)
        pod.named_at = time.monotonic() + pod.late.secs
        pod.late = Late()
        pod.process = Process(
            (*pod.task.argv, *self._flags, f"--model_dir={self._model_dir}"),
            self._model_dir,
            env={**pod.task.environment, "KUBERNETES_SERVICE_HOST": "10.96.0.1"},
            under=pod.place.command,
        )

    def _name(self, pod: Pod, address: str | None) -> None:
        self._addresses.pop(pod.name, None)
        if address:
            self._addresses[pod.name] = address
        changed = self._names.with_suffix(".changed")
        changed.write_text(json.dumps(self._addresses))
        changed.replace(self._names)

    def _close(self, pod: Pod) -> None:
        if pod.process:
            pod.process.__exit__(None, None, None)
            pod.process = None

    def close(self) -> None:
        """Kills the pods that run."""
        for pod in self.pods:
            self._close(pod)


@contextlib.contextmanager
def pods(
    tasks: Sequence[Started],
    directory: Path,
    flags: Sequence[str],
    chance: random.Random,
    num_spare: int = 2,
) -> Iterator[Job]:
    """Starts a pod for each task, with its run in `directory`/run; ends them all.

    `num_spare` is the number of addresses that no pod has at a time.
    """
    names = directory / "names.json"
    names.write_text("{}")
    with contextlib.ExitStack() as stack:
        dns, *places = stack.enter_context(hosts(1 + len(tasks) + num_spare))
        text = f"nameserver {dns.address}\nsearch {_DOMAIN}\noptions ndots:5 timeout:2\n"
        for place in places:
            files = {"hosts": "127.0.0.1 localhost\n", "resolv.conf": text}
            stack.enter_context(etc(place, files))
        command = (sys.executable, "-m", "tests.deploy.name_server", dns.address, str(names))
        server = subprocess.Popen([*dns.command, *command], cwd=ROOT)
        stack.callback(server.wait)
        stack.callback(server.kill)
        job = Job(tasks, places, names, directory / "run", flags, chance)
        stack.callback(job.close)
        job.start()
        yield job
