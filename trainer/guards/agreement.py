"""All tasks of a run must have the same versions, settings, config and code.

check_agreement(spec, executor)     # before the model is built
"""

from strategies.base import Executor
from strategies.cluster.tf_config import ClusterError
from trainer.guards.fingerprint import as_number, process_settings, shared_settings, versions
from trainer.task_spec import TaskSpec


def check_agreement(spec: TaskSpec, executor: Executor) -> None:
    """Raises ClusterError if the tasks that run the loop differ in settings that must be equal."""
    ours = {
        **versions(),
        **process_settings(),
        **shared_settings(spec.recipe, wire_dtype=spec.wire_dtype, bucket_mb=spec.bucket_mb),
        # Tasks that do not evaluate would wait for the others without end.
        "the evaluator of TF_CONFIG": "an evaluator" if spec.has_evaluator else "none",
    }
    if not _differs(executor, dict(ours)):
        return
    # If the names differ too, only the names that every task has can be compared.
    if _differs(executor, list(ours)):
        ours = dict(versions())
    different = [name for name, value in ours.items() if _differs(executor, [name, value])]
    listed = ", ".join(f"{name} ({ours[name]} here)" for name in different)
    raise ClusterError(
        f"The tasks of this run differ in {listed}. Give all of them the same command, cluster, "
        "config file and code, and install the same versions."
    )


def _differs(executor: Executor, value: object) -> bool:
    """Returns True if tasks that run the loop have different values. All must call it together."""
    return len(set(executor.gathered(as_number(value)))) > 1
