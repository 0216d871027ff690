"""Compares the reports of all tasks: what is wrong, with which task and host, and what to type.

    for finding in findings(reports, cluster, deadline_secs=30.0):
        print(finding)

A report is the JSON object of `plan.machine`, with `plan` (from plan.py), `meetings` (from
`Exchange.measure`) and `faults`, which the task has found about itself. Reports may be missing.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from strategies.cluster.peers import host_of, port_of
from strategies.cluster.tf_config import Cluster
from trainer.doctor.exchange import Json

# A link is slow if its highest rate is below this fraction of the highest rates, and also of the
# median rates, of other links. While cores are busy, rates change from one moment to the next.
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

_VERSION_ADVICE = {
    "code of this program": "Install the same code on all hosts",
    "python": "Use the same Python on all hosts",
}
_Fault: TypeAlias = tuple[str, str]  # The task, and the text of a finding.


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be wrong, and what to type."""

    level: str  # "error" or "warning".
    task: str
    address: str
    text: str  # What was found, what is needed, and what to type.

    def __str__(self) -> str:
        where = f"{self.task} ({self.address}): " if self.task else ""
        return f"{self.level}: {where}{self.text}."


def findings(
    reports: Mapping[str, Json], cluster: Cluster, *, deadline_secs: float
) -> list[Finding]:
    """Returns what is wrong, the errors first. `cluster` is the view of this task."""
    checks = (_absent, _addresses, _versions, _rates, _clocks, _own, _memory, _gpus)
    errors = [fault for check in checks for fault in check(reports, cluster)]
    late = list(_late(reports, deadline_secs))
    has_plan = bool(memory_needed(reports))  # Without the plan of any task nothing was examined.
    warnings = [*(late if has_plan else []), *_outgoing_ports(reports)]
    faults = [("error", *fault) for fault in [*errors, *([] if has_plan else late)]]
    faults += [("warning", *fault) for fault in warnings]
    return [Finding(level, name, _address(cluster, name), text) for level, name, text in faults]


def device_findings(checked: Json, cluster: Cluster) -> list[Finding]:
    """Returns what is wrong with the devices of this task; `checked` is from `check_devices`."""
    texts = [checked["error"]] if checked.get("error") else []
    if devices := checked.get("wrong_sums"):
        where = ", ".join(devices)
        texts.append(
            f"a sum over {checked['replicas']} replicas is wrong on {where}. {PEER_ADVICE}"
        )
    for pair in checked.get("copies", []):
        if not pair["is_right"]:
            copy = f"a copy from {pair['from']} to {pair['to']}"
            texts.append(f"{copy} arrives with other values. {PEER_ADVICE}")
    return [Finding("error", str(cluster.task), cluster.address, text) for text in texts]


def can_connect(reports: Mapping[str, Json], cluster: Cluster) -> bool:
    """Returns True if TensorFlow can connect all tasks.

    All tasks that have the same reports return the same.
    """
    names = {str(task) for task in cluster.tasks()}
    checks = (_addresses, _versions, _gpus)
    has_fault = any(fault for check in checks for fault in check(reports, cluster))
    meetings = [state for report in reports.values() for state in report["meetings"].values()]
    have_met = all(state["state"] == "met" for state in meetings)
    return names == reports.keys() and not has_fault and have_met


def _address(cluster: Cluster, name: str) -> str:
    job, _, index = name.partition(" ")
    return cluster.jobs.get(job, {}).get(int(index), "unknown address")


def _absent(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[_Fault]:
    """Tasks that other tasks cannot reach."""
    misplaced = {task for task, _ in _addresses(reports, cluster)}
    absent: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for seer, report in reports.items():
        for name, state in report["meetings"].items():
            if state["state"] != "met" and not {seer, name} & misplaced:
                text = _STATES[state["state"]].format(detail=state.get("detail", "no answer to us"))
                absent[name][text].append(seer)
    met = {name for report in reports.values() for name in report["meetings"]}
    for name in sorted(met - reports.keys() - absent.keys()):
        yield name, "it came, but its report did not. Give --deadline_secs more time"
    for name, texts in absent.items():
        text = max(texts, key=lambda text: len(texts[text]))
        seers = sorted(seer for known in texts.values() for seer in known)
        came = "did not come" if name not in reports else "came, but cannot be reached"
        is_seen_by_some = len(seers) < len(reports.keys() - {name})
        from_some = f" from {', '.join(seers)}" if is_seen_by_some else ""
        yield name, f"{came}{from_some}: {text}"


def _addresses(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[_Fault]:
    """Tasks that have another description of the cluster than most."""
    for name in sorted({name for report in reports.values() for name in report["addresses"]}):
        said = {task: report["addresses"].get(name) for task, report in reports.items()}
        usual, odd = _majority(said, prefer=str(cluster.chief))
        for task in odd:
            text = (
                f"it was started with {name} at {said[task]}, but other tasks have {name} at "
                f"{usual}. Start it with the same cluster as the others: correct the address, the "
                "port, or the number of tasks"
            )
            yield task, text


def _majority(said: Mapping[str, object], prefer: str) -> tuple[object, list[str]]:
    """The most frequent value, and the tasks with another; of equals, the value of `prefer`."""
    counts = Counter(map(str, said.values()))
    most = max(counts.values(), default=0)
    usual = [value for value, count in counts.items() if count == most]
    chosen = str(said[prefer]) if str(said.get(prefer)) in usual else (usual or [""])[0]
    return chosen, sorted(task for task, value in said.items() if str(value) != chosen)


def _versions(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[_Fault]:
    """Tasks with other versions, code or config than most."""
    for part in ("versions", "fingerprint"):
        known = {task: report[part] for task, report in reports.items() if report[part]}
        for name in dict.fromkeys(name for values in known.values() for name in values):
            said = {task: values.get(name) for task, values in known.items()}
            usual, odd = _majority(said, prefer=str(cluster.chief))
            for task in odd:
                if part == "fingerprint":  # Of numbers that say nothing to a user.
                    text = f"another one than in other tasks. Give all tasks the same {name}"
                else:
                    default = f"Type there: pip install {name}=={usual}"
                    advice = _VERSION_ADVICE.get(name, default)
                    text = f"{said[task]} there, but {usual} in other tasks. {advice}"
                yield task, f"{name} is {text}"


def _rates(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[_Fault]:
    """Tasks, or pairs of tasks, whose links are slow. Tasks of one host have no link."""

    def host(name: str) -> str:
        return host_of(_address(cluster, name))

    measured = {
        (sender, receiver): state
        for receiver, report in reports.items()
        for sender, state in report["meetings"].items()
        if "mb_per_sec" in state and host(sender) != host(receiver)
    }
    if len(measured) < 2:
        return
    rates = {pair: state["mb_per_sec"] for pair, state in measured.items()}
    usual = statistics.median_high(rates.values())
    slow = {pair for pair, rate in rates.items() if rate < _limit(usual)}
    if rounds := [
        statistics.median_high(state.get("rounds_mb_per_sec", [state["mb_per_sec"]]))
        for pair, state in measured.items()
        if pair not in slow
    ]:
        limit = _limit(statistics.median_high(rounds))
        slow = {pair for pair in slow if rates[pair] < limit}
    for place, verb in ((0, "sends"), (1, "receives")):
        for name in sorted({pair[place] for pair in slow}):
            own = [pair for pair in rates if pair[place] == name]
            if not set(own) <= slow or (len(own) == 1 and len(rates) > 2 and place == 1):
                continue
            rate = statistics.median(rates[pair] for pair in own)
            text = (
                f"it {verb} {rate:,.1f} MB/s, and other tasks {usual:,.1f} MB/s. Every step waits "
                "for it. Look for a slow link (`ethtool` and its interface) or other load; or type "
                "--wire_dtype=bfloat16, which halves the bytes"
            )
            yield name, text
            slow -= set(own)
    for sender, receiver in sorted(slow):
        text = (
            f"it receives {rates[sender, receiver]:,.1f} MB/s from {sender} "
            f"({_address(cluster, sender)}), and other pairs have {usual:,.1f} MB/s. Look for a "
            "slow link between the two"
        )
        yield receiver, text


def _limit(mb_per_sec: float) -> float:
    """The rate below which a link is slow if others have `mb_per_sec`."""
    return min(_SLOW_FRACTION * mb_per_sec, _FAST_MB_PER_SEC)


def _clocks(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[_Fault]:
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
            text = (
                f"its clock differs by {secs:+,.1f} s from that of {right}: times in logs mislead, "
                "and object storage refuses requests. Type there: timedatectl set-ntp true"
            )
            yield name, text


def _own(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[_Fault]:
    """Faults that a task has found about itself, and a disk that is too small."""
    for name, report in reports.items():
        for fault in report["faults"]:
            yield name, fault.rstrip(".")
        plan = report["plan"]
        if error := plan.get("error"):
            yield name, error.rstrip(".")
        free, needed = report["free_disk_bytes"], plan.get("disk_bytes", 0)
        if free is not None and free < needed and name == str(cluster.chief):
            text = (
                f"the checkpoints of a run need {needed:,} bytes, and the disk of --model_dir has "
                f"{free:,} free. Make room, or give --config.keep_checkpoints=1 or another "
                "--model_dir"
            )
            yield name, text


def _late(reports: Mapping[str, Json], deadline_secs: float) -> Iterator[_Fault]:
    """Tasks without a plan at the deadline."""
    for name, report in reports.items():
        if report["plan"].get("is_late"):
            longer = f"--deadline_secs={4 * deadline_secs:g}"
            yield name, f"it had no time to build the model. Type {longer}"


def _outgoing_ports(reports: Mapping[str, Json]) -> Iterator[_Fault]:
    """Tasks whose port an outgoing connection of another program may take."""
    for name, report in reports.items():
        port, outgoing = port_of(report["address"]), report["outgoing_ports"]
        if outgoing and outgoing[0] <= port <= outgoing[1]:
            text = (
                f"port {port} is in the range of its host for outgoing connections "
                f"({outgoing[0]} to {outgoing[1]}): another program may take it. Use a port below"
            )
            yield name, text


def _memory(reports: Mapping[str, Json], _: Cluster) -> Iterator[_Fault]:
    """Machines whose tasks need more memory than is free."""
    needed = memory_needed(reports)
    machines: dict[str, list[str]] = defaultdict(list)
    for name, report in reports.items():
        machines[report["machine"]].append(name)
    for names in machines.values():
        free = min(reports[name]["free_memory_bytes"] for name in names)
        total = sum(needed.get(name, 0) for name in names)
        if total > free:
            text = (
                f"{' and '.join(names)} need {total:,} bytes of memory without activations, and "
                f"their machine has {free:,} free. Give a smaller --batch_size, more --ps, or a "
                "larger machine"
            )
            yield names[0], text


def memory_needed(reports: Mapping[str, Json]) -> Mapping[str, int]:
    """The estimated bytes by task, of the first report that has a plan."""
    plans = (report["plan"] for report in reports.values())
    return next((plan["memory_bytes"] for plan in plans if "memory_bytes" in plan), {})


def _gpus(reports: Mapping[str, Json], cluster: Cluster) -> Iterator[_Fault]:
    """Workers with another number of GPUs than most."""
    jobs = ("worker",) if cluster.num("ps") else ("worker", "chief")
    said = {
        name: report["plan"]["gpus"]
        for name, report in reports.items()
        if "gpus" in report["plan"] and name.startswith(jobs)
    }
    usual, odd = _majority(said, prefer=str(cluster.chief))
    for name in odd:
        text = (
            f"TensorFlow finds {said[name]} GPU(s) there, and {usual} in other workers. Type "
            "there: nvidia-smi; and look at CUDA_VISIBLE_DEVICES; or give all --num_gpus"
        )
        yield name, text
