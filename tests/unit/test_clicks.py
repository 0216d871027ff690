"""Generated clicks: repeatable, distributed as promised, with a best AUC that is right."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from sklearn.metrics import roc_auc_score

from data.example_features import read_features
from data.prepare.preparing import prepare
from data.prepare.sources import Options
from data.prepare.sources.clicks import CARDINALITIES, Clicks, auc, source
from data.system.files import DataError
from data.tfrecord.split import open_split
from trainer.config import load_recipe
from trainer.preflight import preflight


def test_examples_do_not_depend_on_how_they_are_divided() -> None:
    clicks = Clicks(seed=1, scale=0.001)
    records = list(clicks.records(0, 4000, 4200))
    assert records == [*clicks.records(0, 4000, 4095), *clicks.records(4000, 95, 200)]
    assert records != list(Clicks(seed=2, scale=0.001).records(0, 4000, 4200))


def test_frequencies_are_those_of_zipf() -> None:
    clicks = Clicks(seed=0, scale=0.001)
    ids = np.concatenate([clicks._examples(low, low + 4096)[1] for low in range(0, 81920, 4096)])
    assert (ids.min(axis=0) == 0).all()
    assert (ids.max(axis=0) < clicks.cardinalities).all()
    largest = int(np.argmax(clicks.cardinalities))
    counts = np.bincount(ids[:, largest])
    # The id of rank 20 is 10 ** 1.05 times as frequent as the id of rank 200.
    ratio = counts[15:25].sum() / counts[195:205].sum()
    assert 9 < ratio < 14


def test_best_auc_is_that_of_the_true_probabilities() -> None:
    clicks = Clicks(seed=3, scale=0.001)
    _, _, probabilities, draws = clicks._examples(4096, 8192)
    expected = roc_auc_score(draws < probabilities, probabilities)
    assert clicks.best_auc(4096, 4096) == pytest.approx(expected, abs=1e-12)
    assert 0.75 < expected < 0.9
    # The labels agree with the probabilities.
    assert np.mean(draws < probabilities) == pytest.approx(np.mean(probabilities), abs=0.03)


def test_auc_counts_equal_scores_as_half() -> None:
    scores, labels = np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, True, False, True])
    assert auc(scores, labels) == roc_auc_score(labels, scores) == 0.875
    assert np.isnan(auc(scores, np.ones(4, bool)))


def test_a_data_set_has_the_features_and_its_numbers(tmp_path: Path) -> None:
    options = Options(num_clicks=300, id_scale=0.01, test_fraction=0.5)
    prepare("clicks", str(tmp_path), options=options)
    known = json.loads((tmp_path / "clicks.json").read_text())
    assert known["cardinalities"][2] == 101_313
    assert len(known["cardinalities"]) == len(CARDINALITIES)
    assert 0.7 < known["best_auc"] < 0.95
    features = read_features(str(tmp_path))
    assert (features["numbers"].shape, features["categorical"].shape) == ((13,), (26,))
    assert features["click"].num_classes == 2
    sizes = [open_split(str(tmp_path), split).num_examples for split in ("train", "test")]
    assert sizes == [300, 150]
    prepare("clicks", str(tmp_path), options=Options(num_clicks=10), overwrite=True)
    assert open_split(str(tmp_path), "train").num_examples == 10


@pytest.mark.parametrize(
    "options", [Options(num_clicks=0), Options(id_scale=2.0), Options(test_fraction=1.0)]
)
def test_options_out_of_range_are_refused(options: Options) -> None:
    with pytest.raises(DataError, match="must be"):
        source("clicks", "", options)


@pytest.mark.slow
def test_config_for_the_clicks_of_criteo_fits_their_files(tmp_path: Path) -> None:
    """Files as those of Criteo_x1: numbers with decimals, ids that are whole numbers."""
    names = ["label", *(f"I{i + 1}" for i in range(13)), *(f"C{i + 1}" for i in range(26))]
    numbers = random.Random(0)
    for split, num_rows in (("train", 60), ("valid", 10), ("test", 20)):
        lines = [",".join(names)]
        for row in range(num_rows):
            columns = [f"{numbers.random():.6f}" for _ in range(13)] + ["7"] * 25 + [str(row)]
            lines.append(",".join([str(row % 2), *columns]))
        (tmp_path / f"{split}.csv").write_text("\n".join(lines))
    prepare("csv:criteo_x1", str(tmp_path / "data"), str(tmp_path), Options(label="label"))
    recipe = load_recipe("configs/criteo_x1.py")
    recipe.config.data_dir, recipe.config.batch_size = str(tmp_path / "data"), 16
    preflight(recipe, str(tmp_path / "run"))
    files = [str(path) for path in (tmp_path / "data").glob("*test*tfrecord*")]
    assert recipe.parse is not None
    inputs, _ = recipe.parse(tf.constant(list(tf.data.TFRecordDataset(files).as_numpy_iterator())))
    # Equal ids of two columns are different: here all but the last column have the id 7.
    assert len(np.unique(inputs["categorical"][:, :-1])) == 25
