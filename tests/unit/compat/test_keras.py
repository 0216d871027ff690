"""What is used of Keras' inside: it works, and it is still needed."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.system.compat import keras_compile, keras_file, keras_layers, keras_optimizers
from data.system.compat.keras_state import keras_state_kept, names_from_zero
from data.system.compat.metrics_without_variables import metrics_without_variables
from tests.commands import run_python
from tests.unit.compat.messages import delete


def names_of_two_models() -> list[str]:
    return [keras.Sequential([keras.layers.Dense(1)]).layers[0].name for _ in range(2)]


def test_names_begin_at_zero_and_others_continue_afterwards() -> None:
    for context in (names_from_zero, keras_state_kept):
        before = names_of_two_models()
        with context():
            assert names_of_two_models() == ["dense", "dense_1"]
        assert names_of_two_models()[0] not in before
    assert names_of_two_models()[0] != "dense", delete("keras_state")


def test_random_numbers_of_a_kept_state_begin_anew_and_settings_hold() -> None:
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    drawn = []
    try:
        for _ in range(2):
            with keras_state_kept():
                keras.utils.set_random_seed(7)
                drawn.append(float(keras.random.uniform([])))
                assert keras.config.dtype_policy().name == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy(policy)
    assert drawn[0] == drawn[1]


def test_described_metric_has_no_variables() -> None:
    with metrics_without_variables(lambda: None):
        keras.metrics.AUC()  # Its variables are too large for a description.
        assert not keras.metrics.Mean().variables
    assert keras.metrics.Mean().variables, delete("metrics_without_variables")


def test_losses_and_metrics_are_those_that_compile_chooses() -> None:
    labels, outputs = tf.constant([[1.0], [0.0]]), tf.constant([[0.9], [0.2]])
    loss = keras_compile.get_loss("mse", labels, outputs)
    assert float(loss(labels, outputs)) == pytest.approx(0.025)
    accuracy = keras_compile.get_metric("accuracy", labels, outputs)
    assert isinstance(accuracy, keras.metrics.BinaryAccuracy)
    metrics = keras_compile.CompileMetrics(["mae"], None)
    metrics.update_state(labels, outputs)
    assert float(metrics.result()["mae"]) == pytest.approx(0.15)
    kinds = keras.metrics
    directions = [kinds.MeanSquaredError(), kinds.AUC(), kinds.FalseNegatives(), kinds.Mean()]
    directions.append(keras_compile.get_metric(OwnLoss(), labels, outputs))
    found = [keras_compile.is_lower_better(metric) for metric in directions]
    assert found == [True, False, True, None, True]
    public = {*dir(keras), *dir(getattr(keras, "trainers", None))}
    assert not {"get_loss", "CompileMetrics"} & public, delete("keras_compile")


class OwnLoss(keras.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(y_true - y_pred, axis=-1)


class OldLoss(keras.Model):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return keras.ops.mean(y_pred)


def test_compute_loss_may_lack_the_argument_training() -> None:
    arguments = {"x": None, "y": None, "y_pred": tf.constant([1.0, 3.0])}
    loss = keras_compile.compute_loss(
        OldLoss(), None, None, arguments["y_pred"], None, training=True
    )
    assert float(loss) == 2.0
    with pytest.raises(TypeError, match="training"):
        vars(OldLoss)["compute_loss"](OldLoss(), **arguments, training=True)


def test_layers_inside_of_layers_and_what_they_own() -> None:
    inputs = keras.Input((4,))
    inner = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    model = keras.Model(inputs, keras.layers.Dense(2)(inner(inputs)))
    norm, dropout = inner.layers
    dense = model.layers[-1]
    found = keras_layers.all_layers(model)
    assert found[0] is model
    assert {*map(id, found)} >= {*map(id, (inner, norm, dropout, dense))}
    assert model not in keras_layers.all_layers(model, include_self=False)
    assert norm not in model.layers, delete("keras_layers")

    for kind in ("trainable_variables", "non_trainable_variables"):
        assert keras_layers.own(norm, kind) == getattr(norm, kind)
        assert not keras_layers.own(model, kind), "only what is its own"
    assert len(keras_layers.own(dropout, "seed_generators")) == 1
    assert keras_layers.maker_of(model.output) is dense


def test_mask_is_selected_with_its_tensor() -> None:
    words = keras.layers.Embedding(3, 2, mask_zero=True)(tf.constant([[1, 0], [2, 2]]))
    is_selected = tf.constant([False, True])
    selected = tf.boolean_mask(words, is_selected)
    keras_layers.select_mask(words, selected, is_selected)
    found = keras.layers.GlobalAveragePooling1D()(selected)
    np.testing.assert_allclose(found, tf.reduce_mean(selected, axis=1))
    np.testing.assert_array_equal(selected._keras_mask, [[True, True]])


def test_optimizer_tells_its_parts() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    assert keras_optimizers.given_rate(keras.optimizers.SGD(schedule)) is schedule
    assert keras.optimizers.SGD(schedule).learning_rate is not schedule, delete("keras_optimizers")

    optimizer = keras.optimizers.Adam(weight_decay=0.1)
    kept, decayed = (keras.Variable(tf.zeros([2]), name=name) for name in ("bias", "kernel"))
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build([kept, decayed])
    are_decayed = [keras_optimizers.is_decayed(optimizer, v) for v in (kept, decayed)]
    assert are_decayed == [False, True]
    handles = keras_optimizers.adam_slots(optimizer, decayed.value)
    tf.raw_ops.AssignVariableOp(resource=handles[0], value=tf.ones([2]))
    changed = [v.name for v in optimizer.variables if v.shape == (2,) and v.numpy().any()]
    assert changed == ["kernel_momentum"]


def test_product_of_nadam_is_that_of_keras_and_no_variable() -> None:
    ours, theirs = keras_optimizers.Nadam(0.1), keras.optimizers.Nadam(0.1)
    weights = [keras.Variable([1.0, -2.0]) for _ in range(2)]
    for optimizer, weight in zip((ours, theirs), weights, strict=True):
        optimizer.build([weight])
        for step in range(3):
            optimizer.apply([tf.constant([0.5, float(step)])])
    np.testing.assert_allclose(weights[0].numpy(), weights[1].numpy(), rtol=1e-6)
    assert len(ours.variables) == len(theirs.variables) - 1, delete("keras_optimizers")


@pytest.mark.slow
@pytest.mark.parametrize("content", ['{"floatx": "float7"}', '{"epsilon": "small"}'])
def test_wrong_value_in_keras_json_is_traced_to_the_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text(content)
    program = """
from data.system.compat.keras_file import refused_file
try:
    import tensorflow, keras
except (AssertionError, ValueError) as error:
    print(refused_file(error), error)
"""
    ended = run_python("-c", program, KERAS_HOME=str(tmp_path), check=True)
    path, _, error = ended.stdout.partition(" ")
    assert path == str(tmp_path / "keras.json"), ended
    assert "keras.json" not in error, delete("keras_file")


def test_path_of_keras_json_is_known() -> None:
    assert Path(keras_file.keras_file()).name == "keras.json"
