"""What a task of a cluster does for and with the other tasks: a server, an evaluator, an executor.

role = ClusterRole(spec)        # instead of Role(spec)

Strategies are imported where they begin: tasks start sooner without others.
"""

import contextlib
import logging
import os
from typing import NoReturn

from typing_extensions import override

from data.system.compat.connections import limit_silence
from data.system.files import is_s3
from data.system.stopwatch import SERVING
from strategies.base import Executor
from strategies.cluster.gpus import choose_gpus
from strategies.cluster.peers import check_own_address, port_of
from strategies.cluster.ports import held
from strategies.cluster.rendezvous import Processes, connecting
from strategies.cluster.tf_config import Cluster, ClusterError
from strategies.position import Reached
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.survivors import write_once
from trainer.config import ConfigError, data_dir
from trainer.connecting import Role
from trainer.evaluator import follow
from trainer.exit_codes import EXIT_RESTART
from trainer.guards.fingerprint import as_number, process_settings, shared_settings, versions
from trainer.guards.signals import StopSignals
from trainer.inputs import open_inputs
from trainer.run_record.recorder import Recorder
from trainer.task_spec import TaskSpec

log = logging.getLogger(__name__)


class ClusterRole(Role):
    """The role of a task of a cluster."""

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__(spec)
        assert spec.cluster is not None
        self._cluster = spec.cluster

    @override
    def prepare(self) -> None:
        spec = self._spec
        if spec.has_evaluator and spec.recipe.config.early_stopping.patience:
            raise ConfigError(
                "config.early_stopping needs a run that evaluates, but TF_CONFIG names an "
                "evaluator, whose results come too late for the tasks that train. Leave one of the "
                "two out."
            )
        check_own_address(self._cluster)
        choose_gpus(self._cluster, is_launched=spec.is_checked)

    @override
    def run_other(self, signals: StopSignals, recorder: Recorder) -> int | None:
        if self._cluster.task.job == "evaluator":
            return follow(self._spec, self._cluster, signals, recorder)
        if self._spec.serves:
            self._serve(signals, recorder)
        return None

    def _serve(self, signals: StopSignals, recorder: Recorder) -> NoReturn:
        """Serves the chief until it ends this process."""
        from strategies.ps.servers import ask_chief_to_stop, serve

        spec, cluster, num_gpus = self._spec, self._cluster, self.use_gpus()
        if cluster.task.job == "worker" and is_s3(data_dir(spec.recipe.config)):
            open_inputs(spec.recipe, copies_all=True)  # The graphs of a worker read files.

        def leave() -> None:
            if not ask_chief_to_stop(cluster):
                log.warning("there is no chief: ending.")
                os._exit(EXIT_RESTART)
            log.info("%s: the chief saves, and then ends all tasks.", cluster.task)

        def end_without_chief(message: str) -> None:
            advice = "Restart this task when it can reach the chief and each ps."
            log.error("%s: ending. %s", message, advice)
            os._exit(EXIT_RESTART)

        def end(exit_code: int) -> None:
            recorder.close()
            os._exit(exit_code)

        signals.on_stop(leave, spec.grace_secs)
        recorder.open()
        recorder.stopwatch.begin(None, SERVING)
        serve(
            cluster,
            spec.num_threads,
            spec.chief_timeout_secs,
            num_gpus=num_gpus,
            op_threads=spec.op_threads,
            versions=versions(),
            # Later than the chief, which ends the run if a ps is silent for all tasks.
            silence_secs=0.65 * spec.stall_timeout_secs,
            on_gone=end_without_chief,
            on_end=end,
        )

    @override
    def use_gpus(self) -> int:
        """Also limits how long connections of this task may be silent."""
        num_gpus = super().use_gpus()
        if secs := self._spec.stall_timeout_secs:
            # The kernel repeats packets at intervals that double, so a connection may not outlive a
            # silence of half the limit. Within that time a silent task is considered lost, by the
            # chief or another worker after 0.5 of --stall_timeout_secs, by a worker that serves
            # after 0.65.
            limit_silence(secs * (1.5 if self._spec.serves else 1.0))
        return num_gpus

    @override
    def answering(self, num_gpus: int) -> contextlib.AbstractContextManager[None]:
        """Under ps, opens the chief's port early: servers that wait for the chief see it."""
        spec, cluster = self._spec, self._cluster
        if "ps" in cluster.jobs:
            if not cluster.is_server:
                return held(port_of(cluster.address))
            from strategies.ps.servers import start_server

            start_server(cluster, spec.num_threads, num_gpus, spec.op_threads)
        return contextlib.nullcontext()

    @override
    def connect(self, num_gpus: int) -> Executor:
        spec = self._spec

        def end_unconnected(message: str) -> None:
            log.error("%s: ending. Start this task again when all tasks answer.", message)
            os._exit(EXIT_RESTART)

        def watched(
            cluster: Cluster, processes: Processes
        ) -> contextlib.AbstractContextManager[None]:
            return connecting(cluster, spec.stall_timeout_secs / 2, end_unconnected, processes)

        if spec.strategy == "multiworker":
            from strategies.multiworker import MultiWorkerExecutor

            return MultiWorkerExecutor.connect(self._cluster, spec.transfer, watched)
        connected = self._cluster, versions(), watched
        if to_aggregate := spec.replicas_to_aggregate:
            from strategies.ps.sync.executor import SynchronousExecutor

            return SynchronousExecutor.connect(
                *connected, replicas_to_aggregate=to_aggregate, transfer=spec.transfer
            )
        from strategies.ps.asynchronous import AsynchronousExecutor

        return AsynchronousExecutor.connect(
            *connected, max_staleness=spec.max_staleness, transfer=spec.transfer
        )

    @override
    def check_agreement(self, executor: Executor) -> None:
        """Tasks of different code or configs would train a model that no user asked for."""
        spec = self._spec
        ours = {
            **versions(),
            **process_settings(),
            **shared_settings(spec.recipe, spec.transfer),
            # Tasks that do not evaluate would wait for the others without end.
            "the evaluator of TF_CONFIG": "an evaluator" if spec.has_evaluator else "none",
        }

        def differs(value: object) -> bool:
            """Returns True if the tasks that train have different values. All call it together."""
            return len(set(executor.gathered(as_number(value)))) > 1

        if not differs(dict(ours)):
            return
        # If the names differ too, only the names that every task has can be compared.
        if differs(list(ours)):
            ours = dict(versions())
        different = [name for name, value in ours.items() if differs([name, value])]
        listed = ", ".join(f"{name} ({ours[name]} here)" for name in different)
        raise ClusterError(
            f"The tasks of this run differ in {listed}. Give all of them the same command, "
            "cluster, config file and code, and install the same versions."
        )

    @override
    def write_last(self, reached: Reached, checkpointer: Checkpointer) -> None:
        write_once(reached, checkpointer, self._cluster)
