"""A real Slurm on this machine: munged, slurmctld, and a slurmd on each of several hosts.

    with slurm(tmp_path / "slurm", num_nodes=3) as cluster:
        job = cluster.submit("--nodes=2", "job.sbatch", RUN="/shared/run")
        cluster.kill_node("n2")
        cluster.start_slurmd("n2")
        assert cluster.wait(job).exit_code == 0

Hosts are network namespaces (benchmarks/hosts.py), so a user needs root.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import psutil

from benchmarks.hosts import Host, hosts
from benchmarks.hosts import reason_why_not as reason_without_hosts
from tests.cluster.hosts import named
from tests.cluster.runs import ROOT

TIMEOUT_SECS = 120.0
# A requeued job waits until the credential of its former start has expired.
_CREDENTIAL_SECS = 10
_POLL_SECS = 0.1

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=login({login})
SlurmUser=root
AuthInfo=socket={directory}/munge,cred_expire={expire}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmdPidFile={directory}/%n.pid
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdParameters=config_overrides
SlurmdTimeout=15
KillWait=10
ProctrackType=proctrack/linuxproc
SchedulerParameters=sched_interval=2,bf_interval=2
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


class Job(NamedTuple):
    """What `scontrol show job` says of a job."""

    state: str
    exit_code: int
    restarts: int
    nodes: list[str]

    @property
    def is_over(self) -> bool:
        return self.state not in ("PENDING", "RUNNING", "COMPLETING")


def reason_why_not() -> str:
    """Returns why `slurm` would fail here; empty if it would work."""
    for command, package in (("slurmctld", "slurm-wlm"), ("slurmd", "slurm-wlm"), ("munged",) * 2):
        if shutil.which(command) is None:
            return f"the `{command}` command is missing (package {package.removesuffix('d')})"
    return reason_without_hosts()


@contextlib.contextmanager
def slurm(directory: Path, num_nodes: int) -> Iterator["Slurm"]:
    """Starts the daemons, and ends them and what their jobs have left."""
    for name in ("state", *_node_names(num_nodes)):
        (directory / name).mkdir(parents=True)
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    with contextlib.ExitStack() as stack:
        login, *places = stack.enter_context(hosts(num_nodes + 1))
        nodes = dict(zip(_node_names(num_nodes), places, strict=True))
        stack.enter_context(named(nodes | {"login": login}))
        settings = {"login": login.address, "directory": directory, "expire": _CREDENTIAL_SECS}
        lines = [
            f"NodeName={name} NodeAddr={host.address} CPUs=8\n" for name, host in nodes.items()
        ]
        text = "".join(lines) + _CONFIGURATION.format(**settings)
        (directory / "slurm.conf").write_text(text)
        # slurmd looks for the mounts below /sys otherwise, which `ip netns exec` hides.
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        cluster = Slurm(directory, login, nodes)
        stack.callback(cluster.end)
        cluster.start()
        yield cluster


def _node_names(number: int) -> list[str]:
    return [f"n{i + 1}" for i in range(number)]


class Slurm:
    """A cluster: partition `usual`, and `urgent`, whose jobs preempt those of the first."""

    def __init__(self, directory: Path, login: Host, nodes: Mapping[str, Host]) -> None:
        self.directory = directory
        self.nodes = nodes
        self._login = login
        self._environment = {
            **os.environ,
            "SLURM_CONF": str(directory / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Starts all daemons; returns when every node is idle."""
        files = {"socket": "munge", "key-file": "munge.key", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{name}={self.directory / file}" for name, file in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *options)
        wait_until((self.directory / "munge").exists, "munged's socket")
        # In its own UTS namespace: slurmctld runs only where the configuration says.
        command = ("unshare", "--uts", "sh", "-c", "hostname login && exec slurmctld -D")
        self._start("slurmctld", *self._login.command, *command)
        for node in self.nodes:
            self.start_slurmd(node)

    def start_slurmd(self, node: str) -> None:
        """Starts the slurmd of `node`, which has none; returns when the node can be used."""
        self._start(node, *self.nodes[node].command, "slurmd", "-D", "-N", node)
        usable = ("idle", "mixed", "allocated", "completing")
        wait_until(lambda: self.state_of(node) in usable, f"answer of {node}")

    def state_of(self, node: str) -> str:
        """As `sinfo` shows it: idle, allocated, down* ...; empty if slurmctld does not answer."""
        command = ("sinfo", "--noheader", "--nodes", node, "--partition=usual", "--format=%T")
        return self.run(*command, check=False).strip()

    def _start(self, name: str, *command: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def run(
        self,
        *command: str,
        check: bool = True,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Output of a command on the login host."""
        done = subprocess.run(
            [*self._login.command, *command],
            env={**self._environment, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECS,
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    def submit(self, *arguments: str, **environment: str) -> int:
        """Gives `sbatch` its arguments; returns the number of the job. `output` has its output."""
        command = ("sbatch", "--parsable", f"--output={self.directory}/job-%j.log")
        return int(self.run(*command, *arguments, environment=environment))

    def output(self, job: int) -> str:
        path = self.directory / f"job-{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def job(self, number: int) -> Job:
        shown = self.run("scontrol", "show", "job", "--oneliner", str(number))
        found = dict(re.findall(r"(?<!\S)(\w+)=(\S*)", shown))
        names = self.run("scontrol", "show", "hostnames", found["NodeList"], check=False).split()
        exit_code = int(found["ExitCode"].partition(":")[0])
        return Job(found["JobState"], exit_code, int(found["Restarts"]), names)

    def wait(self, number: int, timeout_secs: float = TIMEOUT_SECS) -> Job:
        """Waits for the end of a job."""
        job = self.job(number)

        def is_over() -> bool:
            nonlocal job
            job = self.job(number)
            return job.is_over

        wait_until(is_over, f"end of job {number}", timeout_secs, lambda: self.output(number))
        return job

    def tasks(self, node: str) -> list[psutil.Process]:
        """The processes of the trainer on `node`."""
        return [
            process
            for process in self._processes(self.nodes[node])
            if _command(process)[1:3] == ["-m", "trainer"]
        ]

    def kill_slurmd(self, node: str) -> None:
        """Kills the daemon alone; the tasks of the node do not end."""
        daemon = self._daemons.pop(node)
        assert daemon.poll() is None, f"the slurmd of {node} has ended"
        daemon.kill()
        daemon.wait()

    def kill_node(self, node: str) -> None:
        """Kills all processes of `node` at once, as a loss of power does."""
        assert self._processes(self.nodes[node]), f"nothing runs on {node}"
        self._kill_all(self.nodes[node])
        self._daemons.pop(node).wait()

    def end(self) -> None:
        """Ends all processes of the cluster."""
        for host in (self._login, *self.nodes.values()):
            self._kill_all(host)
        if munged := self._daemons.get("munged"):
            munged.send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            daemon.wait()

    def _kill_all(self, host: Host) -> None:
        while processes := self._processes(host):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _processes(self, host: Host) -> list[psutil.Process]:
        command = ["ip", "netns", "pids", host.name]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = []
        for pid in map(int, listed.split()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return list(process.cmdline())
    return []


def wait_until(
    condition: Callable[[], bool],
    what: str,
    timeout_secs: float = TIMEOUT_SECS,
    explain: Callable[[], str] = str,
) -> None:
    """Returns when `condition` holds; fails at the time limit, with what `explain` returns."""
    deadline = time.monotonic() + timeout_secs
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_secs} s\n{explain()}"
        time.sleep(_POLL_SECS)
