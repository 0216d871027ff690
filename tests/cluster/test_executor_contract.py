"""Strategies of several tasks keep the contract of tests/unit/test_executor_contract.py."""

import os
import subprocess
import sys

import pytest

from strategies.cluster.tf_config import local_cluster
from tests.cluster import parity
from tests.cluster.runs import ROOT


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "executor",
    [
        "multiworker-2",
        "ps-sync-2",
        "ps-async-1",
        pytest.param(f"{parity.BOUNDED}-1", marks=pytest.mark.nightly),
    ],
)
def test_strategy_keeps_the_contract(executor: str) -> None:
    clusters = [""]
    if executor.startswith("multiworker"):
        cluster = local_cluster("multiworker", 2, 0)
        clusters = [cluster.for_task(task).tf_config() for task in cluster.tasks()]
    # The servers of one process share its threads, and a step needs one of each at the same time.
    settings = {"EXECUTORS": executor, "TF_NUM_INTEROP_THREADS": "8"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.test_executor_contract"],
            cwd=ROOT,
            env={**os.environ, **settings, "EXECUTORS_TF_CONFIG": tf_config},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for tf_config in clusters
    ]
    try:
        for process in processes:
            output, _ = process.communicate()
            assert process.returncode == 0, output
            # Under ps also that a next chief takes over.
            assert f"{9 + executor.startswith('ps')} passed" in output, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
