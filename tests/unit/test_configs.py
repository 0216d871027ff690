"""What the shipped configs promise that needs no training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.config import load_recipe


@pytest.mark.parametrize(("blocks_per_stage", "num_layers"), [(3, 20), (9, 56)])
def test_resnet_has_the_papers_layers_and_parameters(
    blocks_per_stage: int, num_layers: int
) -> None:
    recipe = load_recipe("configs/cifar10_resnet.py")
    recipe.config.blocks_per_stage = blocks_per_stage  # type: ignore[attr-defined]
    model = recipe.build_model(recipe.config)
    kinds = (keras.layers.Conv2D, keras.layers.Dense)
    assert sum(isinstance(layer, kinds) for layer in model.layers) == num_layers
    millions = sum(np.prod(v.shape) for v in model.trainable_variables) / 1e6
    assert round(millions, 2) == {20: 0.27, 56: 0.85}[num_layers]  # Table 6.
    shapes = [layer.output.shape[1:] for layer in model.layers if layer.name.startswith("add")]
    assert shapes[::blocks_per_stage] == [(32, 32, 16), (16, 16, 32), (8, 8, 64)]


def test_cifar10_images_are_cut_from_padded_ones_and_mirrored() -> None:
    recipe = load_recipe("configs/cifar10_resnet.py")
    assert recipe.augment is not None
    places = np.arange(32)
    # The channels of a pixel are its row, its column, and 0.
    image = np.stack([*np.meshgrid(places, places, indexing="ij"), np.zeros((32, 32))], axis=-1)
    images = np.repeat(image[np.newaxis], 1000, axis=0).astype(np.float32) / 32
    seeds = np.random.default_rng(0).integers(-(2**31), 2**31, (1000, 2)).astype(np.int32)
    moved, labels = tf.function(recipe.augment)(images, np.arange(1000), seeds)
    assert np.array_equal(labels, np.arange(1000))
    rows, columns, _ = np.moveaxis(moved.numpy() * 32, -1, 0)
    # The middle is always left: it says how the image was moved.
    direction = np.round(columns[:, 16, 17] - columns[:, 16, 16])
    down = np.round(rows[:, 16, 16]) - 16
    right = np.round(columns[:, 16, 16]) - np.where(direction > 0, 16, 15)
    from_rows = down[:, np.newaxis, np.newaxis] + places[:, np.newaxis] + 0 * columns
    mirrored = np.where(direction[:, np.newaxis] > 0, places, 31 - places)
    from_columns = (right[:, np.newaxis] + mirrored)[:, np.newaxis] + 0 * rows
    is_inside = (np.abs(from_rows - 15.5) < 16) & (np.abs(from_columns - 15.5) < 16)
    np.testing.assert_allclose(rows[is_inside], from_rows[is_inside], atol=1e-3)
    np.testing.assert_allclose(columns[is_inside], from_columns[is_inside], atol=1e-3)
    beyond = moved.numpy()[~is_inside]
    assert beyond.min() > 0.3, "beyond the edge is the mean colour, not black"
    for drawn, number in ((down, 9), (right, 9), (direction, 2)):
        values, counts = np.unique(drawn, return_counts=True)
        assert len(values) == number
        assert counts.min() > 0.6 * 1000 / number
