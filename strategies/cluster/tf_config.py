"""The tasks of the cluster, and the task of this process: parses and checks `TF_CONFIG`.

    cluster = parse_tf_config(os.environ["TF_CONFIG"], "multiworker")
    cluster = parse_hosts({"ps": "a:2222", "worker": "b:2222, c:2222"}, "worker", 0, "ps")
    os.environ["TF_CONFIG"] = cluster.training_tf_config()

Mistakes are found before TensorFlow is imported, which would wait for tasks that do not exist.

A job is a list of addresses, or the map that Kubernetes operators write for elastic clusters:
`{"worker": {"3": "b:2222"}}`. Flags as in TensorFlow 1 (`--ps_hosts`) have the same addresses.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from data.system.errors import UsageError
from strategies.cluster.ports import free_ports

_JOBS = ("chief", "worker", "ps", "evaluator")
_EXAMPLE = {
    "mirrored": '{"cluster": {"worker": ["host-a:2222"]}, "task": {"type": "worker", "index": 0}}',
    "multiworker": '{"cluster": {"worker": ["host-a:2222", "host-b:2222"]}, '
    '"task": {"type": "worker", "index": 0}}',
    "ps": '{"cluster": {"chief": ["host-a:2222"], "worker": ["host-b:2222", "host-c:2222"], '
    '"ps": ["host-d:2222"]}, "task": {"type": "worker", "index": 0}}',
}
_UNLISTED = (
    "The chief does not know of this evaluator, and evaluates itself: start none (on Vertex AI, "
    'without workerPoolSpecs[3]). Or add "evaluator": ["host:port"] to the cluster of every task.'
)
# Where a cluster is described, and what to type to add a job there.
_TF_CONFIG, _COMMAND_LINE = "TF_CONFIG", "the command line"
_ADD = {_TF_CONFIG: 'Add "{}": ["host:port"]', _COMMAND_LINE: "Add --{}_hosts=host:port"}


class ClusterError(UsageError):
    """The description of the cluster has a mistake; the message says what to type. Exit code 2."""


@dataclass(frozen=True)
class Task:
    """One process of the cluster. Prints as `worker 1`."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


@dataclass(frozen=True)
class Cluster:
    """The addresses of all tasks, by job and index, and the task of this process.

    `jobs` lists chief, worker, ps, evaluator in this order, without jobs that have no tasks.
    `generation` grows each time that the hosts of an elastic cluster change; None if they do not.
    The functions of this module check every Cluster that they return.
    """

    jobs: Mapping[str, Mapping[int, str]]
    task: Task
    generation: int | None = None

    def __post_init__(self) -> None:
        known = [job for job in _JOBS if self.jobs.get(job)]
        ordered = {job: dict(sorted(self.jobs[job].items())) for job in known}
        object.__setattr__(self, "jobs", ordered)
        assert self.task in self.tasks(), f"{self.task} is not one of {self.tasks()}"

    @property
    def address(self) -> str:
        """This task's own `host:port`."""
        return self.address_of(self.task)

    @property
    def chief(self) -> Task:
        """The one task that writes: chief 0, or worker 0 if there is no chief job."""
        return Task("chief", 0) if "chief" in self.jobs else Task("worker", 0)

    @property
    def is_chief(self) -> bool:
        """True if this task is the chief."""
        return self.task == self.chief

    @property
    def is_server(self) -> bool:
        """True if this task serves the chief: it is a worker or ps of a cluster with ps.

        Without a chief job, worker 0 is both: its process serves, and runs the coordinator.
        """
        return "ps" in self.jobs and self.task.job in ("worker", "ps")

    @property
    def num_hosts(self) -> int:
        """The number of different hosts in the addresses."""
        addresses = (address for tasks in self.jobs.values() for address in tasks.values())
        return len({address.rpartition(":")[0] for address in addresses})

    @property
    def trainers(self) -> tuple[Task, ...]:
        """The tasks of the jobs chief, worker and ps, in the order of `tasks`: no evaluators.

        Under ps the parameter servers are among them.
        """
        return tuple(task for task in self.tasks() if task.job != "evaluator")

    @property
    def other_trainers(self) -> tuple[Task, ...]:
        """`trainers` without this task."""
        return tuple(task for task in self.trainers if task != self.task)

    def num(self, job: str) -> int:
        """Number of known tasks of `job`; 0 if the job does not exist."""
        return len(self.jobs.get(job, {}))

    def tasks(self) -> tuple[Task, ...]:
        """All tasks: chief, worker, ps, evaluator, each by index."""
        return tuple(Task(job, index) for job, known in self.jobs.items() for index in known)

    def address_of(self, task: Task) -> str:
        """The `host:port` of `task`."""
        return self.jobs[task.job][task.index]

    def for_task(self, task: Task) -> "Cluster":
        """The same cluster seen from another of its tasks."""
        return dataclasses.replace(self, task=task)

    def with_chief(self, address: str) -> "Cluster":
        """This cluster with a chief at `address`, seen from that chief."""
        return Cluster({**self.jobs, "chief": {0: address}}, Task("chief", 0))

    def tf_config(self) -> str:
        """The `TF_CONFIG` of this task: `parse_tf_config` of it gives an equal Cluster."""
        cluster = {
            job: list(known.values()) if _is_complete(known) else dict(known)
            for job, known in self.jobs.items()
        }
        task = {"type": self.task.job, "index": self.task.index}
        generation = {} if self.generation is None else {"generation": self.generation}
        return json.dumps({"cluster": cluster, "task": task, **generation})

    def training_tf_config(self) -> str:
        """`tf_config` without evaluators, for the tasks that train.

        ParameterServerStrategy hangs if the cluster has an evaluator (tensorflow#46169).
        """
        training = {job: known for job, known in self.jobs.items() if job != "evaluator"}
        return dataclasses.replace(self, jobs=training).tf_config()


def parse_tf_config(text: str, strategy: str) -> Cluster:
    """The Cluster that `text`, the value of `TF_CONFIG`, describes for `--strategy=<strategy>`.

    Accepts spaces around addresses, an index in quotes, none for a job of one task, and `master`
    for the chief. Ignores unknown keys. Under ps, a worker or ps needs only its own address.

    Raises:
        ClusterError: the text is no such JSON object, an address is malformed or given twice, this
            task is not in the cluster, or the strategy does not accept these jobs.
    """
    form = f"Example: {_EXAMPLE[strategy]}"
    try:
        config = json.loads(text, object_pairs_hook=object_without_repeats)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        raise ClusterError(
            f"TF_CONFIG is not JSON: {error.msg} at line {error.lineno}, column {error.colno}, "
            f"near {near!r}. {form} Put it in single quotes in a shell, to keep the double quotes; "
            "or `unset TF_CONFIG`, to train on this machine alone."
        ) from None
    given = config.get("cluster") if isinstance(config, dict) else None
    if not isinstance(given, dict) or not given:
        raise ClusterError(
            'TF_CONFIG must be a JSON object with "cluster", an object of jobs and their '
            f"addresses, but is {text.strip()[:200]}. {form}"
        )
    jobs = _parse_jobs(given)
    if not jobs:
        raise ClusterError(f"TF_CONFIG's cluster has no addresses. {form}")
    generation = config.get("generation")  # A launcher writes it. Others may mean something else.
    is_number = type(generation) is int
    cluster = Cluster(jobs, _parse_task(config, jobs, form), generation if is_number else None)
    _check_strategy(cluster, strategy, _TF_CONFIG)
    return cluster


def parse_hosts(
    hosts: Mapping[str, str], job: str | None, index: int | None, strategy: str
) -> Cluster:
    """The Cluster that TensorFlow 1's flags describe. Raises ClusterError as `parse_tf_config`.

    `hosts` maps a job to the value of its flag (--ps_hosts, --worker_hosts, --chief_hosts): a list
    of addresses with commas between them and spaces anywhere. `job` and `index` are --job_name and
    --task_index; None means index 0 if the job has one task.
    """
    # A comma at the end is ignored.
    given = {name: text.rstrip(", \t\n") for name, text in hosts.items()}
    listed = {name: enumerate(text.split(",")) for name, text in given.items() if text}
    jobs = _parse_addresses(listed, _COMMAND_LINE)
    job = "chief" if job == "master" else job
    if job not in jobs:
        raise ClusterError(
            f"--job_name says which task this process is: {_counts(jobs) or 'no job has hosts'}. "
            f"Received: {job}. Type --job_name={' or --job_name='.join(jobs) or 'worker'}."
        )
    num_tasks = len(jobs[job])
    index = 0 if index is None and num_tasks == 1 else index
    if index is None or not 0 <= index < num_tasks:
        raise ClusterError(
            f"--job_name={job} needs --task_index from 0 to {num_tasks - 1}, as --{job}_hosts "
            f"lists {num_tasks}. Received: {index}."
        )
    cluster = Cluster(jobs, Task(job, index))
    _check_strategy(cluster, strategy, _COMMAND_LINE)
    return cluster


def check_cluster(
    addresses: Mapping[str, Iterable[str]], task: Task, strategy: str, source: str
) -> Cluster:
    """The Cluster of `addresses`, by job, seen from `task`. `source` says where it was described.

    Raises ClusterError as `parse_tf_config`.
    """
    listed = {job: enumerate(known) for job, known in addresses.items()}
    cluster = Cluster(_parse_addresses(listed, source), task)
    _check_strategy(cluster, strategy, source)
    return cluster


def local_cluster(strategy: str, num_workers: int, num_ps: int) -> Cluster:
    """A cluster on this machine, on ports that are free now, seen from its chief.

    mirrored and multiworker have `num_workers` workers; ps also has a chief and `num_ps` ps tasks.
    Another program may still take a port before its task starts.

    Raises:
        ClusterError: fewer than one worker, or fewer than one ps under ps.
    """
    sizes = {"worker": num_workers}
    if strategy == "ps":
        sizes = {"chief": 1, "worker": num_workers, "ps": num_ps}
    for job, size in sizes.items():
        if size < 1:
            flag = {"worker": "--workers"}.get(job, f"--{job}")
            raise ClusterError(
                f"--strategy={strategy} needs at least one {job} task. Received: {flag}={size}. "
                f"Type {flag}=1, or --strategy=mirrored for one process."
            )
    try:
        ports = iter(free_ports(sum(sizes.values())))
    except OSError as error:
        raise ClusterError(f"{error}. End what listens on them, or use fewer tasks.") from None
    jobs = {job: {i: f"localhost:{next(ports)}" for i in range(n)} for job, n in sizes.items()}
    return Cluster(jobs, Task(next(iter(jobs)), 0))


def _is_complete(known: Mapping[int, str]) -> bool:
    return sorted(known) == list(range(len(known)))


def _counts(jobs: Mapping[str, Mapping[int, str]]) -> str:
    return ", ".join(f"{job} ({len(known)})" for job, known in jobs.items())


def object_without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For json.loads, which would drop all but the last value. Raises ClusterError."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ClusterError(
                f'TF_CONFIG has "{name}" twice in one object. Put all of it under one name.'
            )
    return dict(pairs)


def _parse_jobs(cluster: Mapping[str, object]) -> dict[str, dict[int, str]]:
    if "master" in cluster and "chief" not in cluster:  # The name in TensorFlow 1.
        cluster = {"chief" if job == "master" else job: known for job, known in cluster.items()}
    for job in cluster:
        if job not in _JOBS:
            names = ", ".join(f'"{known}"' for known in _JOBS)
            raise ClusterError(f'TF_CONFIG names the job "{job}", but the jobs are {names}.')
    numbered = {job: _numbered(job, listed) for job, listed in cluster.items()}
    return _parse_addresses(numbered, _TF_CONFIG)


def _numbered(job: str, listed: object) -> Iterable[tuple[int, object]]:
    if isinstance(listed, list):
        return enumerate(listed)
    if not isinstance(listed, dict):
        raise ClusterError(
            f'TF_CONFIG\'s job "{job}" must be a list of addresses, but is {listed!r}. '
            f'Write "{job}": ["host:port"], one entry for each task.'
        )
    if not all(map(_is_index, listed)) or len(set(map(int, listed))) < len(listed):
        raise ClusterError(
            f'TF_CONFIG\'s job "{job}" is a map from different task indices to addresses, but has '
            f'the keys {list(listed)}. Write "{job}": {{"0": "host:port"}}, or a list.'
        )
    return [(int(index), address) for index, address in listed.items()]


def _is_index(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def _parse_addresses(
    numbered: Mapping[str, Iterable[tuple[int, object]]], source: str
) -> dict[str, dict[int, str]]:
    jobs: dict[str, dict[int, str]] = {}
    owner: dict[str, Task] = {}
    for job, listed in numbered.items():
        for index, given in listed:
            task = Task(job, index)
            address = _parse_address(given, task, source)
            if address in owner:
                raise ClusterError(
                    f"In {source}, {address} is the address of both {owner[address]} and "
                    f"{task}. Each task needs a different address: change a host or a port."
                )
            owner[address] = task
            jobs.setdefault(job, {})[index] = address
    return jobs


def _parse_address(given: object, task: Task, source: str) -> str:
    """Returns `given` in its normal form: " Host-A:02222 " is "host-a:2222"."""
    form = r"\s*(\[[^\[\]\s]+\]|[^:/,\[\]\s]+)\s*:\s*([0-9]{1,9})\s*"
    found = re.fullmatch(form, given) if isinstance(given, str) else None
    with contextlib.suppress(UnicodeError):  # Of a host that is no name in DNS.
        if found and found[1].encode("idna") and 1 <= int(found[2]) <= 65535:
            return f"{found[1].lower()}:{int(found[2])}"
    raise ClusterError(
        f"In {source}, the address of {task} is {given!r}. Write one for each task, of the form "
        '"host:port", with a port from 1 to 65535, as "host-a:2222" or, with IPv6, "[::1]:2222".'
    )


def _parse_task(
    config: Mapping[str, object], jobs: Mapping[str, Mapping[int, str]], form: str
) -> Task:
    task = config.get("task")
    name = task.get("type") if isinstance(task, dict) else None
    job = "chief" if name == "master" and "chief" in jobs else name
    if isinstance(task, dict) and len(known := jobs.get(str(job), {})) == 1:
        task = {"index": next(iter(known)), **task}
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        came = "none" if task is None else json.dumps(task)
        raise ClusterError(
            'TF_CONFIG needs "task", which says which task of the cluster this process is, by '
            f'"type" and "index". Received: {came}. {form}'
        )
    index = task["index"]
    if not isinstance(job, str) or job not in jobs:
        change = f"Set the type to {' or '.join(map(json.dumps, jobs))}"
        raise ClusterError(
            f"TF_CONFIG's task type is {json.dumps(job)}, but its cluster has {_counts(jobs)}. "
            + (_UNLISTED if job == "evaluator" else f"{change}, or add this task's address.")
        )
    if isinstance(index, str) and _is_index(index):
        index = int(index)
    if type(index) is not int or index not in known:  # A boolean is an int, too.
        is_range = _is_complete(known) and len(known) > 1
        which = f"0 to {len(known) - 1}" if is_range else ", ".join(map(str, known))
        raise ClusterError(
            f"TF_CONFIG's task is {job} {json.dumps(index)}, but its cluster has {len(known)} "
            f"{job} (index {which}). Correct the index, an integer from 0, or add this task's "
            "address."
        )
    return Task(job, index)


def _check_strategy(cluster: Cluster, strategy: str, source: str) -> None:
    jobs, task = cluster.jobs, cluster.task
    names, add = f"{source} names", _ADD.get(source, "Type --{}=1")
    for job in ("chief", "evaluator"):
        if list(jobs.get(job, [0])) != [0]:
            raise ClusterError(
                f"A run has at most one {job}, {job} 0, but {names} {cluster.num(job)} "
                f"(index {', '.join(map(str, jobs[job]))}). "
                "Remove the others, or make them workers."
            )
    if strategy == "mirrored" and ("ps" in jobs or len(cluster.trainers) != 1):
        raise ClusterError(
            f"--strategy=mirrored trains in one process, but {names} {_counts(jobs)}. "
            f"Use --strategy={'ps' if 'ps' in jobs else 'multiworker'} for several processes, "
            "or describe no cluster."
        )
    needed = ["ps", "worker"] if strategy == "ps" else ["worker"] if not cluster.trainers else []
    for job in needed:
        if job not in jobs:
            other = ", or use --strategy=multiworker" if job == "ps" else ""
            raise ClusterError(
                f'--strategy={strategy} needs a "{job}" task, but {names} only {_counts(jobs)}. '
                f"{add.format(job)}{other}."
            )
    if strategy == "multiworker" and "ps" in jobs:
        raise ClusterError(
            f'--strategy=multiworker has no "ps" task, but {names} {_counts(jobs)}. '
            "Use --strategy=ps, or remove the ps tasks."
        )
    if "ps" in jobs and "chief" not in jobs and 0 not in jobs["worker"]:
        raise ClusterError(
            f"{task} must know where its chief is: {names} neither a chief nor worker 0, whose "
            f"process runs the coordinator if there is no chief. {add.format('chief')}."
        )
    connects_to_all = strategy == "multiworker" or cluster.is_chief
    for job, known in jobs.items():
        if connects_to_all and job != "evaluator" and not _is_complete(known):
            missing = sorted(set(range(max(known) + 1)) - set(known))
            raise ClusterError(
                f"{task} connects to every task, but {names} {job} {', '.join(map(str, known))} "
                f"and not {job} {', '.join(map(str, missing))}. Give the address of each."
            )
