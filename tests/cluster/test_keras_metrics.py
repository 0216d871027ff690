"""AUC, F1, recall, weights of examples: the figures of Keras on one device, under each strategy."""

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import keras
import pytest
import tensorflow as tf

from tests.cluster.runs import CONFIGS, digits, train

pytestmark = pytest.mark.nightly

CONFIG = CONFIGS / "keras_metrics.py"


@functools.cache
def module_of_config() -> ModuleType:
    """Made once: Keras would number the names of a second AUC."""
    spec = importlib.util.spec_from_file_location("keras_metrics_config", CONFIG)
    assert spec is not None
    assert spec.loader is not None
    config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    return config


def figures_of_keras(model_file: str) -> Mapping[str, Mapping[str, float]]:
    config = module_of_config()
    for metric in (*config.metrics[1:], *config.weighted_metrics):
        metric.reset_state()  # `evaluate` does not reset the state that a former model left.
    model = keras.models.load_model(model_file, compile=False)
    model.compile(
        loss=config.loss, metrics=config.metrics, weighted_metrics=config.weighted_metrics
    )
    found = {}
    for split, name in (("train", "train"), ("eval", "test")):
        files = sorted(map(str, digits().glob(f"*-{name}.tfrecord-*")))
        records = list(tf.data.TFRecordDataset(files))
        inputs, labels, weights = config.parse(tf.stack(records))
        found[split] = model.evaluate(
            inputs, labels, sample_weight=weights, verbose=0, return_dict=True
        )
    return found


@pytest.mark.parametrize("topology", ["mirrored-3", "multiworker-2", "ps-2+1", "ps-sync-3+1"])
def test_reports_have_the_figures_of_keras_on_one_device(topology: str, tmp_path: Path) -> None:
    run = train(topology, tmp_path / "run", f"--config={CONFIG}")
    exact = figures_of_keras(str(tmp_path / "run/export/model.keras"))
    for split in ("train", "eval"):
        (report,) = run.metrics(split)
        assert report["examples"] in (1437, 360)
        for name, value in exact[split].items():
            assert report[name] == pytest.approx(value, rel=1e-6, abs=1e-6), (split, name)
