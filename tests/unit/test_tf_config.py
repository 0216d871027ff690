import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.cluster.peers import check_own_address
from strategies.cluster.sources.finding import is_described
from strategies.cluster.tf_config import (
    Cluster,
    ClusterError,
    Task,
    local_cluster,
    parse_hosts,
    parse_tf_config,
)

WORKERS = ["a:2222", "b:2222"]
PS_CLUSTER = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["d:1"]}


def tf_config(cluster: object, job: object = "worker", index: object = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def error_of(text: str, strategy: str = "multiworker") -> str:
    with pytest.raises(ClusterError) as caught:
        parse_tf_config(text, strategy)
    return str(caught.value)


def assert_teaches(message: str, *substance: str) -> None:
    """The message has these parts in this order: what came, what is needed, what to type."""
    pattern = ".*".join(map(re.escape, substance))
    assert re.search(pattern, message, re.DOTALL), f"{message!r} lacks {pattern!r}"


@pytest.mark.parametrize(
    ("jobs", "strategy", "chief", "servers"),
    [
        ({"worker": WORKERS}, "multiworker", "worker 0", ()),
        ({"chief": ["c:1"], "worker": WORKERS}, "multiworker", "chief 0", ()),
        ({"master": ["c:1"], "worker": WORKERS}, "multiworker", "chief 0", ()),
        (PS_CLUSTER, "ps", "chief 0", ("worker 0", "worker 1", "ps 0")),
        ({"worker": WORKERS, "ps": ["d:1"]}, "ps", "worker 0", ("worker 0", "worker 1", "ps 0")),
        ({"worker": ["a:1"], "evaluator": ["b:1"]}, "mirrored", "worker 0", ()),
    ],
)
def test_one_task_is_the_chief_and_under_ps_the_others_serve_it(
    jobs: dict[str, list[str]], strategy: str, chief: str, servers: tuple[str, ...]
) -> None:
    cluster = parse_tf_config(tf_config(jobs, next(iter(jobs))), strategy)
    views = [cluster.for_task(task) for task in cluster.tasks()]
    assert [str(view.task) for view in views if view.is_chief] == [chief]
    assert tuple(str(view.task) for view in views if view.is_server) == servers
    assert {view.address_of(view.chief) for view in views} == {cluster.address_of(cluster.chief)}


def test_server_without_a_chief_task_becomes_the_chief_at_another_address() -> None:
    cluster = parse_tf_config(tf_config({"worker": WORKERS, "ps": ["d:1"]}), "ps")
    chief = cluster.with_chief("a:9")
    assert str(chief.task) == "chief 0"
    assert (chief.address, chief.is_chief, chief.is_server) == ("a:9", True, False)


def test_workers_are_counted_with_their_hosts() -> None:
    cluster = parse_tf_config(tf_config({"worker": WORKERS}, index=1), "multiworker")
    assert cluster.task == Task("worker", 1)
    assert (cluster.num("worker"), cluster.num("ps"), cluster.num_hosts) == (2, 0, 2)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (None, False),
        ("{}", False),
        (" {}\n", False),
        (' {"cluster": {}} ', False),
        ('{"cluster": {}, "task": {"type": "worker", "index": 0}}', False),
        ('{"cluster": {"worker": ["a:1"]}}', True),
        ('{"task": {"type": "worker"}}', True),
        ("", True),  # Mistakes, which are explained.
        ("{", True),
        ("[]", True),
        ('{"cluster": {"worker": ["a:1"]}, "cluster": {}}', True),
    ],
)
def test_empty_cluster_is_that_of_one_process(text: str | None, is_one: bool) -> None:
    assert is_described({} if text is None else {"TF_CONFIG": text}) is is_one


UNORDERED = {"worker": {"1": " B : 2222 ", "0": "a:2222"}}
IPV6 = {"worker": ["[::1]:2222", "[FE80::2]:1"]}
SPARSE = PS_CLUSTER | {"worker": {"3": "a:1"}}


@pytest.mark.parametrize(
    ("jobs", "task", "strategy", "name", "address"),
    [
        # The map form, spaces, and an index in quotes.
        (UNORDERED, {"type": "worker", "index": "1"}, "multiworker", "worker 1", "b:2222"),
        # A server needs only its own address, and those of the chief and the ps.
        (SPARSE, {"type": "worker", "index": 3}, "ps", "worker 3", "a:1"),
        # The only task of a job needs no index.
        (SPARSE, {"type": "worker"}, "ps", "worker 3", "a:1"),
        (PS_CLUSTER, {"type": "chief"}, "ps", "chief 0", "c:1"),
        (PS_CLUSTER, {"type": "master"}, "ps", "chief 0", "c:1"),
        (IPV6, {"type": "worker", "index": 1}, "multiworker", "worker 1", "[fe80::2]:1"),
    ],
)
def test_forms_of_addresses_and_indices_are_understood(
    jobs: object, task: object, strategy: str, name: str, address: str
) -> None:
    # Other programs may have keys of their own.
    text = json.dumps({"cluster": jobs, "task": task, "environment": "cloud"})
    cluster = parse_tf_config(text, strategy)
    assert (str(cluster.task), cluster.address) == (name, address)
    assert parse_tf_config(cluster.tf_config(), strategy) == cluster


def test_generation_of_an_elastic_cluster_is_kept() -> None:
    config = json.loads(tf_config({"worker": WORKERS}))
    for foreign in (None, "3", 1.5, [1], True):  # Of another program.
        text = json.dumps(config | {"generation": foreign})
        assert parse_tf_config(text, "multiworker").generation is None
    assert parse_tf_config(json.dumps(config), "multiworker").generation is None
    cluster = parse_tf_config(json.dumps(config | {"generation": 3}), "multiworker")
    for text in (cluster.tf_config(), cluster.training_tf_config()):
        assert parse_tf_config(text, "multiworker") == cluster
    other = cluster.for_task(cluster.other_trainers[0])
    assert json.loads(other.tf_config())["generation"] == 3


def test_ipv6_addresses_are_understood() -> None:
    cluster = parse_tf_config(tf_config({"worker": ["[::1]:2222", "[FE80::2]:1"]}), "multiworker")
    assert list(cluster.jobs["worker"].values()) == ["[::1]:2222", "[fe80::2]:1"]


def test_training_tf_config_has_no_evaluator() -> None:
    cluster = parse_tf_config(tf_config(PS_CLUSTER | {"evaluator": ["e:1"]}, "chief"), "ps")
    assert "evaluator" in json.loads(cluster.tf_config())["cluster"]
    assert json.loads(cluster.training_tf_config()) == json.loads(tf_config(PS_CLUSTER, "chief"))


@pytest.mark.parametrize(
    ("text", "substance"),
    [
        ("", ("not JSON", "Example", "unset TF_CONFIG")),
        ("{'cluster': 1}", ("not JSON", "line 1, column 2", "single quotes")),
        ('{"a":\n [1,}', ("not JSON", "line 2, column 5")),
        ("[1]", ("object", "is [1]", '{"cluster"')),
        ("1", ("object", "is 1")),
        ('{"task": {}, "job": 1}', ('with "cluster"', 'is {"task": {}, "job": 1}')),
        ('{"cluster": []}', ('"cluster"', 'is {"cluster": []}')),
        ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}', ('"worker" twice', "one name")),
        ('{"cluster": {"worker": ["a:1"]}, "task": {}, "task": {}}', ('"task" twice',)),
        ('{"cluster": {"worker": []}}', ("no addresses", '"worker": [')),
        ('{"cluster": {"worker": ["a:1"]}}', ('needs "task"', "none", '"index": 0')),
        ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}', ('needs "task"',)),
    ],
)
def test_malformed_tf_config_is_explained(text: str, substance: tuple[str, ...]) -> None:
    assert_teaches(error_of(text), *substance)


@pytest.mark.parametrize(
    ("job", "index", "substance"),
    [
        ("ps", 0, ('"ps"', "worker (2)", 'Set the type to "worker"')),
        (None, 0, ("null", "worker (2)")),
        ("worker", 2, ("worker 2", "2 worker", "0 to 1", "an integer from 0")),
        ("worker", -1, ("worker -1", "0 to 1")),
        ("worker", "x", ('"x"', "0 to 1", "an integer from 0")),
        ("worker", 1.5, ("1.5", "an integer")),
        ("worker", True, ("true", "an integer")),
        ("worker", [0], ("[0]", "an integer")),
        ("evaluator", 0, ("evaluates itself: start none", "workerPoolSpecs[3]", "host:port")),
    ],
)
def test_task_that_is_not_in_the_cluster_is_explained(
    job: object, index: object, substance: tuple[str, ...]
) -> None:
    assert_teaches(error_of(tf_config({"worker": WORKERS}, job, index)), *substance)


@pytest.mark.parametrize(
    "address",
    [
        *("host", "[::1]", "host:", "host:http", "host:0", "host:65536", "host:٣", ":2222"),
        *("[]:2222", "::1:2222", "http://host:1", "a:1, b:1", "a b:1", "a..b:1", 2222, None),
    ],
)
def test_malformed_address_is_explained(address: object) -> None:
    form = ("worker 0", repr(address), '"host:port"', "1 to 65535", "[::1]:2222")
    assert_teaches(error_of(tf_config({"worker": [address]})), *form)


@pytest.mark.parametrize(
    ("cluster", "substance"),
    [
        ({"worker": "a:1,b:1"}, ('"worker"', "list", "a:1,b:1", '["host:port"]')),
        ({"worker": {"x": "a:1"}}, ('"worker"', "'x'", '{"0": "host:port"}')),
        ({"worker": {"0": "a:1", "00": "b:1"}}, ("different", "['0', '00']", '{"0": "host:port"}')),
        ({"worker": {"0": "a:1", "2": "b:1"}}, ("worker 0, 2", "not worker 1")),
        ({"worker": ["a:1", "A:1 "]}, ("a:1", "both worker 0 and worker 1")),
        ({"worker": ["a:1"], "chief": ["a:1"]}, ("both worker 0 and chief 0",)),
        ({"chief": ["a:1", "b:1"], "worker": ["c:1"]}, ("one chief", "2", "make them workers")),
        ({"chief": {"1": "a:1"}, "worker": ["c:1"]}, ("chief 0", "index 1")),
        ({"workers": ["a:1"]}, ('"workers"', '"worker"', '"evaluator"')),
        ({"master": ["a:1"], "chief": ["b:1"]}, ('"master"', '"chief"')),
    ],
)
def test_malformed_job_is_explained(cluster: object, substance: tuple[str, ...]) -> None:
    assert_teaches(error_of(tf_config(cluster)), *substance)


@pytest.mark.parametrize(
    ("strategy", "cluster", "substance"),
    [
        ("multiworker", PS_CLUSTER, ('no "ps" task', "ps (1)", "--strategy=ps")),
        ("multiworker", {"evaluator": ["a:1"]}, ('"worker" task', "evaluator (1)", '"worker": [')),
        ("ps", {"worker": WORKERS}, ('needs a "ps" task', "worker (2)", '"ps": ["host:port"]')),
        ("ps", {"worker": WORKERS}, ('needs a "ps" task', "--strategy=multiworker")),
        ("ps", {"chief": ["a:1"], "ps": ["b:1"]}, ('needs a "worker" task', '"worker": [')),
        ("ps", {"worker": {"1": "a:1"}, "ps": ["b:1"]}, ("where its chief is", "worker 0")),
        ("ps", PS_CLUSTER | {"worker": {"3": "a:1"}}, ("chief 0", "not worker 0, 1, 2", "each")),
        ("mirrored", {"worker": WORKERS}, ("one process", "worker (2)", "--strategy=multiworker")),
        ("mirrored", PS_CLUSTER, ("one process", "--strategy=ps")),
        ("mirrored", {"ps": ["a:1"]}, ("one process", "ps (1)")),
        ("ps", PS_CLUSTER | {"evaluator": ["e:1", "f:1"]}, ("one evaluator", "2")),
        ("mirrored", {"evaluator": ["a:1"]}, ("one process", "evaluator (1)")),
    ],
)
def test_jobs_that_a_strategy_does_not_accept_are_explained(
    strategy: str, cluster: dict[str, list[str] | dict[str, str]], substance: tuple[str, ...]
) -> None:
    job = next(iter(cluster))
    index = next(iter(cluster[job])) if isinstance(cluster[job], dict) else 0
    assert_teaches(error_of(tf_config(cluster, job, index), strategy), *substance)


HOSTS = {"ps": "d:1", "worker": " a : 2222 , b:2222, "}


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_host_flags_and_tf_config_give_equal_clusters(job: str) -> None:
    index = None if job == "ps" else 0  # The index of an only task may be left out.
    cluster = parse_hosts(HOSTS, job, index, "ps")
    assert cluster == parse_tf_config(tf_config({"ps": ["d:1"], "worker": WORKERS}, job), "ps")


@pytest.mark.parametrize(
    ("hosts", "job", "index", "substance"),
    [
        (HOSTS, None, 0, ("--job_name", "worker (2)", "None", "--job_name=worker")),
        (HOSTS, "chief", 0, ("--job_name", "worker (2)", "chief")),
        (HOSTS, "evaluator", 0, ("--job_name", "evaluator")),
        (HOSTS, "worker", None, ("--task_index from 0 to 1", "--worker_hosts", "None")),
        (HOSTS, "worker", 2, ("--task_index from 0 to 1", "2")),
        (HOSTS, "ps", -1, ("--task_index from 0 to 0", "-1")),
        ({"worker": "a:1"}, "worker", 0, ('needs a "ps" task', "the command line", "--ps_hosts=")),
        ({"ps": "a:1"}, "ps", 0, ('needs a "worker" task', "--worker_hosts=")),
        (HOSTS | {"worker": "a,b:1"}, "ps", 0, ("command line", "worker 0 is 'a'", '"host:port"')),
        (HOSTS | {"worker": "a:1,,b:1"}, "ps", 0, ("command line", "worker 1 is ''")),
        (HOSTS | {"worker": "d:1"}, "ps", 0, ("command line", "d:1", "both ps 0 and worker 0")),
        (HOSTS | {"chief": "e:1,f:1"}, "ps", 0, ("one chief", "names 2")),
        (HOSTS | {"worker": ""}, "ps", 0, ('needs a "worker" task', "ps (1)")),
    ],
)
def test_mistakes_in_host_flags_are_explained(
    hosts: dict[str, str], job: str | None, index: int | None, substance: tuple[str, ...]
) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_hosts(hosts, job, index, "ps")
    assert_teaches(str(caught.value), *substance)


ADDRESSES = st.builds(
    "{}:{}".format,
    st.from_regex(r"[a-z][a-z0-9-]{0,8}|\[[0-9a-f:]{1,8}\]|\d{1,3}\.0\.0\.1", fullmatch=True),
    st.integers(1, 65535),
)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Cluster, str]:
    strategy = draw(st.sampled_from(["multiworker", "ps"]))
    num_workers = draw(st.integers(1, 12))
    sizes = {"chief": 1, "worker": num_workers, "evaluator": draw(st.integers(0, 1))}
    if strategy == "ps":
        sizes["ps"] = draw(st.integers(1, 3))
    elif draw(st.booleans()):
        del sizes["chief"]
    total = sum(sizes.values())
    addresses = iter(draw(st.lists(ADDRESSES, min_size=total, max_size=total, unique=True)))
    jobs = {job: {i: next(addresses) for i in range(size)} for job, size in sizes.items()}
    task = draw(st.sampled_from([Task(job, i) for job, known in jobs.items() for i in known]))
    if strategy == "ps" and task.job == "worker" and draw(st.booleans()):
        jobs["worker"] = {task.index: jobs["worker"][task.index]}
    return Cluster(jobs, task), strategy


@given(clusters())
def test_tf_config_of_a_cluster_parses_to_the_same_cluster_which_has_one_chief(
    made: tuple[Cluster, str],
) -> None:
    cluster, strategy = made
    assert parse_tf_config(cluster.tf_config(), strategy) == cluster
    if 0 in cluster.jobs["worker"] or "chief" in cluster.jobs:
        assert sum(cluster.for_task(task).is_chief for task in cluster.tasks()) == 1


@given(
    st.text(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["cluster", "task", "worker", "ps", "chief", "type", "index", "0"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ).map(json.dumps)
)
def test_any_text_gives_a_cluster_or_a_cluster_error(text: str) -> None:
    try:
        cluster = parse_tf_config(text, "multiworker")
    except ClusterError:
        return
    assert cluster.task in cluster.tasks()


def test_local_cluster_has_the_tasks_asked_for_on_different_free_ports() -> None:
    cluster = local_cluster("ps", num_workers=3, num_ps=2)
    assert [cluster.num(job) for job in ("chief", "worker", "ps")] == [1, 3, 2]
    assert cluster.is_chief
    addresses = [cluster.for_task(task).address for task in cluster.tasks()]
    assert len(set(addresses)) == 6
    assert cluster.num_hosts == 1
    for task in cluster.tasks():
        check_own_address(cluster.for_task(task))
    assert parse_tf_config(cluster.tf_config(), "ps") == cluster

    cluster = local_cluster("multiworker", num_workers=2, num_ps=1)
    assert cluster.tasks() == (Task("worker", 0), Task("worker", 1))
    assert cluster.is_chief


@pytest.mark.parametrize(
    ("strategy", "num_workers", "num_ps", "substance"),
    [
        ("multiworker", 0, 0, ("at least one worker", "--workers=0", "--workers=1")),
        ("ps", -1, 1, ("at least one worker", "--workers=-1")),
        ("ps", 2, 0, ("at least one ps", "--ps=0", "--ps=1")),
    ],
)
def test_local_cluster_without_tasks_is_refused(
    strategy: str, num_workers: int, num_ps: int, substance: tuple[str, ...]
) -> None:
    with pytest.raises(ClusterError) as caught:
        local_cluster(strategy, num_workers, num_ps)
    assert_teaches(str(caught.value), *substance)
