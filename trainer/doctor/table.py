"""The output of `python -m trainer.doctor`: what would run, a table of tasks, one of pairs.

print(text(reports, cluster, found, all_reduce))
print(as_json(reports, cluster, found, all_reduce))
"""

import json
from collections.abc import Mapping, Sequence

from rich import filesize

from strategies.cluster.tf_config import Cluster
from trainer.doctor.exchange import Json
from trainer.doctor.findings import Finding, memory_needed
from trainer.run_files import two_digits

# A step of a model whose gradients need this time may well compute for less.
_LONG_SUM_SECS = 0.2


def as_json(
    reports: Mapping[str, Json], cluster: Cluster, found: Sequence[Finding], all_reduce: Json
) -> str:
    """Returns a JSON object: `tasks` by name, `findings`, `all_reduce`, and `task`: this task."""
    document = {
        "task": str(cluster.task),
        "tasks": reports,
        "all_reduce": all_reduce,
        "findings": [vars(finding) for finding in found],
    }
    return json.dumps(document, indent=1)


def text(
    reports: Mapping[str, Json], cluster: Cluster, found: Sequence[Finding], all_reduce: Json
) -> str:
    """Returns the same as tables for people."""
    lines = [*_plan(reports), "", *_tasks(reports, cluster)]
    if pairs := _pairs(reports):
        lines += ["", *pairs]
    if all_reduce:
        lines += ["", *_all_reduce(all_reduce, _plan_of(reports))]
    lines += ["", *map(str, found)]
    if not found:
        lines.append("nothing wrong was found")
    return "\n".join(lines)


def _plan_of(reports: Mapping[str, Json]) -> Json | None:
    """The plan of the run; None if no task that came has it."""
    return next((r["plan"] for r in reports.values() if "num_replicas" in r["plan"]), None)


def _plan(reports: Mapping[str, Json]) -> list[str]:
    plan = _plan_of(reports)
    if plan is None:
        return ["No task that came has the plan of the run."]
    lines = [
        f"{plan['strategy']}: {plan['num_replicas']} replica(s), batch {plan['batch_size']:,}: "
        f"{plan['replica_examples']:,} examples, {plan['replica_bytes']:,} bytes for each replica",
        f"{plan['data_dir']}: {plan['train_examples']:,} training examples in "
        f"{plan['train_files']:,} file(s), {plan['eval_examples']:,} evaluation examples in "
        f"{plan['eval_files']:,} file(s)",
        f"{plan['variable_bytes']:,} bytes of variables, {plan['slots']}; "
        f"{plan['gradient_bytes']:,} bytes of gradients",
        f"steps {plan['first_step']:,} to {plan['last_step']:,} would be trained; the checkpoints "
        f"need {plan['disk_bytes']:,} bytes of disk",
    ]
    return [*lines, *plan.get("input", []), *plan.get("placement", "").splitlines()]


def _tasks(reports: Mapping[str, Json], cluster: Cluster) -> list[str]:
    rows = [["task", "address", "host", "needs", "free", "disk", "cores", "GPUs", "TensorFlow"]]
    needed = memory_needed(reports)
    for task in cluster.tasks():
        name = str(task)
        report = reports.get(name)
        if report is None:
            rows.append([name, cluster.address_of(task), "did not come", *[""] * 6])
            continue
        sizes = needed.get(name), report["free_memory_bytes"], report["free_disk_bytes"]
        rows.append(
            [
                f"{name}*" if task == cluster.task else name,
                report["address"],
                report["host"],
                *("?" if size is None else filesize.decimal(size) for size in sizes),
                str(report["cores"]),
                _gpus(report["plan"]),
                report["versions"]["tensorflow"],
            ]
        )
    legend = "needs: memory, without activations and TensorFlow itself (about 0.5 GB)"
    notes = [
        f"{name}: {note}"
        for name, report in reports.items()
        for note in report["plan"].get("gpu_notes", ())
    ]
    return [*_aligned(rows), f"{legend}; *: this task", *notes]


def _gpus(plan: Json) -> str:
    """`2 (2,3)`: the number, and the names in CUDA_VISIBLE_DEVICES."""
    names = f" ({','.join(plan['gpu_names'])})" if plan.get("gpu_names") else ""
    return f"{plan.get('gpus', '?')}{names}"


def _pairs(reports: Mapping[str, Json]) -> list[str]:
    rows = [("from", "to", "round trip ms", "MB/s", "clock s")]
    for receiver, report in reports.items():
        for sender, state in report["meetings"].items():
            measured = [state.get(k) for k in ("latency_ms", "mb_per_sec", "clock_secs")]
            if None in measured:
                rows.append((sender, receiver, state["state"], "", ""))
            else:
                latency, rate, clock = measured
                rows.append((sender, receiver, f"{latency:,.2f}", f"{rate:,.1f}", f"{clock:+.2f}"))
    return _aligned(rows) if rows[1:] else []


def _all_reduce(measured: Json, plan: Json | None) -> list[str]:
    if "why_not" in measured:
        return [f"no all-reduce was tried: {measured['why_not']}"]
    lines = []
    if "workers" in measured:
        lines.append(
            f"all-reduce of TensorFlow over {measured['workers']} workers: "
            f"{measured['latency_ms']:,.2f} ms for a small vector, "
            f"{measured['mb_per_sec']:,.1f} MB/s for a large one"
        )
        if plan:
            mb_per_sec = max(measured["mb_per_sec"], 0.1)  # It is rounded to 0.1.
            lines.append(_sum_of_step(1e-6 * plan["gradient_bytes"] / mb_per_sec, plan))
    is_right = "wrong" if measured["wrong_sums"] else "right"
    lines.append(f"a sum of known vectors over {measured['replicas']} replicas was {is_right} here")
    rows = [(pair["from"], pair["to"], f"{pair['mb_per_sec']:,.1f}") for pair in measured["copies"]]
    return [*lines, *(_aligned([("from", "to", "MB/s"), *rows]) if rows else [])]


def _sum_of_step(secs: float, plan: Json) -> str:
    """Returns how long the sum of a step's gradients takes, and what to type if that is long."""
    shown = two_digits(secs)
    if chosen := plan["local_steps"]:
        return f"the weights of an average need {shown} s of this network; the run has {chosen}"
    text = f"the gradients of a step need {shown} s of this network"
    if secs < _LONG_SUM_SECS:
        return text
    return (
        f"{text}. If a step computes for less time, try --config.local_steps.every=100: workers "
        "then sum once in 100 steps"
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
