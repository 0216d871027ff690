"""config.virtual_replicas: the order of sums, exact totals, digests, and what is refused."""

import itertools
import re
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.system.errors import UsageError
from strategies.gradients.parts import Share, gradients_of_parts, in_pairs, totals_of_parts
from strategies.transfer import Transfer
from tests.unit.test_learner import learner_of
from trainer.config import Config, DataConfig
from trainer.config_checks import check, check_replicas
from trainer.hooks.digest import digest
from trainer.step.options import ConfigError, LocalStepsConfig, Options


def test_values_are_added_along_one_tree_and_computed_when_they_are_needed() -> None:
    log: list[str] = []

    def value(index: int) -> str:
        log.append(str(index))
        return str(index)

    def add(left: str, right: str) -> str:
        log.append(f"({left}{right})")
        return log[-1]

    assert in_pairs(value, 8, add) == "(((01)(23))((45)(67)))"
    assert log[:7] == ["0", "1", "(01)", "2", "3", "(23)", "((01)(23))"]
    assert in_pairs(value, 1, add) == "0"
    # The sum of a replica's range of parts is a node of the tree.
    halves = [in_pairs(list(part).__getitem__, 4, add) for part in ("0123", "4567")]
    assert in_pairs(halves.__getitem__, 2, add) == "(((01)(23))((45)(67)))"


def test_parts_are_computed_alone_and_their_rows_are_added_within_each() -> None:
    batch = tf.reshape(tf.range(8.0), [8, 1])
    seen: list[Sequence[float]] = []

    def compute(part: tf.Tensor) -> tuple[Sequence[tf.Tensor], Sequence[tf.Tensor], tf.Tensor]:
        seen.append(part.numpy().ravel().tolist())
        total = tf.reduce_sum(part)
        rows = tf.IndexedSlices(part, tf.constant([1, 1]), tf.constant([3, 1]))
        return [total, rows, None, rows], [total * 10.0], tf.cast(total, tf.float64)[tf.newaxis]

    gradients, changes, totals = gradients_of_parts(compute, batch, Share(0, 1, 4), num_dense=3)
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]
    dense, made_dense, absent, rows = gradients
    assert float(dense) == 28
    assert made_dense.numpy().ravel().tolist() == [0, 28, 0]
    assert absent is None
    assert rows.values.numpy().ravel().tolist() == list(range(8))
    assert [float(change) for change in changes] == [280.0]
    assert totals[0] == 28
    # The digests of the parts are at their places, whichever replica computes a part.
    halves = [
        gradients_of_parts(compute, batch[4 * i : 4 * i + 4], Share(i, 2, 2), num_dense=3)[2]
        for i in range(2)
    ]
    assert halves[0][3:].numpy().tolist() == halves[1][1:3].numpy().tolist() == [0, 0]
    assert (halves[0] + halves[1]).numpy().tolist() == totals.numpy().tolist()
    assert len(set(totals[1:].numpy().tolist())) == 4
    within_report = Share(0, 1, 4, ends_report=False)
    *_, totals_within = gradients_of_parts(compute, batch, within_report, num_dense=3)
    assert totals_within.numpy().tolist() == [28, 0, 0, 0, 0]


def digest_of_part(*gradients: tf.Tensor) -> int:
    """The digest of a batch of one part with these gradients."""
    none = tf.zeros([0], tf.float64)
    *_, totals = gradients_of_parts(
        lambda _: (gradients, [], none), none, Share(0, 1, 1), len(gradients)
    )
    return int(totals[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_digest_of_a_part_has_each_bit_of_its_gradients_and_their_places(dtype: str) -> None:
    words = {"float32": np.uint32, "float16": np.uint16, "float64": np.uint64}[dtype]
    values = np.random.default_rng(0).normal(size=[2, 3]).astype(dtype)
    scalar = tf.constant(1.0)
    digest = digest_of_part(tf.constant(values), scalar)
    assert digest_of_part(tf.constant(values)) != digest
    assert digest_of_part(tf.constant(values[:, [0, 2, 1]]), scalar) != digest
    for bit in range(8 * values.itemsize):
        flipped = values.view(words).copy()
        flipped[1, 2] ^= words(1 << bit)
        assert digest_of_part(tf.constant(flipped.view(dtype)), scalar) != digest


def test_digest_of_a_part_does_not_depend_on_what_the_graph_knows_of_a_shape() -> None:
    values = tf.random.stateless_normal([5, 3], seed=[0, 1])

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def in_graph(gradient: tf.Tensor) -> tf.Tensor:
        none = tf.zeros([0], tf.float64)
        *_, totals = gradients_of_parts(
            lambda _: ([gradient], [], none), none, Share(0, 1, 1, tf.constant(True)), num_dense=1
        )
        return totals[0]

    assert int(in_graph(values)) == digest_of_part(values)


def test_totals_of_parts_have_the_same_sum_in_any_order() -> None:
    random = np.random.default_rng(0)
    values = tf.constant(random.lognormal(0, 4, size=[6, 1]))
    rounded = [totals_of_parts(lambda part: part[0], v[tf.newaxis], 1) for v in values]
    sums = {sum(order) for order in itertools.permutations([float(v[0]) for v in rounded])}
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(float(tf.reduce_sum(values)), abs=1e-8)
    plain = {sum(order) for order in itertools.permutations(values.numpy().ravel())}
    assert len(plain) > 1  # So these values can show it.


NUMERIC = ("float32", "bfloat16", "float64", "int32")
NEXT = np.nextafter(np.float32(1), np.float32(2))


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        *((dtype, [[1, 2, 3], [2, 1, 3], [1, 2, 0], [1, 2]]) for dtype in NUMERIC),
        ("bool", [[1, 0, 1], [0, 1, 1], [1, 0, 0], [1, 0]]),
        ("float32", [[1, 2], [NEXT, 2]]),
        ("float32", [[-0.0], [0.0]]),
    ],
)
def test_digest_knows_each_bit_and_each_place(dtype: str, values: list[list[float]]) -> None:
    variables = [tf.Variable(tf.cast(value, dtype)) for value in (*values, values[0])]
    *digests, again = [int(digest(variable)) for variable in variables]
    assert again == digests[0]
    assert len(set(digests)) == len(values)


REFUSED: Sequence[tuple[Mapping[str, object], int, str]] = (
    ({"virtual_replicas": 6}, 1, "must be 0 or a power of two"),
    ({"virtual_replicas": 4, "local_steps": LocalStepsConfig(every=10)}, 1, "Leave one of the two"),
    ({"virtual_replicas": 4}, 3, "a power of two up to 4. Received: 3"),
    ({"virtual_replicas": 4}, 8, "a power of two up to 4. Received: 8"),
    ({"virtual_replicas": 4, "micro_batches": 32}, 1, "Type --config.micro_batches=16"),
    ({"virtual_replicas": 4, "batch_size": 66}, 2, "Type --config.batch_size=68"),
    ({"virtual_replicas": 4, "eval_batch_size": 66}, 2, "Type --config.eval_batch_size=68"),
    ({"virtual_replicas": 4, "data": DataConfig(lanes=2)}, 2, "must divide config.data.lanes"),
)


@pytest.mark.parametrize(("fields", "num_replicas", "message"), REFUSED)
def test_what_has_no_equal_bits_is_refused(
    fields: Mapping[str, object], num_replicas: int, message: str
) -> None:
    def check_both(config: Config) -> None:
        check(config)
        check_replicas(config, num_replicas)

    with pytest.raises(ConfigError, match=re.escape(message)):
        check_both(Config(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "transfer", [Transfer(wire_dtype="bfloat16"), Transfer(read_dtype="float16")]
)
def test_tensors_that_are_rounded_on_their_way_are_refused(transfer: Transfer) -> None:
    with pytest.raises(UsageError, match=r"Leave out --wire_dtype and --read_dtype"):
        transfer.check_exact(4)
    Transfer().check_exact(4)


@pytest.mark.parametrize(
    ("every", "last_step", "ends"), [(10, 25, [10, 20, 25]), (10, 0, [10, 20]), (0, 25, [25])]
)
def test_reports_end_at_their_multiples_and_with_the_run(
    every: int, last_step: int, ends: Sequence[int]
) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    learner = learner_of(model, options=Options(log_every_steps=every, last_step=last_step))
    found = [step + 1 for step in range(29) if learner.ends_report(tf.constant(step))]
    assert found == list(ends)
