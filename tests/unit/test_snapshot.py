"""A snapshot is written as its original would have been, whatever hangs on it."""

from pathlib import Path

import pytest
import tensorflow as tf

from trainer.checkpoints.snapshot import Snapshot


def graph(first: float) -> tf.train.Checkpoint:
    """Two ways to a variable, a way back, a list, a table, and a node with nothing on it."""
    shared = tf.Variable(first)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    table.insert([1], [first])
    node = tf.train.Checkpoint(shared=shared, nothing=tf.train.Checkpoint(), table=table)
    node.back = node
    return tf.train.Checkpoint(node=node, again=shared, many=[tf.Variable(first), [shared]])


def values(root: tf.train.Checkpoint) -> list[float]:
    read = [root.again, root.many[0], root.node.table.lookup([1])[0]]
    return [float(value.numpy()) for value in read]


@pytest.mark.parametrize(("is_taken", "written"), [(True, [2, 3, 1]), (False, [1, 1, 1])])
def test_all_objects_below_a_checkpoint_are_written_as_they_were_taken(
    is_taken: bool, written: list[float], tmp_path: Path
) -> None:
    root = graph(1.0)
    snapshot = Snapshot(root, device="CPU:0")
    root.again.assign(2.0)
    root.many[0].assign(3.0)
    if is_taken:
        snapshot.take()
    root.again.assign(9.0)
    snapshot.write(str(tmp_path / "snapshot"), tf.train.CheckpointOptions())
    other = graph(5.0)
    other.read(str(tmp_path / "snapshot")).assert_consumed()
    assert values(other) == written
    assert other.node.shared is other.again


def test_nothing_is_traced_after_a_snapshot_is_made() -> None:
    root = graph(1.0)
    snapshot = Snapshot(root, device="CPU:0")
    for _ in range(2):
        assert snapshot.take.experimental_get_tracing_count() == 1
        snapshot.take()
