"""The cluster from the environments that schedulers give to their tasks."""

import contextlib
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.cluster.sources import finding
from strategies.cluster.sources.base import Found, Wanted, first_port
from strategies.cluster.sources.finding import SCHEDULERS, expand, find, found_by_auto
from strategies.cluster.sources.hosts import from_hosts, here
from strategies.cluster.tf_config import ClusterError
from tests.commands import run_python
from trainer import flags

MULTIWORKER = Wanted("multiworker")

# The variables of one task of `srun --nodes=3 --ntasks=5`, as slurmstepd sets them.
SLURM = {
    "SLURM_JOB_ID": "200505",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gnode[10,20,25,37]",
    "SLURM_NODELIST": "gnode[10,20,25]",
    "SLURM_STEP_NODELIST": "gnode[10,20,25]",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-7-2"}
JOBSET = {
    "JOBSET_NAME": "train",
    "REPLICATED_JOB_NAME": "worker",
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-worker-0-1",
}

SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n10.0.0.9\n",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_TASK_ID": "sky-2026-07-06-21-18-31-563597_train_1",
}
SAGEMAKER = {
    "SM_RESOURCE_CONFIG": '{"current_host":"algo-2","hosts":["algo-1","algo-2"],'
    '"network_interface_name":"eth0"}'
}


P = first_port("200505.0")
Q = first_port(SKYPILOT["SKYPILOT_TASK_ID"])


def slurm(**changes: str) -> dict[str, str]:
    """SLURM with these variables changed."""
    return SLURM | {f"SLURM_{name}": value for name, value in changes.items()}


def of_job(job: str, host: str, index: str = "1") -> dict[str, str]:
    """The pod `host` of another job of the JobSet."""
    return JOBSET | {"REPLICATED_JOB_NAME": job, "HOSTNAME": host, "JOB_COMPLETION_INDEX": index}


def workers(num_workers: int) -> Wanted:
    return Wanted("multiworker", num_workers=num_workers)


def ps(num_ps: int, num_workers: int | None = None, port: int | None = None) -> Wanted:
    return Wanted("ps", num_ps=num_ps, num_workers=num_workers, port=port)


def shown(found: Found | None) -> str:
    """The task and the addresses of each job: "worker 1 of worker a:2222 b:2222, ps c:2222"."""
    assert found is not None
    jobs = found.cluster.jobs.items()
    listed = (" ".join([job, *addresses.values()]) for job, addresses in jobs)
    return f"{found.cluster.task} of {', '.join(listed)}"


SLURM_TASKS = f"gnode10:{P} gnode10:{P + 1} gnode20:{P} gnode20:{P + 1} gnode25:{P}"
LAST_OF_SLURM = slurm(PROCID="4", NODEID="2", LOCALID="0")
SLURM_WORKERS = "gnode10:2222 gnode10:2223 gnode20:2222 gnode20:2223"
PODS = "train-7-0.train-7:2222 train-7-1.train-7:2222"
JOB_WORKERS = "train-worker-0-0.train:3 train-worker-0-1.train:3"
NODES = "train-node-0-0.train:2222 train-node-0-1.train:2222"
IPV6 = {"SKYPILOT_NODE_IPS": "fd00::1\nfd00::2", "SKYPILOT_NODE_RANK": "0"}
CASES = [
    ("slurm", SLURM, MULTIWORKER, f"worker 3 of worker {SLURM_TASKS}"),
    ("slurm", LAST_OF_SLURM, ps(1, port=2222), f"ps 0 of worker {SLURM_WORKERS}, ps gnode25:2222"),
    ("indexed_job", INDEXED_JOB, workers(3), f"worker 2 of worker {PODS} train-7-2.train-7:2222"),
    ("indexed_job", INDEXED_JOB, ps(1, 2), f"ps 0 of worker {PODS}, ps train-7-2.train-7:2222"),
    (
        "jobset",
        JOBSET,
        ps(1, 2, port=3),
        f"worker 1 of worker {JOB_WORKERS}, ps train-ps-0-0.train:3",
    ),
    (
        "jobset",
        of_job("ps", "train-ps-0-0", index="0"),
        ps(1, 1),
        "ps 0 of worker train-worker-0-0.train:2222, ps train-ps-0-0.train:2222",
    ),
    # The job of a Kubeflow TrainJob is called `node`.
    ("jobset", of_job("node", "train-node-0-1"), workers(2), f"worker 1 of worker {NODES}"),
    (
        "skypilot",
        SKYPILOT,
        MULTIWORKER,
        f"worker 1 of worker 10.0.0.4:{Q} 10.0.0.5:{Q} 10.0.0.9:{Q}",
    ),
    ("skypilot", IPV6, MULTIWORKER, "worker 0 of worker [fd00::1]:2222 [fd00::2]:2222"),
    ("sagemaker", SAGEMAKER, MULTIWORKER, "worker 1 of worker algo-1:2222 algo-2:2222"),
    ("sagemaker", SAGEMAKER, ps(1), "ps 0 of worker algo-1:2222, ps algo-2:2222"),
]


@pytest.mark.parametrize(("source", "environment", "wanted", "cluster"), CASES)
def test_environment_of_a_scheduler_describes_the_cluster_and_this_task(
    source: str, environment: dict[str, str], wanted: Wanted, cluster: str
) -> None:
    assert shown(find(source, environment, wanted)) == cluster
    assert shown(find("auto", {**environment, "PATH": "/bin"}, wanted)) == cluster


def test_all_sources_are_tested_and_are_choices_of_the_flag() -> None:
    assert {source for source, *_ in CASES} == set(SCHEDULERS)
    assert tuple(SCHEDULERS) == flags.SCHEDULERS


def assert_says(error: ClusterError, said: str) -> None:
    """The message has these parts in this order, divided by " ... "."""
    assert re.search(".*".join(map(re.escape, said.split(" ... "))), str(error)), error


def without(environment: dict[str, str], part: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if part not in name}


NO_JSON = {"SM_RESOURCE_CONFIG": "algo-1,algo-2"}
UNKNOWN_HOST = {"SM_RESOURCE_CONFIG": '{"current_host": "algo-3", "hosts": ["algo-1"]}'}
ON_HOST_NETWORK = INDEXED_JOB | {"HOSTNAME": "ip-10-0-0-4"}
TWO_OF_SKYPILOT = SKYPILOT | {
    "SKYPILOT_NODE_IPS": "10.0.0.4",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NUM_NODES": "2",
}
SECOND_REPLICA = JOBSET | {"HOSTNAME": "train-worker-3-1"}


@pytest.mark.parametrize(
    ("source", "environment", "said", "wanted"),
    [
        # In the batch script.
        ("auto", without(SLURM, "STEP"), "job 200505 ... in no step ... Put `srun` before", None),
        ("slurm", without(SLURM, "PROCID"), "no SLURM_PROCID ... --cluster=local", None),
        ("slurm", slurm(PROCID="5"), "PROCID is 5, but there are 5 task(s)", None),
        ("slurm", slurm(PROCID="-1"), "SLURM_PROCID is '-1', not a number", None),
        (
            "slurm",
            slurm(STEP_TASKS_PER_NODE="2,3"),
            "3 node(s) in 'gnode[10,20,25]' ... 2 node(s) in '2,3' ... 5 task(s)",
            None,
        ),
        ("slurm", slurm(STEP_TASKS_PER_NODE="2(y2)"), "PER_NODE is '2(y2)' ... 2(x3),1", None),
        (  # A cyclic distribution.
            "slurm",
            slurm(NODEID="0"),
            "task 3 is task 1 of node 0 ... srun --distribution=block",
            None,
        ),
        ("slurm", slurm(HET_SIZE="2"), "heterogeneous ... SLURM_HET_SIZE=2", None),
        ("slurm", {}, "no SLURM_JOB_ID ... TF_CONFIG", None),
        ("slurm", SLURM, "Slurm job 200505, step 0 names only ... Type --ps=1, or use", ps(0)),
        ("indexed_job", INDEXED_JOB, 'needs a "ps" task ... Type --ps=1, or use', ps(0, 3)),
        ("slurm", SLURM, "--ps=5 ... 5 task(s) ... srun --ntasks=N", ps(5)),
        ("auto", INDEXED_JOB, "not know how many pods ... --workers=N ... spec.completions", None),
        ("indexed_job", INDEXED_JOB, "this is pod 2 ... 2 pod(s) ... --workers", workers(2)),
        (
            "indexed_job",
            ON_HOST_NETWORK,
            "JOB_COMPLETION_INDEX is 2 ... 'ip-10-0-0-4' ... hostNetwork",
            workers(3),
        ),
        ("jobset", without(JOBSET, "REPLICATED_JOB"), "no REPLICATED_JOB_NAME", None),
        ("jobset", SECOND_REPLICA, "worker-3-1' ... worker-0-1 ... replicas: 1", workers(3)),
        ("jobset", JOBSET, "pod 1 of job worker ... 1 pod(s) of job worker", ps(1, 1)),
        ("skypilot", SKYPILOT | {"SKYPILOT_NODE_RANK": "3"}, "3 address(es) ... RANK is 3", None),
        ("skypilot", SKYPILOT | {"SKYPILOT_NUM_NODES": "4"}, "3 address(es) ... NODES is 4", None),
        ("auto", TWO_OF_SKYPILOT, "1 address(es) ... NODES is 2", None),
        ("sagemaker", NO_JSON, "SM_RESOURCE_CONFIG is algo-1,algo-2, not as", None),
        ("sagemaker", UNKNOWN_HOST, 'algo-3 ... algo-1 ... {"current_host": "a"', None),
        ("sagemaker", {"SM_RESOURCE_CONFIG": "{}"}, "is {}, not as", None),
        ("sagemaker", {"SM_RESOURCE_CONFIG": "[]"}, "is [], not as", None),
        ("auto", SLURM | SKYPILOT, "Slurm and SkyPilot ... =slurm or --cluster=skypilot", None),
    ],
)
def test_incomplete_or_contradictory_environment_is_explained(
    source: str, environment: dict[str, str], said: str, wanted: Wanted | None
) -> None:
    with pytest.raises(ClusterError) as caught:
        find(source, environment, wanted or MULTIWORKER)
    assert_says(caught.value, said)


ONE_TASK = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}
ONE_HOST_OF_SAGEMAKER = {"SM_RESOURCE_CONFIG": '{"current_host": "algo-1", "hosts": ["algo-1"]}'}
ONE_NODE_OF_SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.4", "SKYPILOT_NODE_RANK": "0"}


@pytest.mark.parametrize(
    "environment",
    [{}, slurm(STEP_NUM_TASKS="1"), ONE_TASK, ONE_NODE_OF_SKYPILOT, ONE_HOST_OF_SAGEMAKER],
)
def test_auto_leaves_a_single_task_to_a_cluster_on_its_machine(environment: dict[str, str]) -> None:
    assert find("auto", environment, MULTIWORKER) is None


def test_single_task_is_a_cluster_where_the_source_is_named() -> None:
    found = find("sagemaker", ONE_HOST_OF_SAGEMAKER, MULTIWORKER)
    assert shown(found) == "worker 0 of worker algo-1:2222"


def test_file_of_sagemaker_is_read_where_its_variable_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "resourceconfig.json"
    monkeypatch.setattr(finding, "RESOURCE_CONFIG_FILE", path)
    assert found_by_auto({}) is None
    path.write_text(SAGEMAKER["SM_RESOURCE_CONFIG"])
    assert shown(find("auto", {}, MULTIWORKER)) == "worker 1 of worker algo-1:2222 algo-2:2222"
    assert found_by_auto({}) == "sagemaker"  # `--model_dir=RUN` alone, in the same container.
    assert find("auto", ONE_HOST_OF_SAGEMAKER, MULTIWORKER) is None


@given(st.text())
def test_ports_of_jobs_are_below_those_of_outgoing_connections(job_id: str) -> None:
    port = first_port(job_id)
    assert port == first_port(job_id)
    assert 10_000 <= port <= 30_000 - 16
    assert port % 16 == 0


def test_ports_of_jobs_differ() -> None:
    assert len({first_port(f"{job}.0") for job in range(1000)}) > 600


# Slurm's node lists.

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True)
RANGES = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=3
)
PARTS = st.lists(
    st.tuples(NAMES, st.lists(st.tuples(RANGES, st.sampled_from(["", "-ib", "x"])), max_size=2)),
    min_size=1,
    max_size=3,
)


def written(ranges: list[tuple[int, int, int]]) -> tuple[str, list[str]]:
    """The text of a bracket, and the numbers in it, by another way than the parser's."""
    texts, numbers = [], []
    for first, more, width in ranges:
        text = str(first).zfill(width)
        texts.append(text if not more else f"{text}-{str(first + more).zfill(width)}")
        numbers += [str(number).zfill(len(text)) for number in range(first, first + more + 1)]
    return ",".join(texts), numbers


@given(PARTS)
def test_node_list_is_expanded_in_its_order(
    parts: list[tuple[str, list[tuple[list[tuple[int, int, int]], str]]]],
) -> None:
    texts, expected = [], []
    for name, brackets in parts:
        text, names = name, [name]
        for ranges, suffix in brackets:
            inside, numbers = written(ranges)
            text += f"[{inside}]{suffix}"
            names = [f"{start}{number}{suffix}" for start in names for number in numbers]
        texts.append(text)
        expected += names
    assert expand(",".join(texts)) == expected


@pytest.mark.parametrize(
    "nodes",
    ["", ",", "n[1", "n1]", "n[[1]]", "n[]", "n[a]", "n[3-1]", "n[1-]", "a b"],
)
def test_malformed_node_list_is_explained(nodes: str) -> None:
    with pytest.raises(ClusterError, match="scontrol show hostnames"):
        expand(nodes)


@given(st.text(alphabet="n1-9[],x ", max_size=9))
def test_any_node_list_is_expanded_or_explained(nodes: str) -> None:
    with contextlib.suppress(ClusterError):
        assert all(expand(nodes))


# --hosts


def hosts(text: str, own: str, wanted: Wanted = MULTIWORKER, task: Any = None) -> str:
    return shown(from_hosts(text, wanted, task, [own, "10.0.0.2"].__contains__))


def test_host_finds_its_own_place_in_a_list_of_names_or_addresses() -> None:
    assert hosts("a, b,c,", "b") == "worker 1 of worker a:2222 b:2222 c:2222"
    assert hosts("a:1,b:2,c", "a") == "worker 0 of worker a:1 b:2 c:2222"
    assert hosts("fd0::1,fd0::2", "fd0::2") == "worker 1 of worker [fd0::1]:2222 [fd0::2]:2222"
    assert hosts("[fd0::1]:7,[fd0::2]:8", "fd0::2") == "worker 1 of worker [fd0::1]:7 [fd0::2]:8"


def test_last_hosts_are_parameter_servers_and_a_host_may_have_several_tasks() -> None:
    wanted, jobs = ps(1, port=4000), "worker a:4000 b:4000, ps a:4001"
    assert hosts("a,b,a", "b", wanted) == f"worker 1 of {jobs}"
    assert hosts("a,b,a", "a", wanted, ("ps", 0)) == f"ps 0 of {jobs}"
    assert hosts("a,b,a", "a", wanted, ("worker", 0)) == f"worker 0 of {jobs}"


@pytest.mark.parametrize(
    ("text", "own", "said"),
    [
        ("a,b", "none", "None of the hosts ... --hosts=a,b is this machine ... its name"),
        ("a,b,a", "a", "2 tasks: worker 0, worker 2 ... --job_name=worker --task_index=0"),
        ("a,,b", "a", "an empty name ... --hosts=a,b,c"),
        ("a:1,a:1", "b", "None of the hosts"),
        ("a:1,b:1,a:1", "b", "a:1 is the address of both"),
        ("a/b,c", "c", "host:port"),
    ],
)
def test_mistake_in_the_list_of_hosts_is_explained(text: str, own: str, said: str) -> None:
    with pytest.raises(ClusterError) as caught:
        hosts(text, own)
    assert_says(caught.value, said)


def test_own_names_and_addresses_are_here_and_others_are_not() -> None:
    is_here = here()
    assert is_here(socket.gethostname())
    assert is_here("127.0.0.1")
    assert is_here("localhost")
    assert not is_here("198.51.100.7")
    assert not is_here("no-such-host.invalid")


# The command line.

# Reads each command line in a fork, because flags are global.
PROGRAM = """
import io, json, os, sys
from data.system.errors import UsageError
from trainer.flags.parsing import parse_words
from trainer.flags.start import read_cluster
from trainer.tf_setup import configure_logging
for words, environment in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        os.environ |= environment
        sys.argv, sys.stderr = ["trainer", *words.split()], io.StringIO()
        configure_logging()
        try:
            parse_words(sys.argv)
            cluster = read_cluster(is_launched=False)
            printed = cluster.tf_config() if cluster else "local"
        except UsageError as error:
            printed = f"error: {error}"
        print(json.dumps(printed + sys.stderr.getvalue()), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
TF_CONFIG = json.dumps(
    {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
)
BOTH = SLURM | {"TF_CONFIG": TF_CONFIG}
RUN = "--strategy=multiworker --model_dir=runs/a"
# Words, an environment, and the cluster or the error with what is logged; ... is any text.
COMMAND_LINES: list[tuple[str, dict[str, str], str]] = [
    (
        RUN,
        SLURM,
        "...cluster of Slurm job 200505, step 0: 5 worker; "
        f"this task is worker 3 at gnode20:{P + 1}\n",
    ),
    (RUN, BOTH, TF_CONFIG),
    (f"{RUN} --cluster=slurm", BOTH, '..."task": {"type": "worker", "index": 3}}...'),
    (f"{RUN} --cluster=local", BOTH, "local"),
    (f"{RUN} --workers=4", {}, "local"),
    (
        f"{RUN} --hosts=127.0.0.1,198.51.100.1 --port=1234",
        {},
        '..."worker": ["127.0.0.1:1234", "198.51.100.1:1234"]...worker 0 at 127.0.0.1:1234\n',
    ),
    (
        "--strategy=ps --model_dir=runs/a --workers=2 --ps=1",
        INDEXED_JOB,
        '..."task": {"type": "ps", "index": 0}}...',
    ),
    (f"{RUN} --workers=2", SLURM, "error: --workers is for a cluster on this machine..."),
    (f"{RUN} --cluster=tf_config", SLURM, "error: --cluster=tf_config needs..."),
    (f"{RUN} --cluster=hosts", {}, "error: --cluster=hosts needs the hosts..."),
    (f"{RUN} --cluster=slurm --hosts=a", SLURM, "error: --hosts and --cluster=slurm are two..."),
    (f"{RUN} --worker_hosts=a:1 --port=7", {}, "error: --worker_hosts describes the cluster..."),
    (f"{RUN} --cluster=local --worker_hosts=a:1", {}, "error: --cluster=local is a ..."),
    (f"{RUN} --cluster=slurm --worker_hosts=a:1", SLURM, "error: --cluster=slurm is a ..."),
    (f"{RUN} --cluster=slurm --job_name=worker", SLURM, "error: --cluster=slurm is a ..."),
    (f"{RUN} --job_name=worker", SLURM, "error: --job_name says which task this process is..."),
]


@pytest.fixture(scope="module")
def read_lines() -> list[str]:
    given = json.dumps([line[:2] for line in COMMAND_LINES])
    done = run_python("-c", PROGRAM, input=given, env={"PATH": "/usr/bin:/bin"}, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "number", range(len(COMMAND_LINES)), ids=[words for words, _, _ in COMMAND_LINES]
)
def test_cluster_of_a_command_line_is_logged_unless_tf_config_or_flags_alone_describe_it(
    number: int, read_lines: list[str]
) -> None:
    pattern = ".*".join(map(re.escape, COMMAND_LINES[number][2].split("...")))
    assert re.fullmatch(pattern, read_lines[number], re.DOTALL), read_lines[number]
