"""The tasks of a job and which one this process is: `TF_CONFIG` parsed, checked, explained.

    cluster = parse_tf_config(os.environ["TF_CONFIG"], "multiworker")
    check_port_free(cluster.address)
    os.environ["TF_CONFIG"] = cluster.training_tf_config()

Every mistake a user can make here is found before TensorFlow is imported, because TensorFlow
answers most of them by waiting for ever for a task that will not come.

    TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]},
                "task": {"type": "worker", "index": 0}}'

A job is a list of addresses, or the map that Kubernetes operators write for clusters that grow and
shrink: `{"worker": {"3": "b:2222"}}`.
"""

import difflib
import errno
import json
import logging
import random
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

log = logging.getLogger(__name__)

_REPORT_SECS = 10.0
_JOBS = ("chief", "worker", "ps", "evaluator")
_NEEDED_UNDER_PS = {
    "ps": "It keeps the variables.",
    "worker": "It computes the gradients.",
    "chief": "It hands the work out, and does not train.",
}
# Names other programs give to the same jobs, where the nearest spelling would mislead.
_ALSO_CALLED = {"master": "chief", "coordinator": "chief", "server": "ps", "parameter_server": "ps"}
_EXAMPLE = {
    "mirrored": '{"cluster": {"worker": ["host-a:2222"]}, "task": {"type": "worker", "index": 0}}',
    "multiworker": '{"cluster": {"worker": ["host-a:2222", "host-b:2222"]}, '
    '"task": {"type": "worker", "index": 0}}',
    "ps": '{"cluster": {"chief": ["host-a:2222"], "worker": ["host-b:2222", "host-c:2222"], '
    '"ps": ["host-d:2222"]}, "task": {"type": "worker", "index": 0}}',
}
_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ClusterError(ValueError):
    """A user's mistake in describing the cluster; it says what to type. Exit code 2."""


@dataclass(frozen=True)
class Task:
    """One process of the cluster. Prints as `worker 1`."""

    job: str
    index: int

    def __str__(self) -> str:
        """`worker 1`, the one spelling in logs and messages."""
        return f"{self.job} {self.index}"


@dataclass(frozen=True)
class Cluster:
    """The addresses of all tasks, by job and index, and the task that this process is.

    Made by `parse_tf_config` or `local_cluster`, so a Cluster that exists is a checked one. `jobs`
    lists chief, worker, ps, evaluator in this order, leaving out jobs without tasks, and cannot be
    changed.
    """

    jobs: Mapping[str, Mapping[int, str]]
    task: Task

    def __post_init__(self) -> None:
        """Keeps a copy of `jobs`, in its one order and read-only."""
        ordered = {
            job: MappingProxyType(dict(sorted(self.jobs[job].items())))
            for job in _JOBS
            if self.jobs.get(job)
        }
        object.__setattr__(self, "jobs", MappingProxyType(ordered))
        assert self.task in self.tasks(), f"{self.task} is not one of {self.tasks()}"

    @property
    def address(self) -> str:
        """This task's own `host:port`."""
        return self.jobs[self.task.job][self.task.index]

    @property
    def is_chief(self) -> bool:
        """Whether this is the one task that writes: the chief, or worker 0 without a chief."""
        return self.task == (Task("chief", 0) if "chief" in self.jobs else Task("worker", 0))

    @property
    def is_server(self) -> bool:
        """Whether this task ends when the chief says so: a worker or ps of a cluster with ps."""
        return "ps" in self.jobs and self.task.job in ("worker", "ps")

    def num(self, job: str) -> int:
        """How many tasks of `job` are known; 0 for a job that is not there."""
        return len(self.jobs.get(job, {}))

    def tasks(self) -> tuple[Task, ...]:
        """All tasks: chief, worker, ps, evaluator, each by index."""
        return tuple(Task(job, index) for job, known in self.jobs.items() for index in known)

    def for_task(self, task: Task) -> "Cluster":
        """The same cluster seen from another of its tasks."""
        return Cluster(self.jobs, task)

    def tf_config(self) -> str:
        """The `TF_CONFIG` of this task: `parse_tf_config` of it gives an equal Cluster."""
        return _as_json(self.jobs, self.task)

    def training_tf_config(self) -> str:
        """`tf_config` without evaluators, for the tasks that train.

        ParameterServerStrategy waits for ever on a cluster with an evaluator in it
        (tensorflow#46169).
        """
        training = {job: known for job, known in self.jobs.items() if job != "evaluator"}
        return _as_json(training, self.task)


def parse_tf_config(text: str, strategy: str) -> Cluster:
    """The Cluster that `text`, the value of `TF_CONFIG`, describes for `--strategy=<strategy>`.

    Accepts both forms of a job (list and map), spaces around addresses, and a task index in quotes;
    ignores keys that other programs add, such as `environment`. Under ps the map form may leave
    tasks out for workers and ps tasks, which need to know only themselves; whoever connects to all
    must know all.

    Raises:
        ClusterError: the text is no JSON object with a cluster and a task, an address is malformed
            or given twice, this task is not in the cluster, or the jobs do not suit the strategy.
    """
    form = f"It looks like {_EXAMPLE[strategy]}"
    if not text.strip():
        raise ClusterError(
            "TF_CONFIG is set but empty. Unset it (`unset TF_CONFIG`) to train on this machine "
            f"alone, or describe the cluster. {form}"
        )
    try:
        config = json.loads(text, object_pairs_hook=_object_without_repeats)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        raise ClusterError(
            f"TF_CONFIG is not JSON: {error.msg} at line {error.lineno}, column {error.colno}, "
            f"near {near!r}. "
            f"{form} Put it in single quotes in a shell, so that the double quotes survive."
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(
            f"TF_CONFIG must be a JSON object, but is {_kind(config)}: {text.strip()[:60]!r}. "
            f"{form}"
        )
    if not isinstance(config.get("cluster"), dict) or not config["cluster"]:
        came = _kind(config["cluster"]) if "cluster" in config else f"only {_names(config)}"
        raise ClusterError(
            f'TF_CONFIG needs "cluster", an object of jobs and their addresses, but has {came}. '
            f"{form}"
        )
    jobs = _parse_jobs(config["cluster"], strategy)
    task = _parse_task(config, jobs, form)
    _check_strategy(jobs, task, strategy)
    return Cluster(jobs, task)


def local_cluster(strategy: str, num_workers: int, num_ps: int) -> Cluster:
    """A cluster on this machine, on ports that are free now, seen from its chief.

    multiworker has `num_workers` workers; ps has a chief beside them and `num_ps` ps tasks. The
    ports are free when this returns, and are not reserved: start the tasks at once.

    Raises:
        ClusterError: fewer than one worker, or fewer than one ps under ps.
    """
    assert strategy in ("multiworker", "ps"), f"{strategy} has no cluster"
    if num_workers < 1:
        raise ClusterError(
            f"--strategy={strategy} needs at least one worker. Received: --workers={num_workers}. "
            "Use --workers=2, or --strategy=mirrored for one process."
        )
    if strategy == "ps" and num_ps < 1:
        raise ClusterError(
            "--strategy=ps keeps the variables on ps tasks and needs at least one. Received: "
            f"--ps={num_ps}. "
            "Use --ps=1, or --strategy=multiworker, which has none."
        )
    sizes = {"worker": num_workers}
    if strategy == "ps":
        sizes = {"chief": 1, "worker": num_workers, "ps": num_ps}
    ports = iter(_free_ports(sum(sizes.values())))
    jobs = {job: {i: f"localhost:{next(ports)}" for i in range(n)} for job, n in sizes.items()}
    return Cluster(jobs, Task(next(iter(jobs)), 0))


def check_port_free(address: str) -> None:
    """Returns if a server of this process could listen on the port of `address`, this task's own.

    Raises:
        ClusterError: another process uses the port, or this user may not.
    """
    port = int(address.rpartition(":")[2])
    try:
        _bind(port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"This task should serve at {address}, but port {port} of this machine is in use. "
                f"End the process that uses it (`ss -tlnp 'sport = :{port}'` shows it; it may be a "
                "former run), "
                "or give this task another port in TF_CONFIG, on every task alike."
            ) from None
        if error.errno == errno.EACCES:
            raise ClusterError(
                f"This task should serve at {address}, but this user may not open port {port}. "
                "Give this task a port of 1024 or more in TF_CONFIG, on every task alike."
            ) from None
        raise


def wait_for_peers(cluster: Cluster, peers: Iterable[Task]) -> None:
    """Returns once each of `peers` has answered a connection; meanwhile they can reach this task.

    TensorFlow waits for peers too, but holds the interpreter while it does: no signal would be
    handled, and nobody told whom it waits for.
    """
    missing = {peer: cluster.jobs[peer.job][peer.index] for peer in peers if peer != cluster.task}
    next_report = time.monotonic() + _REPORT_SECS
    # A connection waits in the listener's queue, so it need not be accepted.
    with _bind(int(cluster.address.rpartition(":")[2])) as listener:
        listener.listen()
        while missing := {t: address for t, address in missing.items() if not _answers(address)}:
            if time.monotonic() > next_report:
                log.info("waiting for %s", ", ".join(f"{t} ({a})" for t, a in missing.items()))
                next_report += _REPORT_SECS
            time.sleep(0.1)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError:  # Names that cannot be resolved yet, too.
        return False
    return True


def _as_json(jobs: Mapping[str, Mapping[int, str]], task: Task) -> str:
    cluster = {
        job: list(known.values())
        if _is_whole(known)
        else {str(index): address for index, address in known.items()}
        for job, known in jobs.items()
    }
    return json.dumps({"cluster": cluster, "task": {"type": task.job, "index": task.index}})


def _is_whole(known: Mapping[int, str]) -> bool:
    return sorted(known) == list(range(len(known)))


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")


def _names(items: Iterable[str]) -> str:
    return ", ".join(f'"{item}"' for item in items) or "nothing"


def _counts(jobs: Mapping[str, Mapping[int, str]]) -> str:
    return ", ".join(f"{job} ({len(known)})" for job, known in jobs.items())


def _object_without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ClusterError(
                f'TF_CONFIG names "{key}" twice in one object, and JSON would drop the first. '
                "Put all of it under one name."
            )
        result[key] = value
    return result


def _parse_jobs(cluster: Mapping[str, object], strategy: str) -> dict[str, dict[int, str]]:
    jobs: dict[str, dict[int, str]] = {}
    owner: dict[str, Task] = {}
    for job, listed in cluster.items():
        if job not in _JOBS:
            near = difflib.get_close_matches(job.lower(), _JOBS, n=1, cutoff=0.4)
            guess = _ALSO_CALLED.get(job.lower()) or (near[0] if near else None)
            hint = f'Did you mean "{guess}"? ' if guess else ""
            raise ClusterError(f'TF_CONFIG names the job "{job}". {hint}Jobs are {_names(_JOBS)}.')
        jobs[job] = {}
        for index, given in _numbered(job, listed):
            task = Task(job, index)
            address = _parse_address(task, given)
            if address in owner:
                raise ClusterError(
                    f"TF_CONFIG gives the address {address} to both {owner[address]} and {task}. "
                    "Each task listens on its own: give one of them another host or port."
                )
            owner[address] = task
            jobs[job][index] = address
    jobs = {job: known for job, known in jobs.items() if known}
    if not jobs:
        raise ClusterError(
            f"TF_CONFIG's cluster has no addresses. It looks like {_EXAMPLE[strategy]}"
        )
    return jobs


def _numbered(job: str, listed: object) -> list[tuple[int, object]]:
    if isinstance(listed, list):
        return list(enumerate(listed))
    if not isinstance(listed, dict):
        raise ClusterError(
            f'TF_CONFIG\'s job "{job}" must be a list of addresses, but is {_kind(listed)}: '
            f"{listed!r}. "
            f'Write "{job}": ["host:port"], one entry for each task.'
        )
    numbered: dict[int, object] = {}
    for key, address in listed.items():
        if not _is_index(key):
            raise ClusterError(
                f'TF_CONFIG\'s job "{job}" is a map from task index to address, but has the key '
                f"{key!r}. "
                f'Write "{job}": {{"0": "host:port"}}, or a list.'
            )
        if int(key) in numbered:
            raise ClusterError(
                f"TF_CONFIG names {Task(job, int(key))} twice. Give each task one address."
            )
        numbered[int(key)] = address
    return sorted(numbered.items())


def _is_index(text: str) -> bool:
    return text.isascii() and text.strip().isdigit() and len(text) < 10


def _parse_address(task: Task, given: object) -> str:
    if not isinstance(given, str):
        raise ClusterError(
            f"TF_CONFIG's address of {task} must be a string, but is {_kind(given)}: {given!r}. "
            'Write "host:port", for example "localhost:2222".'
        )
    address = given.strip()
    host, colon, port = (part.strip() for part in address.rpartition(":"))
    where = f"TF_CONFIG's address of {task} is {given!r}"
    if "," in address:
        raise ClusterError(
            f"{where}: several in one string. Write a list, one string for each task: "
            f'"{task.job}": ["a:1", "b:1"].'
        )
    if "/" in address:
        raise ClusterError(f'{where}. It must be "host:port" alone, without a scheme or a path.')
    if not colon or (host.startswith("[") and not host.endswith("]")):
        raise ClusterError(f'{where}, without a port. Add one: "{address}:2222".')
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ClusterError(
            f'{where}. An IPv6 address needs brackets, to tell it from the port: "[{host}]:{port}".'
        )
    if not host or host == "[]":
        raise ClusterError(
            f'{where}, without a host. Other tasks must find this one: "localhost:{port or 2222}" '
            "on one machine."
        )
    if any(character.isspace() for character in host):
        raise ClusterError(f"{where}: the host has a space in it. Write one host for each task.")
    if not _is_index(port) or not 1 <= int(port) <= 65535:
        raise ClusterError(
            f'{where}: {port!r} is not a port. Use a number from 1 to 65535: "{host}:2222".'
        )
    return f"{host.lower()}:{int(port)}"


def _parse_task(
    config: Mapping[str, object], jobs: Mapping[str, Mapping[int, str]], form: str
) -> Task:
    task = config.get("task")
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        came = "none" if task is None else json.dumps(task)
        raise ClusterError(
            'TF_CONFIG needs "task", which says which task of the cluster this process is, by '
            '"type" and "index". '
            f"Received: {came}. {form}"
        )
    job, index = task["type"], task["index"]
    if not isinstance(job, str) or job not in jobs:
        raise ClusterError(
            f"TF_CONFIG's task type is {json.dumps(job)}, but its cluster has {_counts(jobs)}. "
            f"Set the type to {' or '.join(json.dumps(known) for known in jobs)}, or add this "
            "task's address."
        )
    if isinstance(index, str) and _is_index(index):
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int):
        raise ClusterError(
            f"TF_CONFIG's task index must be a whole number from 0, but is {_kind(index)}: "
            f"{json.dumps(index)}. "
            f'Write "task": {{"type": "{job}", "index": 0}}.'
        )
    if index not in jobs[job]:
        known = jobs[job]
        which = f"0 to {len(known) - 1}" if _is_whole(known) else ", ".join(map(str, known))
        raise ClusterError(
            f"TF_CONFIG's task is {Task(job, index)}, but its cluster has {len(known)} {job} "
            f"(index {'0' if which == '0 to 0' else which}). Indices start at 0: correct the "
            "index, "
            "or add this task's address."
        )
    return Task(job, index)


def _check_strategy(jobs: Mapping[str, Mapping[int, str]], task: Task, strategy: str) -> None:
    """The rules that depend on the strategy; `jobs` is well formed and has `task`."""
    training = {job: known for job, known in jobs.items() if job != "evaluator"}
    if len(jobs.get("chief", {})) > 1 or set(jobs.get("chief", {})) - {0}:
        raise ClusterError(
            f"A cluster has one chief, chief 0, but TF_CONFIG names {len(jobs['chief'])} "
            f"(index {', '.join(map(str, jobs['chief']))}). Make the others workers."
        )
    if strategy == "mirrored" and ("ps" in jobs or sum(map(len, training.values())) != 1):
        raise ClusterError(
            f"--strategy=mirrored trains in one process, but TF_CONFIG names {_counts(jobs)}. "
            f"Use --strategy={'ps' if 'ps' in jobs else 'multiworker'} for several processes, "
            "or `unset TF_CONFIG`."
        )
    for job, reason in _NEEDED_UNDER_PS.items() if strategy == "ps" else ():
        if job not in jobs:
            raise ClusterError(
                f'--strategy=ps needs a "{job}" task, but TF_CONFIG names only {_counts(jobs)}. '
                f'{reason} Add "{job}": ["host:port"], or use --strategy=multiworker.'
            )
    if strategy == "multiworker" and "ps" in jobs:
        raise ClusterError(
            f'--strategy=multiworker has no "ps" task, but TF_CONFIG names {_counts(jobs)}. '
            'Use --strategy=ps, or take "ps" out of the cluster.'
        )
    if not training:
        raise ClusterError(
            f"--strategy={strategy} needs workers, but TF_CONFIG names only {_counts(jobs)}. "
            'Add "worker": ["host:port", "host:port"].'
        )
    connects_to_all = strategy == "multiworker" or task.job == "chief"
    for job, known in training.items():
        if connects_to_all and not _is_whole(known):
            missing = sorted(set(range(max(known) + 1)) - set(known))
            raise ClusterError(
                f"{task} connects to every task, but TF_CONFIG names {job} "
                f"{', '.join(map(str, known))} "
                f"and not {job} {', '.join(map(str, missing))}. Give the address of each."
            )


def _bind(port: int) -> socket.socket:
    """A socket bound as TensorFlow's server binds: on every interface, IPv6 and IPv4."""
    try:
        bound = socket.socket(socket.AF_INET6)
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:  # A kernel without IPv6.
        bound = socket.socket(socket.AF_INET)
    # Without it, connections of a former run in TIME_WAIT would count as a use of the port for a
    # minute.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


def _free_ports(num_ports: int) -> list[int]:
    """Ports that nobody listens on, below the range that the kernel gives to outgoing connections.

    A port of that range (what binding to port 0 gives) can be taken by any connection made before
    the task listens, and a task that keeps on trying to connect to a dead peer can even be given
    the peer's own port and connect to itself, so that the peer cannot come back.
    """
    try:
        first_outgoing = int(_PORT_RANGE_FILE.read_text().split()[0])
    except OSError:  # Not Linux.
        first_outgoing = 0
    candidates = range(10_000, first_outgoing)
    tries: Iterable[int] = [0] * num_ports
    if len(candidates) >= 100 * num_ports:
        # The system's randomness: two launchers seeded alike must not choose alike.
        tries = random.SystemRandom().sample(candidates, 50 * num_ports)
    with ExitStack() as held:  # All are held until all are chosen, so that none is chosen twice.
        ports: list[int] = []
        for port in tries:
            try:
                bound = held.enter_context(_bind(port))
            except OSError:
                continue
            ports.append(bound.getsockname()[1])
            if len(ports) == num_ports:
                return ports
    raise ClusterError(f"This machine has no {num_ports} free ports. End what listens on them.")
