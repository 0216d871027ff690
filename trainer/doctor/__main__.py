"""`python -m trainer.doctor`: what would the trainer do with these flags, and what is wrong?

    python -m trainer.doctor --strategy=ps --ps=2
    srun python -m trainer.doctor --strategy=multiworker --model_dir=/shared/run

It takes the flags of the trainer, and trains nothing. As --check, it writes only data that must be
prepared or indexed anyway, and an empty file that it removes. If all tasks of a cluster run
it at the same time, it also measures the network between them. Exit codes: 0 nothing is wrong, 2
something is, or could not be examined. With several tasks it ends within --deadline_secs, and by
default after two minutes more if TensorFlow's all-reduce takes so long.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import absl.flags
from absl import app

from data.system.errors import TrainerError
from data.system.pipes import ends_with_reader
from strategies.cluster.peers import check_own_address
from strategies.cluster.tf_config import Cluster, ClusterError
from strategies.transfer import Transfer
from trainer import flags
from trainer.config import ConfigError
from trainer.doctor.exchange import Exchange, Json
from trainer.doctor.findings import PEER_ADVICE, Finding, can_connect, device_findings, findings
from trainer.doctor.plan import machine, mark_in, place_fault, plan_in_child, shared_fault
from trainer.doctor.table import as_json, text
from trainer.exit_codes import EXIT_DONE, EXIT_USAGE
from trainer.flags import checks
from trainer.flags.cluster import cluster_here, read_shared_settings
from trainer.flags.parsing import parse
from trainer.flags.start import read_cluster
from trainer.tf_setup import configure_logging, import_tensorflow, set_environment

# Fractions of the deadline at which the task stops waiting for other tasks, for its plan, and for
# reports. The rest is for TensorFlow's all-reduce.
_MEET, _PLAN, _REPORTS = 0.4, 0.6, 0.8
# Without --deadline_secs an all-reduce may take so long, and sums of one host.
_SUMS_SECS = 120.0

absl.flags.adopt_module_key_flags(flags)


def define_flags() -> None:
    """The flags of this command alone."""
    absl.flags.DEFINE_float(
        "deadline_secs",
        30.0,
        "After this time the command ends. All tasks must start it within 40% of this time. By "
        f"default an all-reduce may take {_SUMS_SECS:g} s, and there is no limit where there are "
        "no other tasks to wait for.",
        lower_bound=5.0,
    )
    absl.flags.DEFINE_boolean("json", False, "Print JSON.")


class _Doctor:
    """The results so far. A timer's thread calls `end_late` at the deadline, which prints them."""

    def __init__(self, cluster: Cluster, deadline_secs: float) -> None:
        self.cluster = cluster
        self.reports: dict[str, Json] = {}
        self.all_reduce: Json = {}
        self.doing = "meeting the other tasks"
        self.advice = "Look at the other findings"
        self._deadline_secs = deadline_secs
        self._began = time.monotonic()
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self.mark: Path | None = None  # The file of this task in --model_dir.

    def until(self, fraction: float) -> float:
        """Returns the time (time.monotonic) at which a fraction of the deadline has passed."""
        return self._began + fraction * self._deadline_secs

    def end_after(self, secs: float) -> None:
        """Has `end_late` called after `secs`, and not when a former call said."""
        if self._timer:
            self._timer.cancel()
        self._timer = threading.Timer(secs, self.end_late)
        self._timer.daemon = True
        self._timer.start()

    def end_late(self) -> None:
        """Ends the process because its time is over."""
        longer = f"--deadline_secs={4 * (time.monotonic() - self._began):.0f}"
        text = f"it was {self.doing} for too long. {self.advice}, or type {longer}"
        self.end([Finding("error", str(self.cluster.task), self.cluster.address, text)])

    def end(self, more: Sequence[Finding] = ()) -> NoReturn:
        """Prints all results, and ends the process."""
        with self._lock:  # Never released: the process ends once.
            found = findings(self.reports, self.cluster, deadline_secs=self._deadline_secs)
            found = [*more, *device_findings(self.all_reduce, self.cluster), *found]
            show = as_json if flags.FLAGS["json"].value else text
            if self.mark:
                self.mark.unlink(missing_ok=True)
            print(show(self.reports, self.cluster, found, self.all_reduce), flush=True)
            is_wrong = any(finding.level == "error" for finding in found)
            # Not sys.exit: TensorFlow's destructors call peers that may have ended.
            os._exit(EXIT_USAGE if is_wrong else EXIT_DONE)


def _main(argv: Sequence[str]) -> NoReturn:
    configure_logging()
    try:
        _examine(argv)
    except (ConfigError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
    sys.exit(EXIT_USAGE)


def _examine(argv: Sequence[str]) -> NoReturn:
    if len(argv) > 1:
        raise ConfigError(f"Unexpected arguments: {' '.join(argv[1:])}. Options start with --.")
    recipe = checks.read_recipe()
    described = read_cluster(is_launched=False)
    set_environment()
    cluster = described or cluster_here()
    model_dir = flags.MODEL_DIR.value or "runs"
    checks.num_to_aggregate(recipe, cluster.num("worker"))  # For its checks.
    has_limit = described is not None or _has_typed_deadline()
    makes_plan = described is None or not (
        checks.serves(cluster) or cluster.task.job == "evaluator"
    )
    doctor = _Doctor(cluster, flags.FLAGS["deadline_secs"].value)
    wait_for_plan = plan_in_child(
        recipe, cluster, model_dir, makes_plan=makes_plan, reads_input=not has_limit
    )
    if has_limit:
        doctor.end_after(doctor.until(1.0) - time.monotonic())
    shared = read_shared_settings(recipe) if makes_plan else {}
    own = {**machine(cluster, model_dir, shared), "meetings": {}, "plan": {}, "faults": []}
    if makes_plan and (fault := place_fault(model_dir)):
        own["faults"].append(fault)
    doctor.reports = {str(cluster.task): own}
    if described is None:
        doctor.doing = "building the model"
        own["plan"] = wait_for_plan(
            doctor.until(_REPORTS) - time.monotonic() if has_limit else None
        )
        _examine_alone(doctor, own)
    else:
        _examine_together(doctor, own, model_dir, wait_for_plan)
    doctor.end()


def _examine_alone(doctor: _Doctor, own: Json) -> None:
    """Adds the reports of all tasks, which would run on this host, and sums on its devices."""
    cluster, plan = doctor.cluster, own["plan"]
    plan_of_others = {name: plan[name] for name in plan if name not in ("error", "is_late")}
    for task in cluster.tasks():
        here = {"task": str(task), "address": cluster.address_of(task)}
        plan_here = plan if task == cluster.task else plan_of_others
        doctor.reports[str(task)] = {**own, **here, "plan": plan_here}
    if "gpus" in plan and max(plan["gpus"], flags.REPLICAS.value) > 1:
        _sum(_sum_on_this_host, doctor)


def _examine_together(
    doctor: _Doctor, own: Json, model_dir: str, wait_for_plan: Callable[[float | None], Json]
) -> None:
    """Meets the tasks that run this command at the same time, and adds their reports."""
    cluster = doctor.cluster
    try:
        check_own_address(cluster)
    except ClusterError as error:  # The other tasks cannot be met: this one cannot listen.
        own["faults"].append(str(error))
        return
    if cluster.task == cluster.chief and not own["faults"]:
        doctor.mark = mark_in(model_dir)
    with Exchange(cluster, str(doctor.mark or "")) as exchange:
        exchange.meet(doctor.until(_MEET))
        fault = shared_fault(model_dir, exchange.mark_of(cluster.chief))
        if fault and not checks.serves(cluster):
            own["faults"].append(fault)
        doctor.doing = "measuring the network"
        own["meetings"] = exchange.measure(doctor.until(_PLAN))
        own["plan"] = wait_for_plan(doctor.until(_PLAN) - time.monotonic())
        doctor.doing = "exchanging reports"
        exchange.send(own)
        doctor.reports = exchange.wait_for_reports(doctor.until(_REPORTS))
    if flags.STRATEGY.value == "multiworker" and cluster.task in cluster.trainers:
        _sum(_all_reduce, doctor)


def _has_typed_deadline() -> bool:
    return bool(flags.FLAGS["deadline_secs"].present)


def _sum(check: Callable[[_Doctor], Json], doctor: _Doctor) -> None:
    """Keeps the result of `check`. It has _SUMS_SECS from now if no --deadline_secs was typed."""
    if not _has_typed_deadline():
        doctor.end_after(_SUMS_SECS)
    try:
        doctor.all_reduce = check(doctor)
    except TrainerError as error:
        doctor.all_reduce = {"why_not": "there was an error, see below", "error": str(error)}


def _all_reduce(doctor: _Doctor) -> Json:
    cluster = doctor.cluster
    if len(cluster.trainers) < 2:
        return {"why_not": "there is one worker"}
    if not can_connect(doctor.reports, cluster):
        needed = "came, can reach each other, and have the same software and number of GPUs"
        return {"why_not": f"not all tasks {needed}"}
    doctor.doing = "in TensorFlow's all-reduce"
    import_tensorflow()
    from strategies.cluster.gpus import choose_gpus
    from strategies.gpus import use_gpus
    from strategies.lost_peers import PeerLostError, losses_explained
    from strategies.multiworker import MultiWorkerExecutor
    from trainer.doctor.devices import check_devices

    choose_gpus(cluster)
    if use_gpus(flags.NUM_GPUS.value):
        doctor.advice = PEER_ADVICE
    try:
        with losses_explained("A worker was lost"):
            executor = MultiWorkerExecutor.connect(cluster, Transfer(flags.COMMUNICATION.value))
            network = executor.measure_network()
            checked = check_devices(executor.strategy)
    except PeerLostError as error:  # Also where a slow link delays TensorFlow's heartbeats.
        raise TrainerError(str(error)) from error
    with contextlib.suppress(PeerLostError):  # Another task that has all results may have ended.
        executor.close()
    return checked | {
        "workers": len(cluster.trainers),
        "latency_ms": round(1e3 * network.latency_secs, 3),
        "mb_per_sec": round(1e-6 * network.bytes_per_sec, 1),
    }


def _sum_on_this_host(doctor: _Doctor) -> Json:
    doctor.doing = "summing vectors on the devices of this host"
    import_tensorflow()
    from strategies.gpus import replica_devices, use_gpus
    from strategies.mirrored import MirroredExecutor
    from trainer.doctor.devices import check_devices

    num_gpus = use_gpus(flags.NUM_GPUS.value)
    devices = replica_devices(flags.REPLICAS.value, num_gpus)
    if len(devices) < 2:
        return {}
    doctor.advice = PEER_ADVICE if num_gpus else doctor.advice
    return check_devices(MirroredExecutor.on(devices).strategy)


if __name__ == "__main__":
    define_flags()
    with ends_with_reader():
        app.run(_main, flags_parser=parse)
