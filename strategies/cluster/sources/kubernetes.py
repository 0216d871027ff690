"""The cluster of an indexed Job of Kubernetes, or of a JobSet: one task for each pod.

    found = from_indexed_job(os.environ, Wanted("multiworker", num_workers=4))
    found = from_jobset(os.environ, Wanted("ps", num_ps=1, num_workers=4))

A pod knows its index and its own host name. It does not know the number of pods, so --workers and
--ps give it. The names of the other pods follow from its own:

* pod i of an indexed Job is JOB-i.SERVICE, and SERVICE is a headless Service of the Job's name;
* pod i of a job of a JobSet is JOBSET-JOB-0-i.JOBSET, the default of JobSet's network.

JobSet sets no variables. Its pod template must set JOBSET_NAME and REPLICATED_JOB_NAME from the
pod's annotations (deploy/kubernetes has them).
"""

from collections.abc import Mapping

from strategies.cluster.sources.base import DEFAULT_PORT, Found, Variables, Wanted, found_by_rank
from strategies.cluster.tf_config import Task, check_cluster

_INDEX, _JOBSET, _REPLICATED_JOB = "JOB_COMPLETION_INDEX", "JOBSET_NAME", "REPLICATED_JOB_NAME"


def from_indexed_job(environment: Mapping[str, str], wanted: Wanted) -> Found:
    """The cluster of all pods of this Job: the last --ps of them are parameter servers."""
    variables = Variables("an indexed Job", environment)
    index, host = variables.number(_INDEX), variables.get("HOSTNAME")
    name, dash, number = host.rpartition("-")
    if not dash or number != str(index):
        raise variables.error(
            f"{_INDEX} is {index}, but HOSTNAME is {host!r}, not of the form JOB-{index}",
            "Leave `hostname` and `hostNetwork` out of the pod's template,",
        )
    num_pods = _num_workers(variables, wanted, "spec.completions") + wanted.num_ps
    _check_index(variables, index, num_pods)
    hosts = [f"{name}-{pod}.{name}" for pod in range(num_pods)]
    return found_by_rank("indexed_job", f"indexed Job {name}", hosts, index, wanted)


def from_jobset(environment: Mapping[str, str], wanted: Wanted) -> Found:
    """The cluster of this JobSet: its job `ps` has the parameter servers, its other job workers.

    A JobSet with one job has all tasks there, the parameter servers last.
    """
    variables = Variables("JobSet", environment)
    jobset, index = variables.get(_JOBSET), variables.number(_INDEX)
    own_job = variables.get(_REPLICATED_JOB)
    where = f"JobSet {jobset}"
    host = environment.get("HOSTNAME", "")
    prefix = f"{jobset}-{own_job}-"
    if host.startswith(prefix) and host != f"{prefix}0-{index}":
        raise variables.error(
            f"the pod of index {index} has the name {host!r}, not {prefix}0-{index}",
            "Give the job `replicas: 1`, and the number of its pods as `completions`,",
        )
    num_workers = _num_workers(variables, wanted, "the completions of the workers' job")

    def pods(job: str, number: int) -> list[str]:
        return [f"{jobset}-{job}-0-{pod}.{jobset}" for pod in range(number)]

    if own_job not in ("worker", "ps"):
        num_pods = num_workers + wanted.num_ps
        _check_index(variables, index, num_pods)
        return found_by_rank("jobset", where, pods(own_job, num_pods), index, wanted)
    hosts = {"worker": pods("worker", num_workers), "ps": pods("ps", wanted.num_ps)}
    _check_index(variables, index, len(hosts[own_job]), f" of job {own_job}")
    port = wanted.port or DEFAULT_PORT
    jobs = {job: [f"{host}:{port}" for host in listed] for job, listed in hosts.items() if listed}
    return Found("jobset", where, check_cluster(jobs, Task(own_job, index), wanted.strategy, where))


def _num_workers(variables: Variables, wanted: Wanted, field: str) -> int:
    if wanted.num_workers is None:
        also = ", without the parameter servers," if wanted.num_ps else ""
        raise variables.error(
            "a pod does not know how many pods there are",
            f"Add --workers=N{also} which must agree with {field},",
        )
    return wanted.num_workers


def _check_index(variables: Variables, index: int, num_pods: int, of: str = "") -> None:
    if index >= num_pods:
        raise variables.error(
            f"this is pod {index}{of}, but --workers and --ps say {num_pods} pod(s){of}, from 0",
            "Correct --workers and --ps, or the completions,",
        )
