"""No process of a local cluster is left, however the cluster ends.

The tasks are stand-ins that start fast, so that many endings can be tried: `TRAINER_ENDINGS`. Half
of the tasks ignore SIGTERM, and each has a child process.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.runs import ROOT, processes_where
from trainer.local.network_namespace import IsolationError, open_namespace

ENDINGS = int(os.environ.get("TRAINER_ENDINGS", "8"))
MARK = "TRAINER_TEST_ENDING"
LAUNCHER = """
import contextlib, sys
from strategies.cluster.tf_config import local_cluster
from trainer.local.network_namespace import open_namespace
from trainer.local.policy import FixedPolicy
from trainer.local.deaths import Restarts
from trainer.local.supervisor import Supervisor
from trainer.local.task_process import TaskStarter
strategy, isolate, model_dir, *command = sys.argv[1:]
cluster = local_cluster(strategy, 2, 1)
restarts = Restarts(2, lambda: (0, 0))
with open_namespace() if isolate == "isolate" else contextlib.nullcontext() as namespace:
    starter = TaskStarter([], namespace=namespace, command=command)
    policy = FixedPolicy(cluster, cluster.tasks())
    report = Supervisor(policy, starter, model_dir, restarts, grace_secs=0.2).run()
sys.exit(report.exit_code)
"""
TASK = """
import os, random, signal, subprocess, sys, time
from trainer.guards.parent_watch import watch_parent
watch_parent()
open(f"{os.environ['READY_DIR']}/{os.getpid()}", "w").close()
subprocess.Popen(["sleep", "600"])
if random.random() < 0.5:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""


def family(mark: str) -> list[psutil.Process]:
    return processes_where(lambda process: process.environ().get(MARK) == mark)


def can_isolate() -> bool:
    with contextlib.suppress(IsolationError):
        open_namespace().__exit__(None, None, None)
        return True
    return False


@pytest.mark.timeout(60 + 10 * ENDINGS)
def test_random_endings_leave_no_process(tmp_path: Path) -> None:
    chance = random.Random(0)
    how = ["isolate", ""] if can_isolate() else [""]
    num_processes = 0
    for number in range(ENDINGS):
        mark = f"{os.getpid()}-{number}"
        strategy = chance.choice(["ps", "multiworker"])
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-c", LAUNCHER, strategy, chance.choice(how)),
                *(str(tmp_path / str(number)), sys.executable, "-c", TASK),
            ],
            env=os.environ | {MARK: mark, "PYTHONPATH": str(ROOT), "READY_DIR": str(tmp_path)},
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        seen: set[int] = set()
        for _ in range(chance.randrange(4)):
            time.sleep(chance.uniform(0, 0.5))
            members = family(mark)
            seen |= {process.pid for process in members}
            if members:
                signum = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
                victim = chance.choice(members)
                # A task stopped before its parent watch runs would outlive a killed launcher.
                is_ready = (tmp_path / str(victim.pid)).exists()
                if signum != signal.SIGSTOP or is_ready:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        victim.send_signal(signum)
        last = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        time.sleep(chance.uniform(0, 0.5))
        seen |= {process.pid for process in family(mark)}
        launcher.send_signal(last)
        launcher.wait(20)
        num_processes += len(seen)
        deadline = time.monotonic() + 10
        while left := family(mark):
            assert time.monotonic() < deadline, f"ending {number}, {last.name}: {left} are left"
            time.sleep(0.05)
    assert num_processes > 2 * ENDINGS, "nothing was running"
