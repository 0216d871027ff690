"""The settings of TensorFlow's runtime that a task chooses from its place in the cluster."""

import pytest
import tensorflow as tf

from strategies.cluster.tf_config import Cluster, parse_hosts
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
