"""MLflow: each run of this program is a run of MLflow, in the experiment of its environment.

MLFLOW_TRACKING_URI says where, MLFLOW_EXPERIMENT_NAME which experiment. The fields of the config
are parameters, and reports are metrics, such as train/loss and eval/accuracy.
"""

import os
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from data.system.files import absolute
from trainer.config import flatten_json
from trainer.hooks.tracking import PROJECT, Tracker, numbers, remember, remembered
from trainer.hooks.writers import Values

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# Limits of MLflow's servers, or less.
_PARAMS_PER_CALL, _PARAM_CHARS, _NAME_CHARS = 100, 500, 240


def accepted(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:  # Any: of a metric or field.
    """Returns `values` under names that MLflow accepts: of one that it does not, it takes none.

    Other characters become `_`; of equal names, the later ones get a `_` more.
    """
    found: dict[str, Any] = {}
    for given, value in values:
        parts = re.sub(r"[^/\w.\- :]", "_", given).split("/")
        # MLflow may use a name as a path, and refuses a part such as "..".
        name = "/".join(part if part.strip(".") else "_" for part in parts)[:_NAME_CHARS]
        while name in found:
            name += "_"
        found[name] = value
    return found


class MLflow(Tracker):
    """Uses a client, and not the active run of mlflow, which belongs to the user's own code."""

    _client: "MlflowClient | None" = None
    _run_id = ""

    @override
    def begin(self, step: int) -> None:
        if not self._run_id:
            self._open()

    @override
    def write(self, step: int, split: str, values: Values) -> None:
        from mlflow.entities import Metric

        client = self._open()
        now = int(time.time() * 1000)
        named = accepted(numbers(split, values)).items()
        metrics = [Metric(name, value, now, step) for name, value in named]
        client.log_batch(self._run_id, metrics=metrics)

    @override
    def end(self, step: int) -> None:
        status = "FINISHED" if self._is_complete() else "KILLED"
        self._open().set_terminated(self._run_id, status=status)

    def _open(self) -> "MlflowClient":
        if self._client is not None and self._run_id:
            return self._client
        import mlflow
        from mlflow.exceptions import MlflowException

        self._client = client = mlflow.MlflowClient()
        former = remembered(self._model_dir).get("mlflow")
        if former is not None:
            try:
                client.update_run(former, status="RUNNING")
            except MlflowException as error:
                # Otherwise the server did not answer, and the next report tries again.
                if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    raise
            else:
                self._run_id = former
                return client
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        run = client.create_run(
            experiment_id,
            run_name=os.path.basename(self._model_dir.rstrip("/")),
            tags={"strategy": self._document["strategy"], "model_dir": absolute(self._model_dir)},
        )
        remember(self._model_dir, "mlflow", run.info.run_id)
        self._run_id = run.info.run_id
        self._log_params(client)
        return client

    def _log_params(self, client: "MlflowClient") -> None:
        from mlflow.entities import Param

        fields = accepted(flatten_json(self._document["config"]).items()).items()
        params = [Param(name, str(value)[:_PARAM_CHARS]) for name, value in fields]
        for first in range(0, len(params), _PARAMS_PER_CALL):
            client.log_batch(self._run_id, params=params[first : first + _PARAMS_PER_CALL])
