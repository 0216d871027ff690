"""Starts the process of a task: a fork of the fork server, or a command that is executed.

starter = TaskStarter(argv, command, {}, None, fork_server)
child = starter.start(cluster.for_task(task), watch, output)
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from data.system.cores import affinity_env
from strategies.cluster.tf_config import Cluster, Task
from trainer.guards.parent_watch import ParentWatch
from trainer.hooks.terminal import terminal_env
from trainer.local.fork_server import ForkServer
from trainer.local.network_namespace import Namespace
from trainer.local.task_logs import say
from trainer.local.task_process import Child

TARGET = "trainer.__main__:run_from_command_line"  # What a task runs if it is forked.


class TaskStarter(NamedTuple):
    """What all tasks of a launcher have in common; see LocalCluster."""

    argv: Sequence[str]  # Of the task, with --model_dir.
    command: Sequence[str]
    cores: Mapping[Task, Collection[int]]
    namespace: Namespace | None
    fork_server: ForkServer | None

    def start(self, cluster: Cluster, watch: ParentWatch, output: int) -> Child:
        """Starts the task of `cluster`; it prints to the descriptor `output`.

        Raises OSError if the process could not be made.
        """
        affinity = affinity_env(self.cores.get(cluster.task, ()))
        env = {**affinity, **terminal_env(), "TF_CONFIG": cluster.tf_config()}
        namespace_fds = self.namespace.fds if self.namespace else ()
        if self.fork_server:
            try:
                return self.fork_server.spawn(
                    TARGET,
                    f"{cluster.task.job}-{cluster.task.index}",
                    self.argv,
                    {**env, **watch.env},
                    {1: output, 2: output, watch.fd: watch.fd},
                    namespace_fds,
                )
            except OSError as error:
                say(
                    f"The fork server failed ({error}); {cluster.task} is started as a new Python "
                    "process, which takes a few seconds more"
                )
        command = [*self.command, *self.argv]
        if self.namespace:
            command = self.namespace.command(command)
        return watch.start(command, namespace_fds, env, output)
