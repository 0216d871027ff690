"""Every option of a step ends in the weights of one device, whatever the strategy.

Each executor trains its cases of parity.py in one process, or one cluster. This proves the table of
options in docs/options.md. Some options are trained together.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from strategies.cluster.tf_config import local_cluster
from tests.cluster import parity
from tests.cluster.runs import ROOT
from trainer.config import Config
from trainer.step.optimizers import supported_optimizers
from trainer.step.options import PRECISIONS

ALONE = "mirrored-1"
SHARED = ("mirrored-2", "multiworker-2", "ps-sync-2", "ps-async-1", f"{parity.BOUNDED}-1")
# The time for all executors, which run at the same time on two cores.
pytestmark = pytest.mark.timeout(1500)

NAMES = [name for name, _, _ in parity.recipes()]
TRAINED = [
    (name, executor)
    for executor in (*SHARED, "multiworker-2, worker 1")
    for name, _, _ in parity.recipes(executor)
]
# Rounding to 8 or 11 bits depends on which examples are multiplied together.
TOLERANCES = {"mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}

Found = Mapping[str, Mapping[str, npt.NDArray[Any]]]


def start(name: str, directory: Path) -> list[subprocess.Popen[bytes]]:
    """Starts the processes of an executor; each worker of multiworker writes its results."""
    environments: list[dict[str, str]] = [{}]
    if name.startswith("multiworker"):
        cluster = local_cluster("multiworker", 2, 0)
        environments = [{"TF_CONFIG": cluster.for_task(t).tf_config()} for t in cluster.tasks()]
    # The servers of one process share its threads, and a step needs one of each at the same time.
    threads = {"TF_NUM_INTEROP_THREADS": "8"}
    processes = []
    for index, environment in enumerate(environments):
        place = directory / f"{name}-{index}"
        place.mkdir(exist_ok=True)
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.parity", name, str(directory), str(place)],
                cwd=ROOT,
                env={**os.environ, **threads, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        processes.append(process)
    return processes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Found]:
    """The results of each executor in each case; of multiworker, also those of worker 1."""
    directory = tmp_path_factory.mktemp("parity")
    for name in ("data", parity.OVERFLOWING):
        parity.write_data(directory / name)
    processes = {name: start(name, directory) for name in (ALONE, *SHARED)}
    try:
        for name in processes:
            codes = [process.wait() for process in processes[name]]
            if any(codes) and was_damaged(name, directory):
                processes[name] = start(name, directory)
            for index, process in enumerate(processes[name]):
                assert process.wait() == 0, (directory / f"{name}-{index}" / "log").read_text()
    finally:
        for started in processes.values():
            for process in started:
                process.kill()
                process.wait()
    found = {name: read(directory / f"{name}-0") for name in processes}
    found["multiworker-2, worker 1"] = read(directory / "multiworker-2-1")
    return found


def was_damaged(name: str, directory: Path) -> bool:
    """True if TensorFlow damaged a message (strategies/lost_peers.py): users start a run again."""
    return "A message to another task was damaged" in (directory / f"{name}-0/log").read_text()


def read(directory: Path) -> Found:
    found: dict[str, dict[str, npt.NDArray[Any]]] = {name: {} for name in NAMES}
    with np.load(directory / "found.npz") as arrays:
        for key, value in arrays.items():
            name, _, what = key.rpartition("/")
            found[name][what] = value
    return found


@pytest.mark.parametrize(("name", "executor"), TRAINED)
def test_option_ends_in_the_weights_of_one_device(
    name: str, executor: str, trained: Mapping[str, Found]
) -> None:
    alone, shared = trained[ALONE][name], trained[executor][name]
    assert len(alone) >= 5
    assert alone.keys() == shared.keys()
    tolerance = TOLERANCES.get(name.partition("/")[0], 1e-5)
    for what, value in alone.items():
        if what.startswith("evaluation"):
            np.testing.assert_allclose(shared[what], value, rtol=10 * tolerance, err_msg=what)
        else:
            np.testing.assert_allclose(shared[what], value, atol=tolerance, err_msg=what)
        assert what.startswith("evaluation") or np.isfinite(value).all()


def test_each_option_is_trained_under_each_strategy_and_each_optimizer_under_one() -> None:
    trained = {(*name.rsplit("/", 1), executor) for name, executor in TRAINED}
    together = {option: name for name, names in parity.TOGETHER.items() for option in names}
    for option in parity.CASES:
        case = together.get(option, option)
        executors = {e for c, _, e in trained if c == case}
        if option in parity.TABLES[1:]:
            assert len(executors - {"multiworker-2, worker 1"}) == 1, option
        else:
            assert executors >= {*SHARED[:-1], "multiworker-2, worker 1"}
        optimizers = {optimizer for c, optimizer, _ in trained if c == case}
        assert len(optimizers) == (1 if case in parity.FOR_ANY_OPTIMIZER else 2), case
    optimizers = {optimizer for c, optimizer, _ in trained if c in ("plain", "optimizer")}
    assert optimizers == {*supported_optimizers(), "momentum"} - {"sgd"}


@pytest.mark.parametrize(
    "name", [name for name in NAMES if not name.startswith(("plain", "together"))]
)
def test_option_changes_what_is_learnt(name: str, trained: Mapping[str, Found]) -> None:
    case, _, optimizer = name.partition("/")
    like = parity.CASES[case].like if case in parity.CASES else "plain"
    plain = trained[ALONE].get(f"{like}/{optimizer}", trained[ALONE]["plain/momentum"])
    found = trained[ALONE][name]
    differences = [
        float(np.max(np.abs(found[what] - plain[what])))
        for what in plain
        if what.startswith("to export")
    ]
    # These options compute the same step in another way.
    same = case in ("micro_batches", "jit_compile")
    assert (max(differences) < 1e-5) is same, differences


@pytest.mark.parametrize("executor", [ALONE, *SHARED])
def test_overflow_in_one_replica_is_skipped_by_all(
    executor: str, trained: Mapping[str, Found]
) -> None:
    """The overflowing example is in two of the batches, one in each epoch."""
    found = [case["loss_scale"] for case in trained[executor].values() if "loss_scale" in case]
    assert found
    config = parity.CASES["mixed_float16"].changes["loss_scale"]
    for scale, good, skipped in found:
        assert skipped == 2
        num_doubled = round(np.log2(scale / config.initial)) + skipped
        assert 0 <= good < config.growth_steps
        # 18 good steps; those before a skip or a doubling do not count for the next.
        assert num_doubled == 3


def test_every_option_that_is_trained_here_is_in_the_table_of_the_documentation() -> None:
    lines = (ROOT / "docs" / "options.md").read_text().splitlines()
    first = lines.index(next(line for line in lines if line.startswith("| option |")))
    rows = lines[first + 2 : lines.index("", first)]
    for row in rows:
        for option in re.findall("`([a-z][a-z0-9_.]*)`", row.split("|")[1]):
            assert hasattr(Config(), option.partition(".")[0]) or option in PRECISIONS, option
    assert {cell.strip() for row in rows for cell in row.split("|")[2:-1]} == {
        "=",
        "~",
        "works",
        "refused",
    }
    in_table = {option for row in rows for option in re.findall("`([a-z][a-z0-9_.]*)`", row)}
    trained = {name.partition("/")[0].partition(":")[0] for name in NAMES}
    assert trained - {"plain", "all of these", "together", "dropout"} <= in_table
    for part in ("dropout", "embeddings"):
        assert any(row.startswith(f"| {part} ") for row in rows)
