"""The pipelines that `benchmarks.image_input` compares give the same kind of batches."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.benchmark_modules import imported


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("photographs")
    imported("benchmarks.image_input").write_images(directory, 40)
    return directory


@pytest.mark.parametrize(
    "name",
    ["this program", "tf.data by hand, crops of equal area", "tf.data by hand, smaller crops"],
)
def test_pipelines_give_shuffled_crops(photographs: Path, name: str) -> None:
    batches = iter(imported("benchmarks.image_input").PIPELINES[name](photographs))
    (images, labels), (others, _) = next(batches), next(batches)
    assert images.shape == others.shape == (32, 224, 224, 3)
    assert images.dtype == tf.uint8
    assert labels.shape == (32,)
    assert len(set(labels.numpy().tolist())) > 3
    assert not np.array_equal(images, others)
