"""The settings of TensorFlow's runtime that a task chooses from its place in the cluster."""

import json
from pathlib import Path

import pytest
import tensorflow as tf

from strategies.cluster.tf_config import Cluster, parse_hosts
from tests.commands import run_python
from trainer.config import Recipe, load_recipe
from trainer.connecting import configure_tensorflow
from trainer.task_spec import TaskSpec


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("configs/digits.py")


@pytest.mark.parametrize(
    ("hosts", "num_threads", "num_ops"),
    [("a:1,b:1", 1, 4), ("a:1,b:1", 8, 8), ("a:1,a:2", 1, 1), ("a:1,a:2", 0, None)],
)
def test_sums_over_a_network_have_threads_besides_those_that_compute(
    hosts: str,
    num_threads: int,
    num_ops: int | None,
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: dict[str, int] = {}
    for kind in ("inter", "intra"):
        name = f"set_{kind}_op_parallelism_threads"
        record = lambda number, kind=kind: chosen.update({kind: number})  # noqa: E731
        monkeypatch.setattr(tf.config.threading, name, record)
    cluster: Cluster = parse_hosts({"worker": hosts}, "worker", 0, "multiworker")
    spec = TaskSpec("multiworker", recipe, cluster, "unused", num_threads=num_threads)
    configure_tensorflow(spec)
    assert chosen.get("inter") == num_ops
    assert chosen.get("intra") == (num_threads or None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_allows_deterministic_ops_only_and_full_float32(
    deterministic: bool, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    experimental = tf.config.experimental
    monkeypatch.setattr(experimental, "enable_op_determinism", lambda: calls.append("ops"))
    monkeypatch.setattr(experimental, "enable_tensor_float_32_execution", calls.append)
    recipe.config.deterministic = deterministic
    configure_tensorflow(TaskSpec("mirrored", recipe, None, "unused"))
    assert calls == (["ops", False] if deterministic else [])


STUCK_IN_ABORT = """
import sys, threading, time
from types import SimpleNamespace as Standin
from trainer import task
from trainer.config import load_recipe
from trainer.task_spec import TaskSpec

class Peers:
    def watch(self, timeout_secs, on_lost):
        threading.Thread(target=on_lost, args=["worker 1 is lost"], daemon=True).start()

    def abandon(self, why):
        time.sleep(1000)

spec = TaskSpec("multiworker", load_recipe("configs/digits.py"), None, sys.argv[1], grace_secs=0.2)
signals = Standin(on_stop=lambda *_: None)
executor = Standin(peers=Peers(), recovery=None, request_stop=None)
recorder = Standin(close_stalled=lambda: None)
with task._supervised(spec, signals, executor, recorder):
    time.sleep(1000)
"""


def test_task_ends_after_grace_secs_if_its_sums_cannot_be_ended(tmp_path: Path) -> None:
    ended = run_python("-c", STUCK_IN_ABORT, str(tmp_path))
    assert ended.returncode == 75, ended.stderr
    said = "worker 1 is lost; the last complete step was not saved within --grace_secs"
    assert said in ended.stderr
    assert "No step has been saved" in ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["exit_code"], result["why"]) == (75, said)
