"""ShardedEmbedding: the same rows with any number of parts and replicas, and as Keras computes."""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from data.system.compat.keras_state import names_from_zero
from strategies.position import Position
from strategies.ps.placement import dry_run, place
from strategies.tables import tables_with
from tests.commands import run_python
from tests.unit.comparing import assert_close, assert_same
from tests.unit.replicas import replicas, steps_on
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.embeddings import FTRL, SGD, Adagrad, LazyAdam, RowWiseAdagrad, ShardedEmbedding
from trainer.embeddings.layer import _rounded_on
from trainer.embeddings.optimizers import OPTIMIZERS, TableOptimizer, TableUpdate
from trainer.learner import Learner
from trainer.step.losses import sparse_categorical_crossentropy
from trainer.step.options import ClipConfig, ConfigError, EmaConfig, Options

BATCH, ROWS, WIDTH, CLASSES = 12, 11, 4, 5
IDS = np.random.default_rng(1).integers(0, ROWS - 1, (50, BATCH, 3))  # Never the last row.
ALL_BATCHES = [(ids, ids.sum(axis=1) % CLASSES) for ids in IDS]
BATCHES = ALL_BATCHES[:8]
UNIFORM = keras.initializers.RandomUniform(-0.5, 0.5)


def sequential(embedding: keras.Layer) -> keras.Model:
    flatten, dense = keras.layers.Flatten(), keras.layers.Dense(CLASSES)
    return keras.Sequential([keras.Input((3,), dtype="int64"), embedding, flatten, dense])


@names_from_zero()
def make_model(
    optimizer: TableOptimizer | str = "sgd", *, rows: int | None = ROWS, **options: Any
) -> keras.Model:
    return sequential(ShardedEmbedding(rows, WIDTH, optimizer=optimizer, name="ids", **options))


def make_learner(
    optimizer: TableOptimizer | str = "sgd",
    *,
    parts: int = 1,
    replica: int = 1,
    step_options: Any = None,
    **options: Any,
) -> Learner:
    """A model with a table of `parts` parts, all of them in this process."""
    keras.utils.set_random_seed(3)
    scope = replicas(replica).scope() if replica else contextlib.nullcontext()
    with scope, tables_with(num_parts=parts):
        model = make_model(optimizer, **{"initializer": UNIFORM, **options})
        loss, sgd = sparse_categorical_crossentropy, keras.optimizers.SGD(0.1)
        return Learner(model, sgd, loss, {}, batch_size=BATCH, options=step_options)


def train(learner: Learner, replica: int = 1, batches: Sequence[Any] = BATCHES) -> None:
    for _ in steps_on(learner, replica, batches):
        pass


def weights_of(learner: Learner) -> list[npt.NDArray[Any]]:
    return [np.asarray(value, np.float32) for value in learner.weights()]


def slots_of(learner: Learner) -> list[npt.NDArray[Any]]:
    slots = learner.state.get("table_slots", ())
    return [np.asarray(slot.numpy(), np.float32) for slot in slots]


def table_of(learner: Learner) -> npt.NDArray[Any]:
    return np.asarray(learner.model.get_layer("ids").table.numpy())


def reference_of(num_rows: int) -> keras.Model:
    """The same model with an embedding of Keras."""
    return sequential(keras.layers.Embedding(num_rows, WIDTH))


def saved_in(directory: Path, learner: Learner, step: int) -> Checkpointer:
    """Saves `learner` as the newest checkpoint."""
    checkpointer = Checkpointer(str(directory), learner, {}, keep=2)
    checkpointer.save(step, Position(), {})
    assert checkpointer.has_saved(step)
    return checkpointer


def assert_restored(directory: Path, learner: Learner, step: int) -> None:
    found = Checkpointer(str(directory), learner, {}, keep=2).restore()
    assert found is not None
    assert found.step == step


def assert_files_predict_alike(
    model: keras.Model, directory: Path, expected: keras.Model, *batches: npt.NDArray[Any]
) -> None:
    """`model` in a SavedModel and in a .keras file gives the outputs of `expected`."""
    model.export(str(directory / "saved_model"), verbose=False)
    model.save(directory / "model.keras")
    loaded = tf.saved_model.load(str(directory / "saved_model"))  # Its variables live as long.
    again = keras.models.load_model(directory / "model.keras")
    for ids in batches:
        for predict in (loaded.serve, again):
            np.testing.assert_allclose(predict(tf.constant(ids)), expected(ids), atol=1e-6)


@pytest.mark.slow
def test_new_process_predicts_with_a_keras_file_that_has_a_table(tmp_path: Path) -> None:
    model = make_model(initializer=UNIFORM)
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "ids.npz", ids=IDS[0])
    files = f"{tmp_path}/model.keras", f"--input={tmp_path}/ids.npz"
    done = run_python("-m", "trainer.predict", *files, check=True)
    found = [json.loads(line)["output"] for line in done.stdout.splitlines()]
    np.testing.assert_allclose(found, model(IDS[0]), atol=1e-6)


LOADING = """
import sys, keras
from trainer.config_file import errors_explained
with errors_explained("build_model(config)"):
    keras.models.load_model(sys.argv[1])
"""


@pytest.mark.slow
def test_config_that_loads_a_table_unknown_to_keras_is_told_what_to_import(tmp_path: Path) -> None:
    make_model().save(tmp_path / "model.keras")
    done = run_python("-c", LOADING, str(tmp_path / "model.keras"))
    assert "write `import trainer.embeddings` in the file." in done.stderr


def train_reference(
    model: keras.Model, of_rows: keras.Optimizer, batches: Sequence[tuple[Any, Any]]
) -> None:
    """A plain loop: `of_rows` updates the table, SGD the other variables."""
    table, *dense = model.trainable_variables
    of_dense = keras.optimizers.SGD(0.1)
    for ids, labels in batches:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(sparse_categorical_crossentropy(labels, model(ids)))
        of_table, *others = tape.gradient(loss, [v.value for v in (table, *dense)])
        of_rows.apply([tf.convert_to_tensor(of_table)], [table])
        of_dense.apply(others, dense)


def test_initial_rows_do_not_depend_on_the_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.embeddings.layer._BLOCK_ROWS", 4)
    one = table_of(make_learner())
    for parts in (2, 3, 5):
        learner = make_learner(parts=parts)
        assert [part.shape[0] for part in learner.model.get_layer("ids").weights] == [
            -(-(ROWS - index) // parts) for index in range(parts)
        ]
        np.testing.assert_array_equal(table_of(learner), one)
    assert len(np.unique(one)) == one.size, "no two blocks have the same values"


def test_state_that_the_forward_pass_changes_has_all_moving_statistics() -> None:
    ids, norm = keras.Input((3,), dtype="int64"), keras.layers.BatchNormalization()
    with replicas(1).scope(), tables_with(num_parts=2):
        rows = keras.layers.Flatten()(ShardedEmbedding(ROWS, WIDTH)(ids))
        model = keras.Model(ids, keras.layers.Dense(CLASSES)(norm(rows)))
        loss, optimizer = sparse_categorical_crossentropy, keras.optimizers.SGD(0.1)
        learner = Learner(model, optimizer, loss, {}, batch_size=BATCH)
    kept = {id(variable) for variable in learner.forward_state}
    assert {id(norm.moving_mean.value), id(norm.moving_variance.value)} <= kept


def test_two_tables_have_different_rows() -> None:
    keras.utils.set_random_seed(3)
    first, second = (ShardedEmbedding(ROWS, WIDTH) for _ in range(2))
    rows = [np.asarray(layer(tf.range(ROWS))) for layer in (first, second)]
    assert not np.any(rows[0] == rows[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_equal_with_any_number_of_parts_and_replicas(name: str) -> None:
    options: dict[str, Any] = {"l2": 0.02, "clip_norm": 0.05}
    one = make_learner(OPTIMIZERS[name](0.1), **options)
    initial = table_of(one)
    train(one)
    assert np.abs(table_of(one) - initial).max() > 1e-3
    for parts, replica in ((3, 1), (1, 2)):
        other = make_learner(OPTIMIZERS[name](0.1), parts=parts, replica=replica, **options)
        train(other, replica)
        assert_close(weights_of(one), weights_of(other))
        assert_close(slots_of(one), slots_of(other))


@pytest.mark.parametrize(
    ("optimizer", "of_keras"),
    [
        (SGD(0.3), lambda: keras.optimizers.SGD(0.3)),
        (Adagrad(0.3), lambda: keras.optimizers.Adagrad(0.3)),
        (FTRL(0.3, l1=0.01), lambda: keras.optimizers.Ftrl(0.3, l1_regularization_strength=0.01)),
    ],
    ids=["sgd", "adagrad", "ftrl"],
)
def test_equals_50_steps_of_a_plain_loop_with_an_embedding_of_keras(
    optimizer: TableOptimizer, of_keras: Callable[[], keras.Optimizer]
) -> None:
    # Keras' dense FTRL sets rows to 0 that were never used, unless they are 0.
    initializer = "zeros" if isinstance(optimizer, FTRL) else UNIFORM
    learner = make_learner(optimizer, parts=2, initializer=initializer)
    reference = reference_of(ROWS)
    reference.set_weights(learner.weights())
    train(learner, batches=ALL_BATCHES)
    train_reference(reference, of_keras(), ALL_BATCHES)
    assert_close(weights_of(learner), reference.get_weights(), atol=1e-5)


def test_lazy_adam_and_row_wise_adagrad_have_the_formulas_of_their_papers() -> None:
    gradients = np.random.default_rng(0).normal(size=(3, 2, WIDTH)).astype(np.float32)
    ids = tf.constant([4, 1])
    for optimizer in (LazyAdam(0.1), RowWiseAdagrad(0.1)):
        table = tf.Variable(tf.ones([ROWS, WIDTH]))
        slots = {
            name: tf.Variable(tf.fill([ROWS] if is_of_row else [ROWS, WIDTH], value))
            for name, (value, is_of_row) in optimizer.initial_slots.items()
        }
        expected = np.ones([2, WIDTH])
        m, v, total = np.zeros([2, WIDTH]), np.zeros([2, WIDTH]), np.full([2, 1], 0.1)
        for step, gradient in enumerate(gradients):
            args = ids, tf.constant(gradient), tf.constant(0.1), tf.constant(step)
            optimizer.update(TableUpdate(table, slots, *args))
            if isinstance(optimizer, LazyAdam):
                m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
                corrected = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
                expected -= 0.1 * corrected[0] / (np.sqrt(corrected[1]) + 1e-7)
            else:
                total += np.mean(gradient**2, axis=1, keepdims=True)
                expected -= 0.1 * gradient / (np.sqrt(total) + 1e-7)
        np.testing.assert_allclose(tf.gather(table, ids), expected, atol=1e-4)
        unused = np.delete(table.numpy(), ids.numpy(), axis=0)
        np.testing.assert_array_equal(unused, np.ones([ROWS - 2, WIDTH]))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rows", [ROWS, None])
def test_rows_in_float64_have_optimizer_slots_in_float64(name: str, rows: int | None) -> None:
    learner = make_learner(OPTIMIZERS[name](0.1), rows=rows, dtype="float64")
    train(learner, batches=BATCHES[:1])
    parts = learner.model.get_layer("ids").parts
    assert {v.dtype for part in parts for v in part.variables.values()} == {tf.float64}


def test_a_row_that_is_not_used_does_not_change() -> None:
    learner = make_learner("lazy_adam", l2=0.1)
    last = table_of(learner)[-1]
    train(learner)
    np.testing.assert_array_equal(table_of(learner)[-1], last)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1), (2, 3)])
def test_a_checkpoint_restores_exactly_with_another_number_of_parts(
    before: int, after: int, tmp_path: Path
) -> None:
    saved = make_learner(Adagrad(0.1), parts=before)
    train(saved)
    saved_in(tmp_path, saved, 8)
    learner = make_learner(Adagrad(0.1), parts=after)
    assert_restored(tmp_path, learner, 8)
    assert_same(weights_of(saved), weights_of(learner))
    (left,), (right,) = slots_of(saved), slots_of(learner)
    np.testing.assert_array_equal(left, right)
    assert not np.allclose(left, 0.1)


def test_an_exported_model_is_loaded_by_tensorflow_alone(tmp_path: Path) -> None:
    learner = make_learner(parts=3)
    train(learner)
    exported = make_learner(replica=0).model
    for variable, value in zip(exported.variables, weights_of(learner), strict=True):
        variable.assign(value)
    assert_files_predict_alike(exported, tmp_path, learner.model, IDS[0])


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1)])
def test_a_model_is_loaded_with_another_number_of_parts(
    before: int, after: int, tmp_path: Path
) -> None:
    saved = make_learner(parts=before)
    saved.model.save(path := tmp_path / "model.keras")
    with tables_with(num_parts=after):
        loaded = keras.models.load_model(path)
    np.testing.assert_array_equal(loaded.get_layer("ids").table.numpy(), table_of(saved))
    with tables_with(has_rows=False):
        loaded = keras.models.load_model(path)
    assert loaded.get_layer("ids").weights[0].shape == (0, WIDTH)
    with pytest.raises(ValueError, match="could not be loaded"):
        make_model(rows=ROWS + 1).load_weights(path)


@pytest.mark.parametrize("rows", [ROWS, None])
def test_a_table_that_no_input_has_reached_is_saved_and_loaded_as_other_layers(
    rows: int | None, tmp_path: Path
) -> None:
    def make() -> keras.Model:
        model = make_model()
        model.unused = ShardedEmbedding(rows, WIDTH)
        return model

    make().save_weights(path := tmp_path / "model.weights.h5")
    make().load_weights(path)


def test_columns_have_their_own_rows() -> None:
    layer = ShardedEmbedding([2, 3], WIDTH, initializer=UNIFORM)
    found = np.asarray(layer(tf.constant([[1, 2], [0, 0], [1, 0]])))
    rows = layer.table.numpy()
    assert found.shape == (3, 2, WIDTH)
    np.testing.assert_array_equal(found, rows[[[1, 4], [0, 2], [1, 2]]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="an id is not from 0 to"):
        layer(tf.constant([[2, 0]]))
    with pytest.raises(ValueError, match="needs ids of as many columns"):
        ShardedEmbedding([2, 3], WIDTH)(tf.constant([[1, 2, 0]]))


def test_ids_out_of_range_and_numbers_that_are_no_integers_are_refused() -> None:
    rows: Any = np.int64(ROWS)  # As ids.max() + 1 is.
    layer = ShardedEmbedding(rows, WIDTH)
    for wrong in (-1, ROWS):
        with pytest.raises(tf.errors.InvalidArgumentError, match="an id is not from 0 to 11 - 1"):
            layer(tf.constant([wrong]))
    with pytest.raises(ValueError, match="takes ids, which are integers"):
        layer(tf.constant([1.0]))


def test_a_dry_run_makes_no_rows_and_each_server_gets_a_part() -> None:
    learner, groups = dry_run(lambda: make_learner("adagrad", replica=0))
    assert learner.model.get_layer("ids").weights[0].shape == (0, WIDTH)
    assert learner.model(IDS[0]).shape == (BATCH, CLASSES)
    placement = place(groups, 3, num_gradient_buffers=2)
    parts = [(g.shape, g.ps, g.num_bytes) for g in placement.groups if g.is_table]
    # A row has 16 bytes, and as many in Adagrad's accumulator.
    assert parts == [((4, 4), 0, 128), ((4, 4), 1, 128), ((3, 4), 2, 96)]
    assert sum(placement.num_bytes) - 352 < 3 * 1024


@pytest.mark.parametrize(
    "arguments",
    [
        *({"rows": 0}, {"rows": []}, {"rows": 1.5}),
        *({"optimizer": optimizer} for optimizer in ("adam", 0.1)),
        *({"width": -1}, {"l2": -1}, {"clip_norm": float("nan")}),
        *({"initializer": "glorot_uniform"}, {"combiner": "max"}),
        *({"dtype": "bfloat16"}, {"rows": None, "dtype": "float16"}),
        *({"rows": None, "admit_after": 0}, {"rows": None, "evict_after": -1}),
        *({"rows": None, "max_rows": 1.5}, {"rows": None, "evict_every": 0}),
        # For dynamic ids only.
        *({"admit_after": 2}, {"rows": [9, 9], "max_rows": 5}),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="ShardedEmbedding"):
        ShardedEmbedding(**{"rows": ROWS, "width": WIDTH, **arguments})


def test_wrong_settings_of_an_optimizer_are_refused() -> None:
    for make in (lambda: SGD(0), lambda: Adagrad(epsilon=0.0), lambda: LazyAdam(beta_1=1.0)):
        with pytest.raises(ConfigError, match="must be"):
            make()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (Options(clip=ClipConfig(norm=1.0)), "config.clip"),
        (Options(ema=EmaConfig(decay=0.9)), "config.ema"),
        (Options(jit_compile=True), "config.jit_compile"),
    ],
)
def test_options_that_need_the_whole_table_are_refused(options: Options, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be used with a ShardedEmbedding"):
        make_learner(step_options=options)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("rows", [ROWS, None])
def test_rows_of_a_feature_are_combined_and_padding_is_left_out(
    combiner: str, rows: int | None
) -> None:
    ids = np.array([[[3, 5, 3, -1], [7, -1, -1, -1]], [[-1, -1, -1, -1], [-1, 2, -1, 9]]])
    layer = ShardedEmbedding(rows, WIDTH, initializer=UNIFORM, combiner=combiner)
    with tables_with(num_parts=2):
        found = layer(ids, training=True)
    table = np.asarray(layer(tf.range(ROWS)[:, tf.newaxis], training=True))
    expected = np.zeros((2, 2, WIDTH))
    for cell in np.ndindex(2, 2):
        some = ids[cell][ids[cell] >= 0]
        divisor = {"sum": 1, "mean": len(some), "sqrtn": len(some) ** 0.5}[combiner]
        if len(some):
            expected[cell] = table[some].sum(axis=0) / divisor
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with tf.GradientTape() as tape:
        tape.watch(layer.table.parts)
        total = tf.reduce_sum(layer(ids, training=True))
    gradients = tape.gradient(total, layer.table.parts)
    sums = {3: 2.0, 5: 1.0, 7: 1.0, 2: 1.0, 9: 1.0}
    divisors = {3: 3, 5: 3, 7: 1, 2: 2, 9: 2}
    power = {"sum": 0, "mean": 1, "sqrtn": 0.5}[combiner]
    for index, gradient in enumerate(gradients):
        for id_or_row, row in zip(gradient.indices.numpy(), gradient.values.numpy(), strict=True):
            used = id_or_row if rows is None else 2 * id_or_row + index
            np.testing.assert_allclose(row, sums[used] / divisors[used] ** power, rtol=1e-6)


@pytest.mark.parametrize("rows", [ROWS, None])
def test_a_combiner_is_not_for_one_id_of_each_example(rows: int | None) -> None:
    with pytest.raises(ValueError, match="needs several ids of an example"):
        ShardedEmbedding(rows, WIDTH, combiner="sum")(tf.constant([1, 2, 0]))


def test_columns_of_several_ids_have_their_own_rows() -> None:
    layer = ShardedEmbedding([2, 3], WIDTH, initializer=UNIFORM, combiner="sum")
    found = np.asarray(layer(tf.constant([[[1, 0], [2, -1]]])))
    rows = layer.table.numpy()
    np.testing.assert_allclose(found, [[rows[1] + rows[0], rows[4]]], atol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="an id is not from 0 to"):
        layer(tf.constant([[[1, 0], [3, -1]]]))


@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_are_those_at_rounded_rows(parts: int) -> None:
    learner, expected = (make_learner(parts=parts, replica=0) for _ in range(2))
    layer = expected.model.get_layer("ids")
    rows = layer.table.numpy()
    layer.table.assign(tf.cast(tf.cast(rows, tf.bfloat16), tf.float32))
    with tables_with(read_dtype="bfloat16"):
        ours = learner.gradients(BATCHES[0])
    theirs = expected.gradients(BATCHES[0])
    exact = learner.gradients(BATCHES[0])
    tf.nest.map_structure(np.testing.assert_array_equal, *map(dense, (ours, theirs)))
    assert ours[1][0] != exact[1][0]
    np.testing.assert_array_equal(learner.model.get_layer("ids").table.numpy(), rows)


def dense(gradients_and_totals: Any) -> list[npt.NDArray[Any]]:
    gradients, totals = gradients_and_totals
    return [tf.convert_to_tensor(tensor).numpy() for tensor in (*gradients, totals)]


def test_rounded_rows_are_the_only_rows_that_are_sent() -> None:
    server = "/job:ps/replica:0/task:1/device:CPU:0"
    with tf.Graph().as_default() as graph:
        with tf.device(server):
            rows = tf.random.uniform([3, WIDTH])
        with tables_with(read_dtype="float16"), tf.GradientTape() as tape:
            tape.watch(rows)
            sent = _rounded_on(server, rows)
        assert tape.gradient(sent, rows, tf.ones_like(sent)).dtype == tf.float32
        assert _rounded_on(server, rows) is rows
    there = [op for op in graph.get_operations() if op.device == server]
    sent_ops = {
        tensor.op.type
        for op in graph.get_operations()
        for tensor in op.inputs
        if tensor.op in there and op not in there and tensor.shape.rank == 2
    }
    assert sent.dtype == tf.float32
    assert sent_ops == {"Cast"}
