"""One op changes a variable as Keras' dozen ops do."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.step.fused_updates import fused_update

SHAPE, STEPS = (7, 5), 6
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"class_name": "SGD", "config": {}},
    "momentum": {"class_name": "SGD", "config": {"momentum": 0.9}},
    "nesterov": {"class_name": "SGD", "config": {"momentum": 0.8, "nesterov": True}},
    "adam": {"class_name": "Adam", "config": {}},
    "adam, other betas": {"class_name": "Adam", "config": {"beta_1": 0.5, "epsilon": 1e-3}},
    "adamw": {"class_name": "AdamW", "config": {}},
}


def built(name: str) -> tuple[keras.Optimizer, list[keras.Variable]]:
    optimizer = keras.optimizers.deserialize(OPTIMIZERS[name])
    start = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    variables = [keras.Variable(start), keras.Variable(start[0])]
    optimizer.build(variables)
    return optimizer, variables


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_update_is_equal_to_that_of_keras(name: str) -> None:
    theirs, their_variables = built(name)
    ours, our_variables = built(name)
    random = np.random.default_rng(1)
    for step in range(STEPS):
        update = fused_update(ours, tf.constant(step, tf.int64))
        assert update is not None
        rate = tf.constant(0.1 / (1 + step))
        for their, our in zip(their_variables, our_variables, strict=True):
            gradient = tf.constant(random.normal(size=their.shape).astype(np.float32))
            theirs.update_step(gradient, their.value, rate)
            update(our.value, gradient, rate)
        theirs.iterations.assign_add(1)
    for their, our in zip(
        (*their_variables, *theirs.variables), (*our_variables, *ours.variables), strict=True
    ):
        if "iteration" not in their.path:
            # Second moments are small.
            tolerance = 1e-8 if "velocity" in their.path else 1e-5
            np.testing.assert_allclose(our.numpy(), their.numpy(), rtol=1e-4, atol=tolerance)
    moved = np.abs(our_variables[0].numpy() - built(name)[1][0].numpy())
    assert np.median(moved) > 1e-2, "it was changed"


def test_other_formulas_have_no_fused_update() -> None:
    class Own(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            variable.assign(gradient)

    class Masked(keras.optimizers.SGD):
        def assign_sub(self, variable: Any, value: Any) -> None:
            super().assign_sub(variable, value * 0.0)

    for optimizer in (
        Own(),
        Masked(),
        keras.optimizers.Adam(amsgrad=True),
        keras.optimizers.Nadam(),
        keras.optimizers.RMSprop(),
    ):
        assert fused_update(optimizer, tf.constant(0, tf.int64)) is None
