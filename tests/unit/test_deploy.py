"""Each file of deploy/ describes the cluster that its tasks then see.

`tasks_of` does what the scheduler of a file does: it starts a command with an environment for each
task. tests/faults/test_deploy.py runs some of these commands.
"""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import yaml

from strategies.cluster.sources.base import Found, Wanted
from strategies.cluster.sources.finding import find
from strategies.cluster.sources.hosts import from_hosts
from strategies.cluster.tf_config import Cluster, parse_tf_config
from trainer import flags
from trainer.exit_codes import EXIT_BUG, EXIT_RESTART, EXIT_USAGE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
UID = 10001


class Started(NamedTuple):
    """What a scheduler starts: the flags and the environment of a task, and its host's names."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    host: str  # The name by which the other tasks find it.

    def flag(self, name: str) -> str | None:
        """The value of a flag."""
        values = [w.partition("=")[2] for w in self.argv if w.startswith(f"--{name}=")]
        return values[0] if values else None


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def kind(path: Path, name: str) -> dict[str, Any]:
    (found,) = (document for document in documents(path) if document["kind"] == name)
    return found


# What Kubernetes' controllers do.


def pods_of_job(
    spec: dict[str, Any], name: str, annotations: Mapping[str, str], subdomain: str
) -> Iterator[Started]:
    """The pods of an indexed Job."""
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"], "all tasks must run at the same time"
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    for index in range(spec["completions"]):
        environment = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{name}-{index}"}
        for variable in container.get("env", ()):
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            (key,) = re.findall(r"metadata\.annotations\['(.*)'\]", path)
            environment[variable["name"]] = annotations[key]
        yield Started(tuple(container["args"]), environment, f"{name}-{index}.{subdomain}")


def pods_of_jobset(jobset: dict[str, Any], name: str) -> Iterator[Started]:
    assert jobset["network"]["enableDNSHostnames"]
    for job in jobset["replicatedJobs"]:
        assert job.get("replicas", 1) == 1
        annotations = {
            "jobset.sigs.k8s.io/jobset-name": name,
            "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
        }
        spec = job["template"]["spec"]
        yield from pods_of_job(spec, f"{name}-{job['name']}-0", annotations, name)


def indexed_job(path: Path) -> Iterator[Started]:
    service, job = kind(path, "Service"), kind(path, "Job")
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    subdomain = job["spec"]["template"]["spec"]["subdomain"]
    assert subdomain == service["metadata"]["name"]
    return pods_of_job(job["spec"], name, {}, subdomain)


def jobset(path: Path) -> Iterator[Started]:
    document = kind(path, "JobSet")
    return pods_of_jobset(document["spec"], document["metadata"]["name"])


def trainjob(path: Path) -> Iterator[Started]:
    """The JobSet that Kubeflow's controller makes of the runtime and the job."""
    runtime, job = kind(path, "TrainingRuntime"), kind(path, "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    made = runtime["spec"]["template"]["spec"]
    (node,) = made["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec, trainer = node["template"]["spec"], job["spec"]["trainer"]
    spec |= dict.fromkeys(("completions", "parallelism"), trainer["numNodes"])
    spec["completionMode"] = "Indexed"
    spec["template"]["spec"]["containers"][0]["args"] = trainer["args"]
    return pods_of_jobset(made, job["metadata"]["name"])


def tfjob(path: Path) -> Iterator[Started]:
    job = kind(path, "TFJob")
    name, specs = job["metadata"]["name"], job["spec"]["tfReplicaSpecs"]
    cluster = {
        job.lower(): [f"{name}-{job.lower()}-{i}.default.svc:2222" for i in range(spec["replicas"])]
        for job, spec in specs.items()
    }
    for job, spec in specs.items():
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow", "the operator sets TF_CONFIG there"
        for index, address in enumerate(cluster[job.lower()]):
            task = {"type": job.lower(), "index": index}
            text = json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
            yield Started(tuple(container["args"]), {"TF_CONFIG": text}, address.split(":")[0])


# What the other schedulers do.


def compose(profile: str) -> Iterator[Started]:
    (document,) = documents(DEPLOY / "compose.yaml")
    for name, service in document["services"].items():
        if profile in service["profiles"]:
            yield Started(tuple(service["command"]), service.get("environment", {}), name)


def slurm(strategy: str) -> Iterator[Started]:
    """The tasks of a job that was submitted with the flags that its file names for `strategy`."""
    text = (DEPLOY / "slurm" / "train.sbatch").read_text()
    (of_job,) = re.findall(rf"train\.sbatch (--strategy={strategy}.*?) *(?:#.*)?$", text, re.M)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    (words,) = re.findall(r"^srun (.*?)(?<!\\)$", text, re.MULTILINE | re.DOTALL)
    argv = shlex.split(words.replace("\\\n", " "))
    argv = [*argv[argv.index("trainer") + 1 : argv.index("$@")], *of_job.split()]
    nodes, per_node = int(options["nodes"]), int(options["ntasks-per-node"])
    for rank in range(nodes * per_node):
        environment = {
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": f"n[01-{nodes:02}]",
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
            "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank // per_node),
            "SLURM_LOCALID": str(rank % per_node),
        }
        yield Started(tuple(argv), environment, f"n{rank // per_node + 1:02}")


def skypilot() -> Iterator[Started]:
    (document,) = documents(DEPLOY / "skypilot.yaml")
    argv = shlex.split(document["run"].replace("\\\n", " "))
    addresses = [f"10.0.0.{i + 4}" for i in range(document["num_nodes"])]
    for rank, address in enumerate(addresses):
        environment = {
            "SKYPILOT_NODE_IPS": "\n".join(addresses),
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": str(len(addresses)),
            "SKYPILOT_TASK_ID": "sky-2026-11-24-03-00-00-000000_trainer_1",
        }
        yield Started(tuple(argv[argv.index("trainer") + 1 :]), environment, address)


def systemd() -> Iterator[Started]:
    text = (DEPLOY / "systemd" / "trainer@.service").read_text()
    variables = dict(re.findall(r"(HOSTS|TASK)=(--.*)$", text, re.MULTILINE))
    (command,) = re.findall(r"^ExecStart=(.*)", text, re.MULTILINE)
    words = command.replace("$HOSTS", variables["HOSTS"]).replace("$TASK", variables["TASK"])
    argv = words.split()
    yield Started(tuple(argv[argv.index("trainer") + 1 :]), {}, "host-a")


def tasks_of(name: str) -> list[Started]:
    """The tasks of a file of deploy/; compose.yaml#ps: those of a profile, or of a strategy."""
    path, _, profile = name.partition("#")
    readers: dict[str, Callable[[], Iterator[Started]]] = {
        "compose.yaml": lambda: compose(profile),
        "skypilot.yaml": skypilot,
        "systemd/trainer@.service": systemd,
        "kubernetes/indexed-job.yaml": lambda: indexed_job(DEPLOY / path),
        "kubernetes/trainjob.yaml": lambda: trainjob(DEPLOY / path),
        "kubernetes/tfjob.yaml": lambda: tfjob(DEPLOY / path),
        "kubernetes/jobset-multiworker.yaml": lambda: jobset(DEPLOY / path),
        "kubernetes/jobset-ps.yaml": lambda: jobset(DEPLOY / path),
        "slurm/train.sbatch": lambda: slurm(profile),
    }
    return list(readers[path]())


def cluster_of(started: Started) -> Cluster:
    """The cluster that a task sees, by the functions of the program."""
    strategy = started.flag("strategy") or ""
    workers = started.flag("workers")
    num_ps = int(started.flag("ps") or 1) if strategy == "ps" else 0
    wanted = Wanted(strategy, num_ps, int(workers) if workers else None)
    if text := started.environment.get("TF_CONFIG"):
        return parse_tf_config(text, strategy)
    found: Found | None
    if listed := started.flag("hosts"):
        found = from_hosts(listed, wanted, None, lambda host: host == started.host)
    else:
        found = find(started.flag("cluster") or "auto", started.environment, wanted)
    assert found is not None
    return found.cluster


CLUSTERS = {
    "kubernetes/indexed-job.yaml": {"worker": 3},
    "kubernetes/jobset-multiworker.yaml": {"worker": 3},
    "kubernetes/jobset-ps.yaml": {"worker": 3, "ps": 1},
    "kubernetes/trainjob.yaml": {"worker": 3},
    "kubernetes/tfjob.yaml": {"chief": 1, "worker": 2, "ps": 1, "evaluator": 1},
    "compose.yaml#multiworker": {"worker": 3},
    "compose.yaml#ps": {"worker": 3, "ps": 1, "evaluator": 1},
    "slurm/train.sbatch#multiworker": {"worker": 4},
    "slurm/train.sbatch#ps": {"worker": 3, "ps": 1},
    "skypilot.yaml": {"worker": 2},
}
# Files without tasks, or with a task of which other files describe the cluster.
OTHERS = {
    "README.md",
    "Dockerfile",
    "Dockerfile.cuda",
    "kubernetes/pvc.yaml",
    "kubernetes/network-policy.yaml",
    "systemd/trainer@.service",
}


def test_every_file_is_tested() -> None:
    files = {str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*") if path.is_file()}
    assert files == {name.partition("#")[0] for name in CLUSTERS} | OTHERS


@pytest.mark.parametrize("name", CLUSTERS)
def test_tasks_of_a_file_see_one_cluster_in_which_each_is_another_task(name: str) -> None:
    started = tasks_of(name)
    clusters = [cluster_of(task) for task in started]
    assert all(cluster.jobs == clusters[0].jobs for cluster in clusters)
    assert {job: len(known) for job, known in clusters[0].jobs.items()} == CLUSTERS[name]
    assert sorted(str(c.task) for c in clusters) == sorted(map(str, clusters[0].tasks()))
    for task, cluster in zip(started, clusters, strict=True):
        assert cluster.address.rpartition(":")[0] == task.host, "it would listen at another name"


@pytest.mark.parametrize("name", [*CLUSTERS, "systemd/trainer@.service"])
def test_flags_of_a_file_exist_and_a_run_has_a_directory(name: str) -> None:
    for task in tasks_of(name):
        names = {word[2:].partition("=")[0] for word in task.argv}
        assert names <= set(flags.FLAGS), names
        assert {"model_dir", "data_dir"} <= names or "keep_serving" in names


def faults(document: dict[str, Any]) -> list[str]:
    """What the smallest of the schemas that the docs name refuse in a document."""
    schemas = yaml.safe_load(Path(__file__).with_name("kubernetes_schemas.yaml").read_text())
    schema = {"$defs": schemas["$defs"], "type": "object", "additionalProperties": False}
    schema["properties"] = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"$ref": "#/$defs/metadata"},
        "spec": schemas["specs"][f"{document['apiVersion']} {document['kind']}"],
    }
    return [
        f"{error.json_path}: {error.message}"
        for error in jsonschema.Draft202012Validator(schema).iter_errors(document)
    ]


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("*.yaml")), ids=lambda path: path.name)
def test_kubernetes_accepts_a_file(path: Path) -> None:
    for document in documents(path):
        assert faults(document) == []


def test_a_field_that_does_not_exist_is_refused_and_so_is_a_condition_without_status() -> None:
    job = kind(KUBERNETES / "indexed-job.yaml", "Job")
    job["spec"]["backofLimit"] = job["spec"].pop("backoffLimit")
    [evicted, *_] = job["spec"]["podFailurePolicy"]["rules"]
    del evicted["onPodConditions"][0]["status"]
    found = "\n".join(faults(job))
    assert "'backofLimit' was unexpected" in found
    assert "'status' is a required property" in found


def pod_specs() -> Iterator[tuple[str, dict[str, Any]]]:
    """The pods of all files, and the names of the files."""

    def search(found: Any) -> Iterator[dict[str, Any]]:
        if isinstance(found, dict):
            if "containers" in found:
                yield found
            for value in found.values():
                yield from search(value)
        elif isinstance(found, list):
            for value in found:
                yield from search(value)

    for path in sorted(KUBERNETES.glob("*.yaml")):
        for document in documents(path):
            for pod in search(document):
                yield path.name, pod


def test_pods_are_unprivileged_have_time_to_save_and_share_the_volume() -> None:
    volume = kind(KUBERNETES / "pvc.yaml", "PersistentVolumeClaim")
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    pods = list(pod_specs())
    assert len(pods) == 9
    for _, pod in pods:
        assert pod["terminationGracePeriodSeconds"] > flags.FLAGS["grace_secs"].default
        # What a namespace with the standard "restricted" asks for.
        assert pod["automountServiceAccountToken"] is False
        allowed = pod["securityContext"]
        assert (allowed["runAsNonRoot"], allowed["runAsUser"]) == (True, UID)
        assert allowed["seccompProfile"] == {"type": "RuntimeDefault"}
        # Otherwise each start changes the owner of every file of the volume.
        assert allowed["fsGroupChangePolicy"] == "OnRootMismatch"
        (container,) = pod["containers"]
        granted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] | granted == container["securityContext"]
        assert container["image"].rpartition(":")[2] not in ("", "latest")
        claimed, shared = pod["volumes"]
        mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounted == {claimed["name"]: "/data", shared["name"]: "/dev/shm"}
        assert shared["emptyDir"]["medium"] == "Memory"
        assert claimed["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]


def test_only_pods_of_the_cluster_and_prometheus_reach_it() -> None:
    policy = kind(KUBERNETES / "network-policy.yaml", "NetworkPolicy")["spec"]
    ours = policy["podSelector"]["matchLabels"]
    tasks, prometheus = policy["ingress"]
    assert tasks == {"from": [{"podSelector": {"matchLabels": ours}}]}
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert prometheus["from"] == [{"namespaceSelector": monitoring}]
    assert prometheus["ports"] == [{"protocol": "TCP", "port": 9100}]
    assert policy["egress"][0] == {"to": tasks["from"]}
    assert {port["port"] for port in policy["egress"][1]["ports"]} == {53, 443, 9000, 10443}
    assert {"Ingress", "Egress"} == set(policy["policyTypes"])
    text = "".join(path.read_text() for path in KUBERNETES.glob("*.yaml"))
    assert text.count("labels: {app: trainer}") == len(list(pod_specs()))
    assert ours == {"app": "trainer"}
    (document,) = documents(DEPLOY / "compose.yaml")
    assert not any("ports" in service for service in document["services"].values())


def test_jobs_restart_by_exit_code() -> None:
    def jobs() -> Iterator[dict[str, Any]]:
        yield kind(KUBERNETES / "indexed-job.yaml", "Job")["spec"]
        for path in KUBERNETES.glob("jobset-*.yaml"):
            for job in kind(path, "JobSet")["spec"]["replicatedJobs"]:
                yield job["template"]["spec"]
        runtime = kind(KUBERNETES / "trainjob.yaml", "TrainingRuntime")["spec"]["template"]["spec"]
        yield runtime["replicatedJobs"][0]["template"]["spec"]

    found = list(jobs())
    assert len(found) == 5
    for job in found:
        # The first rule that fits counts.
        evicted, fails, restarts = job["podFailurePolicy"]["rules"]
        # Kubernetes up to 1.31 and Kubeflow Trainer 2.0 and 2.1 refuse a condition without status.
        assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert fails["action"] == "FailJob"
        assert fails["onExitCodes"]["values"] == [EXIT_BUG, EXIT_USAGE]
        assert restarts["action"] == evicted["action"] == "Ignore"
        assert restarts["onExitCodes"]["values"] == [EXIT_RESTART]
        assert job["template"]["spec"]["restartPolicy"] == "Never", "as the policy needs it"
    for spec in kind(KUBERNETES / "tfjob.yaml", "TFJob")["spec"]["tfReplicaSpecs"].values():
        assert spec["restartPolicy"] == "OnFailure"


def uncommented(path: Path, start: str) -> list[dict[str, Any]]:
    """The documents of a file, with a comment that holds YAML from `start` as its text."""
    text = path.read_text()
    (block,) = re.findall(rf"^ *# (?:[^\n]*: )?{start}.*\n(?: *# .*\n)*", text, re.MULTILINE)
    added = re.sub(r"^( *)# (?:With Kueue: )?", r"\1", block, flags=re.MULTILINE)
    return list(yaml.safe_load_all(text.replace(block, added)))


@pytest.mark.parametrize(
    "name", ["indexed-job", "jobset-multiworker", "jobset-ps", "tfjob", "trainjob"]
)
def test_label_of_kueue_is_one_of_the_object_that_it_queues(name: str) -> None:
    found = uncommented(KUBERNETES / f"{name}.yaml", "labels")
    (job,) = (d for d in found if d["kind"] in ("Job", "JobSet", "TFJob", "TrainJob"))
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "user-queue"}


def test_patch_of_a_runtime_names_one_of_its_jobs_whose_names_are_short() -> None:
    runtime, job = uncommented(KUBERNETES / "trainjob.yaml", "runtimePatches")
    names = {each["name"] for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    assert all(len(name) <= 20 for name in names), "as Kubeflow Trainer 2.4 wants it"
    (patch,) = job["spec"]["runtimePatches"]
    assert patch.keys() == {"manager", "trainingRuntimeSpec"}
    patched = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert {each["name"] for each in patched} <= names
    assert job["spec"]["trainer"]["numNodes"] == 3, "the text after the patch is the job's"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_image_is_pinned_copies_what_exists_and_is_not_of_root(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert f"install --directory --owner={UID} --group={UID} /data" in text
    lines = text.splitlines()
    words = [line.split() for line in lines if line and not line.startswith(("#", " "))]
    by_name: dict[str, list[list[str]]] = {}
    for instruction, *arguments in words:
        by_name.setdefault(instruction, []).append(arguments)
    ((image,),) = by_name["FROM"]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", image)
    copied = {source for arguments in by_name["COPY"] for source in arguments[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = project["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {pattern.removesuffix("*") for pattern in found}
    needed = {*packages, "pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    assert copied == needed
    (pip,) = (line for line in lines if line.startswith("RUN pip"))
    (extras,) = re.findall(r"\.\[(.*)\]", pip)
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    assert "--constraint constraints.txt" in pip
    assert by_name["USER"] == [[f"{UID}:{UID}"]]
    assert by_name["ENTRYPOINT"] == [['["python",', '"-m",', '"trainer"]']]


def test_unit_of_systemd_serves_its_task() -> None:
    (task,) = tasks_of("systemd/trainer@.service")
    assert {"--keep_serving", "--job_name=ps", "--task_index=0"} <= set(task.argv)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "trainer@.service").read_text()
    path = tmp_path / "trainer@ps-0.service"
    path.write_text(unit.replace("/opt/trainer/bin/python", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=100
    )
    assert str(path) not in done.stderr, done.stderr
    security = ("security", "--offline=true", "--threshold=30", str(path))  # 3.0 of 10.
    done = subprocess.run(["systemd-analyze", *security], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# `srun` runs one task, whose program is the `python` here.
SCHEDULER = {
    "srun": '#!/bin/sh\nshift 2\nSLURM_STEP_ID=0 exec "$@"\n',
    "python": '#!/bin/sh\necho "python $*" >> "$CALLS"\n'
    "[ $CODE = 137 ] && kill -9 $$\nexit $CODE\n",
    "scancel": '#!/bin/sh\necho "scancel $*" >> "$CALLS"\n',
    "scontrol": '#!/bin/sh\necho "scontrol $*" >> "$CALLS"\n',
}
END_OTHERS, REQUEUE = "scancel --signal=TERM 77.0", "scontrol requeue 77"


@pytest.mark.parametrize(
    ("code", "rank", "restarts", "calls"),
    [
        (0, 0, 0, []),
        (1, 1, 0, [END_OTHERS]),
        (2, 1, 0, [END_OTHERS]),
        (75, 0, 0, [END_OTHERS, REQUEUE]),
        (75, 1, 0, [REQUEUE]),
        (137, 0, 0, [END_OTHERS, REQUEUE]),
        (137, 1, 3, [REQUEUE]),
        (75, 1, 20, []),
    ],
)
def test_slurm_script_requeues_a_run_that_can_resume_and_ends_all_tasks_after_a_mistake(
    code: int, rank: int, restarts: int, calls: list[str], tmp_path: Path
) -> None:
    for command, script in SCHEDULER.items():
        (tmp_path / command).write_text(script)
        (tmp_path / command).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "CALLS": str(tmp_path / "calls"),
        "CODE": str(code),
        "SLURM_JOB_ID": "77",
        "SLURM_PROCID": str(rank),
        "SLURM_RESTART_COUNT": str(restarts),
    }
    command_line = ["bash", str(DEPLOY / "slurm" / "train.sbatch"), "--strategy=ps"]
    assert subprocess.run(command_line, env=environment, timeout=100).returncode == code
    trainer, *others = (tmp_path / "calls").read_text().splitlines()
    assert trainer.endswith("--model_dir=/shared/runs/77 --data_dir=/shared/digits --strategy=ps")
    assert others == calls
