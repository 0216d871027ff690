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


@pytest.mark.slow
def test_cifar10_images_are_cut_from_padded_ones_and_mirrored() -> None:
    recipe = load_recipe("configs/cifar10_resnet.py")
    assert recipe.augment is not None
    random = np.random.default_rng(0)
    images = random.uniform(size=(500, 32, 32, 3)).astype(np.float32)
    seeds = random.integers(-(2**31), 2**31, (500, 2)).astype(np.int32)
    mean = np.mean(images)
    moved, labels = tf.function(recipe.augment)(images, np.arange(500), seeds)
    assert np.array_equal(labels, np.arange(500))
    found = []
    for image, after in zip(images, moved.numpy(), strict=True):
        padded = np.pad(image, [(4, 4), (4, 4), (0, 0)])
        # The middle is always left: where it came from says how the image was moved.
        middle = after[8:24, 8:24]
        places = [
            (down, right, mirrored)
            for mirrored in (False, True)
            for down in range(9)
            for right in range(9)
            if np.allclose(
                padded[down : down + 32, right : right + 32][:, :: -1 if mirrored else 1][
                    8:24, 8:24
                ],
                middle,
                atol=1e-6,
            )
        ]
        assert len(places) == 1
        found.append(places[0])
        (down, _, _) = places[0]
        if down > 4:
            # Beyond the edge is the mean colour, not black.
            assert np.abs(after[-1] - mean).max() < 0.1
    counts = [np.unique([place[i] for place in found], return_counts=True)[1] for i in range(3)]
    assert [len(count) for count in counts] == [9, 9, 2]
    assert all(count.min() > 0.6 * 500 / len(count) for count in counts)
