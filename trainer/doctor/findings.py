"""Compares the reports of all tasks: what is wrong, with which task and host, and what to type.

    for finding in findings(reports, cluster, deadline_secs=30.0):
        print(finding)

A report is the JSON object of `plan.machine`, with `plan` of `plan.py`, `meetings` of
`Exchange.measure` and `faults`, what the task has found about itself. Reports may be missing.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from strategies.cluster.peers import host_of
from strategies.cluster.tf_config import Cluster
from trainer.doctor.exchange import Json

# A link is slow if it has less than this fraction of the rate of the others.
_SLOW_FRACTION = 0.25
# A faster link (10 Gbit/s) is not called slow: rates above that change with the load of the cores.
_FAST_MB_PER_SEC = 1250.0
_CLOCK_SECS = 5.0
_STATES = {
    "refused": "its host answers, but nothing listens at that port. Start this command there, or "
    "correct the port, in the configuration of every task",
    "silent": "its host does not answer. Check that it is up, and that no firewall drops packets "
    "to this port: `ping` it, and `nc -vz` its address and port",
    "unknown host": "the name of its host is unknown ({detail}). Correct the name, or check the "
    "DNS: `getent hosts` and the name",
    "stranger": "another program serves there ({detail}). End it (`ss -tlnp` shows it), or give "
    "the task another port, in the configuration of every task",
    "small only": "short messages arrive, and one of {detail} bytes does not: a link on the way "
    "drops large packets without a word (MTU). Find the largest that arrives, `ping -M do -s 1472` "
    "and its address, and give the interface 28 bytes more: `ip link set dev DEVICE mtu SIZE`",
    "lost": "it answered, and then its connection broke ({detail}). Look at its output",
    "unknown": "there was no time to reach it. Give --deadline_secs more time",
}

PEER_ADVICE = (
    "Type NCCL_P2P_DISABLE=1 before the command. If that helps, copies from GPU to GPU are broken: "
    "switch off ACS (`lspci -vvv | grep ACSCtl` shows it) and the IOMMU in the BIOS"
)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or, as a warning, may be."""

    level: Literal["error", "warning"]
    task: str
    address: str
    text: str  # What came, what is needed, and what to type.

    def __str__(self) -> str:
        where = f"{self.task} ({self.address}): " if self.task else ""
        return f"{self.level}: {where}{self.text}."


def findings(
    reports: Mapping[str, Json], cluster: Cluster, *, deadline_secs: float
) -> list[Finding]:
    """What is wrong, the errors first. `cluster` is the view of this task."""
    found = [
        *_absent(reports, cluster),
        *_addresses(reports, cluster),
        *_versions(reports, cluster),
        *_rates(reports, cluster),
        *_clocks(reports, cluster),
        *_own(reports, cluster, deadline_secs),
        *_memory(reports, cluster),
        *_gpus(reports, cluster),
    ]
    return sorted(found, key=lambda finding: finding.level)


def device_findings(checked: Json, cluster: Cluster) -> Iterator[Finding]:
    """Devices of this task whose sums or copies are wrong; `checked` is from `check_devices`."""
    name = str(cluster.task)
    if error := checked.get("error"):
        yield _error(cluster, name, error)
    if devices := checked.get("wrong_sums"):
        text = f"a sum over {checked['replicas']} replicas is wrong on {', '.join(devices)}"
        yield _error(cluster, name, f"{text}. {PEER_ADVICE}")
    for pair in checked.get("copies", []):
        if not pair["is_right"]:
            text = f"a copy from {pair['from']} to {pair['to']} arrives with other values"
            yield _error(cluster, name, f"{text}. {PEER_ADVICE}")


def can_connect(reports: Mapping[str, Json], cluster: Cluster) -> bool:
    """Returns True if TensorFlow can connect all tasks; equal in all tasks with all reports."""
    names = {str(task) for task in cluster.tasks()}
    checks = (_addresses, _versions, _gpus)
    faults = [fault for check in checks for fault in check(reports, cluster)]
    return (
        names == reports.keys()
        and not faults
        and all(
            state["state"] == "met"
            for report in reports.values()
            for state in report["meetings"].values()
        )
    )


def _error(cluster: Cluster, name: str, text: str) -> Finding:
    return Finding("error", name, _address(cluster, name), text)


def _warning(cluster: Cluster, name: str, text: str) -> Finding:
    return Finding("warning", name, _address(cluster, name), text)


def _address(cluster: Cluster, name: str) -> str:
    job, _, index = name.partition(" ")
    return cluster.jobs.get(job, {}).get(int(index), "unknown address")


def _absent(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[Finding]:
    """Tasks that other tasks cannot reach."""
    misplaced = {finding.task for finding in _addresses(reports, cluster)}
    absent: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for seer, report in reports.items():
        for name, state in report["meetings"].items():
            if state["state"] != "met" and not {seer, name} & misplaced:
                text = _STATES[state["state"]].format(detail=state.get("detail", "no answer to us"))
                absent[name][text].append(seer)
    met = {name for report in reports.values() for name in report["meetings"]}
    for name in sorted(met - reports.keys() - absent.keys()):
        yield _error(
            cluster, name, "it came, but its report did not. Give --deadline_secs more time"
        )
    for name, texts in absent.items():
        text = max(texts, key=lambda text: len(texts[text]))
        seers = sorted(seer for known in texts.values() for seer in known)
        came = "did not come" if name not in reports else "came, but cannot be reached"
        from_some = ""
        if len(seers) < len(reports) - (name in reports):
            from_some = f" from {', '.join(seers)}"
        yield _error(cluster, name, f"{came}{from_some}: {text}")


def _addresses(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[Finding]:
    """Tasks that have another description of the cluster than most."""
    for name in sorted({name for report in reports.values() for name in report["addresses"]}):
        said = {task: report["addresses"].get(name) for task, report in reports.items()}
        usual, odd = _majority(said, prefer=str(cluster.chief))
        for task in odd:
            yield _error(
                cluster,
                task,
                f"it was started with {name} at {said[task]}, but other tasks have {name} at "
                f"{usual}. Start it with the same cluster as the others: correct the address, the "
                "port, or the number of tasks",
            )


def _majority(said: Mapping[str, object], prefer: str) -> tuple[object, list[str]]:
    """The most frequent value, and the tasks with another; of equals, the value of `prefer`."""
    counts = Counter(map(str, said.values()))
    most = max(counts.values(), default=0)
    usual = [value for value, count in counts.items() if count == most]
    chosen = str(said[prefer]) if str(said.get(prefer)) in usual else (usual or [""])[0]
    return chosen, sorted(task for task, value in said.items() if str(value) != chosen)


def _versions(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[Finding]:
    """Tasks with other versions, code or config than most."""
    advice = {
        "code of this program": "Install the same code on all hosts",
        "python": "Use the same Python on all hosts",
        "config file": "Give all tasks the same config file",
    }
    for part in ("versions", "fingerprint"):
        known = {task: report[part] for task, report in reports.items() if report[part]}
        names = list(dict.fromkeys(name for values in known.values() for name in values))
        for name in names:
            said = {task: values.get(name) for task, values in known.items()}
            usual, odd = _majority(said, prefer=str(cluster.chief))
            for task in odd:
                if part == "versions":
                    usually = advice.get(name, f"Type there: pip install {name}=={usual}")
                    text = f"{name} is {said[task]} there, but {usual} in other tasks. {usually}"
                else:
                    usually = advice.get(name, f"Give all tasks the same {name}")
                    text = f"{name} is another one than in other tasks. {usually}"
                yield _error(cluster, task, text)


def _rates(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[Finding]:
    """Tasks, or pairs of tasks, whose links are slow. Tasks of one host have no link."""

    def host(name: str) -> str:
        return host_of(_address(cluster, name))

    rates = {
        (sender, receiver): state["mb_per_sec"]
        for receiver, report in reports.items()
        for sender, state in report["meetings"].items()
        if "mb_per_sec" in state and host(sender) != host(receiver)
    }
    if len(rates) < 2:
        return
    usual = statistics.median_high(rates.values())
    slow = {
        pair for pair, rate in rates.items() if rate < min(_SLOW_FRACTION * usual, _FAST_MB_PER_SEC)
    }
    for place, verb in ((0, "sends"), (1, "receives")):
        for name in sorted({pair[place] for pair in slow}):
            own = [pair for pair in rates if pair[place] == name]
            if not set(own) <= slow or (len(own) == 1 and len(rates) > 2 and place == 1):
                continue
            rate = statistics.median(rates[pair] for pair in own)
            yield _error(
                cluster,
                name,
                f"it {verb} {rate:,.1f} MB/s, and other tasks {usual:,.1f} MB/s. Every step waits "
                "for it. Look for a slow link (`ethtool` and its interface) or other load; or type "
                "--wire_dtype=bfloat16, which halves the bytes",
            )
            slow -= set(own)
    for sender, receiver in sorted(slow):
        yield _error(
            cluster,
            receiver,
            f"it receives {rates[sender, receiver]:,.1f} MB/s from {sender} "
            f"({_address(cluster, sender)}), and other pairs have {usual:,.1f} MB/s. Look for a "
            "slow link between the two",
        )


def _clocks(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[Finding]:
    """Tasks whose clock differs from that of the task with which most agree."""
    ahead: dict[str, dict[str, float]] = defaultdict(dict)  # How far b is ahead of a: [a][b].
    for name, report in reports.items():
        for other, state in report["meetings"].items():
            if "clock_secs" in state:
                ahead[name][other] = state["clock_secs"]
                ahead[other].setdefault(name, -state["clock_secs"])

    def num_equal(name: str) -> int:
        return sum(abs(secs) <= _CLOCK_SECS for secs in ahead[name].values())

    chief = str(cluster.chief)
    right = max(ahead, key=lambda name: (num_equal(name), name == chief), default=chief)
    for name, secs in sorted(ahead[right].items()):
        if abs(secs) > _CLOCK_SECS:
            yield _error(
                cluster,
                name,
                f"its clock differs by {secs:+,.1f} s from that of {right}: times in logs mislead, "
                "and object storage refuses requests. Type there: timedatectl set-ntp true",
            )


def _own(reports: Mapping[str, Json], cluster: Cluster, deadline_secs: float) -> Iterator[Finding]:
    """What a task has found about itself. Without any plan of the run nothing was examined."""
    has_plan = bool(memory_needed(reports))
    for name, report in reports.items():
        for fault in report["faults"]:
            yield _error(cluster, name, fault.rstrip("."))
        plan = report["plan"]
        if error := plan.get("error"):
            yield _error(cluster, name, error.rstrip("."))
        if plan.get("is_late"):
            text = f"it had no time to build the model. Type --deadline_secs={4 * deadline_secs:g}"
            yield (_warning if has_plan else _error)(cluster, name, text)
        free, needed = report["free_disk_bytes"], plan.get("disk_bytes", 0)
        if free is not None and free < needed and name == str(cluster.chief):
            yield _error(
                cluster,
                name,
                f"the checkpoints of a run need {needed:,} bytes, and the disk of --model_dir has "
                f"{free:,} free. Make room, or give --config.keep_checkpoints=1 or another "
                "--model_dir",
            )
        port, outgoing = int(report["address"].rpartition(":")[2]), report["outgoing_ports"]
        if outgoing and outgoing[0] <= port <= outgoing[1]:
            yield _warning(
                cluster,
                name,
                f"port {port} is in the range of its host for outgoing connections "
                f"({outgoing[0]} to {outgoing[1]}): another program may take it. Use a port below",
            )


def _memory(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[Finding]:
    """Machines whose tasks need more memory than is free."""
    needed = memory_needed(reports)
    machines: dict[str, list[str]] = defaultdict(list)
    for name, report in reports.items():
        machines[report["machine"]].append(name)
    for names in machines.values():
        free = min(reports[name]["free_memory_bytes"] for name in names)
        total = sum(needed.get(name, 0) for name in names)
        if total > free:
            yield _error(
                cluster,
                names[0],
                f"{' and '.join(names)} need {total:,} bytes of memory without activations, and "
                f"their machine has {free:,} free. Give a smaller --batch_size, more --ps, or a "
                "larger machine",
            )


def memory_needed(reports: Mapping[str, Json]) -> Mapping[str, int]:
    """The estimated bytes by task, of the first report that has a plan."""
    plans = (report["plan"] for report in reports.values())
    return next((plan["memory_bytes"] for plan in plans if "memory_bytes" in plan), {})


def _gpus(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[Finding]:
    """Workers with another number of GPUs than most."""
    said = {
        name: report["plan"]["gpus"]
        for name, report in reports.items()
        if "gpus" in report["plan"] and name.startswith(("worker", "chief"))
    }
    if cluster.num("ps"):
        said = {name: number for name, number in said.items() if name.startswith("worker")}
    usual, odd = _majority(said, prefer=str(cluster.chief))
    for name in odd:
        yield _error(
            cluster,
            name,
            f"TensorFlow finds {said[name]} GPU(s) there, and {usual} in other workers. Type "
            "there: nvidia-smi; and look at CUDA_VISIBLE_DEVICES; or give all --num_gpus",
        )
