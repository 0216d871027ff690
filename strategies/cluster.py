"""The tasks of a job and which one this process is: `TF_CONFIG` parsed, checked, explained.

    cluster = parse_tf_config(os.environ["TF_CONFIG"], "multiworker")
    cluster = parse_hosts({"ps": "a:2222", "worker": "b:2222, c:2222"}, "worker", 0, "ps")
    os.environ["TF_CONFIG"] = cluster.training_tf_config()

Every mistake a user can make here is found before TensorFlow is imported, because TensorFlow
answers most of them by waiting for ever for a task that will not come.

    TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]},
                "task": {"type": "worker", "index": 0}}'

A job is a list of addresses, or the map that Kubernetes operators write for clusters that grow and
shrink: `{"worker": {"3": "b:2222"}}`. Programs of TensorFlow 1's days took the same addresses from
flags: `--ps_hosts=a:2222 --worker_hosts=b:2222,c:2222 --job_name=worker --task_index=0`.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from strategies.ports import free_ports

_JOBS = ("chief", "worker", "ps", "evaluator")
_NEEDED_UNDER_PS = {
    "ps": "It keeps the variables.",
    "worker": "It computes the gradients.",
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


class ClusterError(ValueError):
    """A user's mistake in describing the cluster; it says what to type. Exit code 2."""


@dataclass(frozen=True)
class _Source:
    """Where a cluster was described, in the words of messages."""

    name: str
    in_sentence: str
    job_form: str

    def add(self, job: str) -> str:
        """What to type for a task of `job`."""
        return self.job_form.format(job)


_TF_CONFIG = _Source("TF_CONFIG", "TF_CONFIG", 'Add "{}": ["host:port"]')
_COMMAND_LINE = _Source("The command line", "the command line", "Add --{}_hosts=host:port")


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

    Made by `parse_tf_config`, `parse_hosts` or `local_cluster`, so a Cluster that exists is a
    checked one. `jobs` lists chief, worker, ps, evaluator in this order, leaving out jobs without
    tasks, and cannot be changed.
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
        return self.address_of(self.task)

    @property
    def chief(self) -> Task:
        """The one task that writes: the chief, or worker 0 without a chief."""
        return Task("chief", 0) if "chief" in self.jobs else Task("worker", 0)

    @property
    def is_chief(self) -> bool:
        """Whether this task is the chief."""
        return self.task == self.chief

    @property
    def is_server(self) -> bool:
        """Whether this task serves the chief: a worker or ps of a cluster with ps.

        Without a chief task, worker 0 is both: its process serves, and runs the coordinator.
        """
        return "ps" in self.jobs and self.task.job in ("worker", "ps")

    @property
    def trainers(self) -> tuple[Task, ...]:
        """All tasks but evaluators, in the order of `tasks`."""
        return tuple(task for task in self.tasks() if task.job != "evaluator")

    def num(self, job: str) -> int:
        """How many tasks of `job` are known; 0 for a job that is not there."""
        return len(self.jobs.get(job, {}))

    def tasks(self) -> tuple[Task, ...]:
        """All tasks: chief, worker, ps, evaluator, each by index."""
        return tuple(Task(job, index) for job, known in self.jobs.items() for index in known)

    def address_of(self, task: Task) -> str:
        """The `host:port` of `task`."""
        return self.jobs[task.job][task.index]

    def for_task(self, task: Task) -> "Cluster":
        """The same cluster seen from another of its tasks."""
        return Cluster(self.jobs, task)

    def with_chief(self, address: str) -> "Cluster":
        """This cluster with a chief at `address`, seen from it."""
        return Cluster({**self.jobs, "chief": {0: address}}, Task("chief", 0))

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
    _check_strategy(jobs, task, strategy, _TF_CONFIG)
    return Cluster(jobs, task)


def parse_hosts(
    hosts: Mapping[str, str], job: str | None, index: int | None, strategy: str
) -> Cluster:
    """The Cluster of TensorFlow 1's flags: `hosts` are the values of --ps_hosts and alike, by job.

    Each lists addresses, with commas between them and spaces anywhere. `job` and `index` are those
    of --job_name and --task_index; an index of None is 0 where the job has one task.

    Raises:
        ClusterError: as `parse_tf_config`.
    """
    listed = {name: _split(text) for name, text in hosts.items()}
    jobs = _numbered_addresses(
        {name: list(enumerate(given)) for name, given in listed.items() if given}, _COMMAND_LINE
    )
    job = _ALSO_CALLED.get(job, job) if job else job
    if job not in jobs:
        raise ClusterError(
            f"--job_name says which task this process is: {_counts(jobs) or 'no job has hosts'}. "
            f"Received: {job}. Type --job_name={' or --job_name='.join(jobs) or 'worker'}."
        )
    num_tasks = len(jobs[job])
    if index is None and num_tasks == 1:
        index = 0
    if index is None or not 0 <= index < num_tasks:
        raise ClusterError(
            f"--job_name={job} needs --task_index from 0 to {num_tasks - 1}, as --{job}_hosts "
            f"lists {num_tasks}. Received: {index}."
        )
    task = Task(job, index)
    _check_strategy(jobs, task, strategy, _COMMAND_LINE)
    return Cluster(jobs, task)


def local_cluster(
    strategy: str,
    num_workers: int,
    num_ps: int,
    choose_ports: Callable[[int], list[int]] = free_ports,
) -> Cluster:
    """A cluster on this machine, on ports that are free now, seen from its chief.

    mirrored and multiworker have `num_workers` workers; ps has a chief beside them and `num_ps` ps
    tasks. The ports are free when this returns; a program that asks nobody may still take one.
    `choose_ports` finds them, where it is not this process that must see them free.

    Raises:
        ClusterError: fewer than one worker, or fewer than one ps under ps.
    """
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
    try:
        ports = iter(choose_ports(sum(sizes.values())))
    except OSError as error:
        raise ClusterError(f"{error}. End what listens on them, or use fewer tasks.") from None
    jobs = {job: {i: f"localhost:{next(ports)}" for i in range(n)} for job, n in sizes.items()}
    return Cluster(jobs, Task(next(iter(jobs)), 0))


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


def _split(text: str) -> list[str]:
    """The addresses in a list of hosts. A comma at its end is no address."""
    parts = [part.strip() for part in text.split(",")]
    while parts and not parts[-1]:
        parts.pop()
    return parts


def _parse_jobs(cluster: Mapping[str, object], strategy: str) -> dict[str, dict[int, str]]:
    for job in cluster:
        if job not in _JOBS:
            near = difflib.get_close_matches(job.lower(), _JOBS, n=1, cutoff=0.4)
            guess = _ALSO_CALLED.get(job.lower()) or (near[0] if near else None)
            hint = f'Did you mean "{guess}"? ' if guess else ""
            raise ClusterError(f'TF_CONFIG names the job "{job}". {hint}Jobs are {_names(_JOBS)}.')
    numbered = {job: _numbered(job, listed) for job, listed in cluster.items()}
    jobs = _numbered_addresses(numbered, _TF_CONFIG)
    if not jobs:
        raise ClusterError(
            f"TF_CONFIG's cluster has no addresses. It looks like {_EXAMPLE[strategy]}"
        )
    return jobs


def _numbered_addresses(
    numbered: Mapping[str, list[tuple[int, object]]], source: _Source
) -> dict[str, dict[int, str]]:
    """The checked addresses of jobs that have any."""
    jobs: dict[str, dict[int, str]] = {}
    owner: dict[str, Task] = {}
    for job, listed in numbered.items():
        for index, given in listed:
            task = Task(job, index)
            address = _parse_address(task, given, source)
            if address in owner:
                raise ClusterError(
                    f"{source.name} gives the address {address} to both {owner[address]} and "
                    f"{task}. Each task listens on its own: give one of them another host or port."
                )
            owner[address] = task
            jobs.setdefault(job, {})[index] = address
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


def _parse_address(task: Task, given: object, source: _Source) -> str:
    if not isinstance(given, str):
        raise ClusterError(
            f"{source.name}'s address of {task} must be a string, but is {_kind(given)}: "
            f'{given!r}. Write "host:port", for example "localhost:2222".'
        )
    address = given.strip()
    host, colon, port = (part.strip() for part in address.rpartition(":"))
    where = f"{source.name}'s address of {task} is {given!r}"
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
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ClusterError(
            f"{where}, whose host is no name that could be looked up: {error}."
        ) from None
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


def _check_strategy(
    jobs: Mapping[str, Mapping[int, str]], task: Task, strategy: str, source: _Source
) -> None:
    """The rules that depend on the strategy; `jobs` is well formed and has `task`."""
    training = {job: known for job, known in jobs.items() if job != "evaluator"}
    source_names = f"{source.in_sentence} names"
    if len(jobs.get("chief", {})) > 1 or set(jobs.get("chief", {})) - {0}:
        raise ClusterError(
            f"A cluster has one chief, chief 0, but {source_names} {len(jobs['chief'])} "
            f"(index {', '.join(map(str, jobs['chief']))}). Make the others workers."
        )
    if len(jobs.get("evaluator", {})) > 1:
        raise ClusterError(
            f"A run has one evaluator, but {source_names} {len(jobs['evaluator'])}: they would "
            "write the same files. Leave one."
        )
    if strategy == "mirrored" and ("ps" in jobs or sum(map(len, training.values())) != 1):
        raise ClusterError(
            f"--strategy=mirrored trains in one process, but {source_names} {_counts(jobs)}. "
            f"Use --strategy={'ps' if 'ps' in jobs else 'multiworker'} for several processes, "
            "or describe no cluster."
        )
    for job, reason in _NEEDED_UNDER_PS.items() if strategy == "ps" else ():
        if job not in jobs:
            raise ClusterError(
                f'--strategy=ps needs a "{job}" task, but {source_names} only {_counts(jobs)}. '
                f"{reason} {source.add(job)}, or use --strategy=multiworker."
            )
    if strategy == "multiworker" and "ps" in jobs:
        raise ClusterError(
            f'--strategy=multiworker has no "ps" task, but {source_names} {_counts(jobs)}. '
            "Use --strategy=ps, or take its ps tasks out."
        )
    if not training:
        raise ClusterError(
            f"--strategy={strategy} needs workers, but {source_names} only {_counts(jobs)}. "
            f"{source.add('worker')}."
        )
    if "ps" in jobs and "chief" not in jobs and 0 not in jobs["worker"]:
        raise ClusterError(
            f"{task} must know where its chief is: {source_names} neither a chief nor "
            "worker 0, whose process runs the coordinator where there is none. "
            f"{source.add('chief')}."
        )
    is_chief = task == Task("chief" if "chief" in jobs else "worker", 0)
    connects_to_all = strategy == "multiworker" or is_chief
    for job, known in training.items():
        if connects_to_all and not _is_whole(known):
            missing = sorted(set(range(max(known) + 1)) - set(known))
            raise ClusterError(
                f"{task} connects to every task, but {source_names} {job} "
                f"{', '.join(map(str, known))} "
                f"and not {job} {', '.join(map(str, missing))}. Give the address of each."
            )
