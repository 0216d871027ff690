"""What readers and executors count as input wait, graph, compute, evaluation and checkpoint."""

import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from data.batch_feeds import open_feed
from data.tfrecord.split import Split
from strategies.metrics import Metrics
from tests.unit.toy import BATCH, Toy, make_reader
from trainer.hooks.base import Hook
from trainer.loop import train
from trainer.run_record.recorder import Recorder


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_wait_for_streamed_batches_is_a_part_of_the_time_of_the_call(
    split: Split, prefetch_batches: int
) -> None:
    reader = make_reader(split)
    object.__setattr__(reader, "prefetch_batches", prefetch_batches)
    feed = open_feed(reader, 0, range(4))

    @tf.function(input_signature=[feed.signature, tf.TensorSpec([], tf.int64)])
    def count(taken: Any, num_batches: tf.Tensor) -> tf.Tensor:
        number = tf.constant(0)
        for index in tf.range(num_batches):
            number += tf.shape(feed.batch(taken, index)[1])[0]
        return number

    began = time.monotonic()
    assert count(feed.take(20), tf.constant(20, tf.int64)).numpy() == 20 * BATCH
    waited = feed.waited_secs()
    assert 0 < waited <= time.monotonic() - began
    assert feed.waited_secs() == 0, "since the call before"


class Slow(Hook):
    def __call__(self, step: int, metrics: Metrics) -> None:
        time.sleep(0.01)


def test_each_second_of_a_short_run_has_the_cause_of_what_was_done(
    split: Split, tmp_path: Path
) -> None:
    with Recorder(str(tmp_path), "worker-0") as recorder:
        toy = Toy(split, tmp_path)
        toy.executor.stopwatch = recorder.stopwatch
        toy.start()
        evaluate = toy.evaluate(every_steps=10, last_step=30)
        began_before = time.monotonic()
        before = recorder.stopwatch.read()
        assert set(before.seconds) == {"start"}
        began = time.monotonic()
        hooks = [recorder, Slow(), evaluate, toy.save(10, 30)]
        train(toy.executor, toy.learner, hooks, steps=30, steps_per_call=5)
        took = time.monotonic() - began
        after = recorder.stopwatch.read()
        took_all = time.monotonic() - began_before
    spent = {cause: after.seconds[cause] - before.seconds.get(cause, 0) for cause in after.seconds}
    assert set(spent) == {"start", "graph", "input wait", "compute", "evaluate", "checkpoint"}
    assert took <= sum(spent.values()) <= took_all
    assert spent["compute"] > 0.05, "hooks, too"
    assert all(value > 0 for value in spent.values())
    assert (after.first_step, after.step, after.begins) == (0, 30, 1)
