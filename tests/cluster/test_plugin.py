"""A user's config file is enough: custom records, model, loss, metrics and hooks."""

import textwrap
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.runs import Topology, histograms, topologies, train
from tests.cluster.runs import run as run_trainer

RECIPE = '''
    """y = 3 x0 - 2 x1 + 1, found from records that no metadata describes."""

    import dataclasses

    from trainer.config import Config
    from trainer.hooks.base import Hook, next_multiple


    @dataclasses.dataclass
    class MyConfig(Config):
        every: int = 7


    def get_config():
        return MyConfig(batch_size=20, learning_rate=0.3, train_steps=200, log_every_steps=50)


    def parse(serialized):
        import tensorflow as tf

        spec = {
            "x": tf.io.FixedLenFeature([2], tf.float32),
            "y": tf.io.FixedLenFeature([], tf.float32),
        }
        example = tf.io.parse_example(serialized, spec)
        return example["x"], example["y"]


    def build_model(config):
        import keras

        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


    def build_optimizer(config):
        import keras

        return keras.optimizers.SGD(config.learning_rate, momentum=0.5)


    def loss(labels, outputs):
        return (outputs[:, 0] - labels) ** 2


    def metrics_near(labels, outputs):
        import tensorflow as tf

        return tf.cast(tf.abs(outputs[:, 0] - labels) < 0.1, tf.float32)


    metrics = {"near": metrics_near}


    class Note(Hook):
        def __init__(self, path, every):
            self.path, self.every = path, every

        def next_step(self, step):
            return next_multiple(step, self.every)

        def __call__(self, step, metrics):
            with open(self.path, "a") as file:
                print(step, file=file)


    def build_hooks(config, model_dir):
        return [Note(f"{model_dir}/notes.txt", config.every)]
'''


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.tfrecord and test.tfrecord, written with plain TensorFlow."""
    directory = tmp_path_factory.mktemp("records")
    xs = np.random.default_rng(0).normal(size=(230, 2))
    for name, part in (("train", xs[:200]), ("test", xs[200:])):
        with tf.io.TFRecordWriter(str(directory / f"{name}.tfrecord")) as writer:
            for x in part:
                y = 3 * x[0] - 2 * x[1] + 1
                example = tf.train.Example()
                example.features.feature["x"].float_list.value.extend(x)
                example.features.feature["y"].float_list.value.append(y)
                writer.write(example.SerializeToString())
    return directory


@pytest.mark.parametrize("topology", topologies("mirrored-2", "ps-2+1", nightly=("multiworker-2",)))
def test_users_own_file_and_records_train(
    topology: Topology, records: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(textwrap.dedent(RECIPE))
    flags = (f"--config={recipe}", f"--data_dir={records}", "--config.every=13")

    run = train(topology, tmp_path / "run", *flags)

    assert run.result["eval"].keys() == {"loss", "near"}
    assert run.result["eval"]["near"] == 1.0
    assert run.metrics("eval")[-1]["examples"] == 30
    assert run.config["config"]["every"] == 13
    weights = sorted(float(w) for value in run.weights().values() for w in value.ravel())
    assert weights == pytest.approx([-2, 1, 3], abs=0.05)
    steps = [int(line) for line in (tmp_path / "run" / "notes.txt").read_text().split()]
    called_at = set(range(13, 201, 13)) | {50, 100, 150, 200}
    if topology.strategy != "ps":
        assert called_at <= set(steps)
    assert steps[-1] == run.result["step"]


@pytest.mark.parametrize(
    "name", ["multiworker-2", pytest.param("ps-2+1", marks=pytest.mark.nightly)]
)
def test_packages_of_a_user_with_the_names_of_ours_train_on_a_cluster(
    name: str, records: Path, tmp_path: Path
) -> None:
    for package in ("configs", "data", "strategies", "strategies/cluster"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "strategies/cluster/ports.py").write_text("raise ValueError")
    (tmp_path / "data/base.py").write_text("import configs.base")
    (tmp_path / "configs/base.py").write_text("import neighbour")
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "data/mine.py").write_text("from . import base\n" + textwrap.dedent(RECIPE))
    flags = ("--config=data/mine.py", f"--data_dir={records}", "--train_steps=10")
    model_dir = tmp_path / "run"
    argv = (*Topology(name).argv, *flags, f"--model_dir={model_dir}")
    ran = run_trainer(argv, model_dir, cwd=tmp_path)
    assert ran.config["recipe"] == str(tmp_path / "data/mine.py")


def test_histograms_and_profile_are_written(tmp_path: Path) -> None:
    profile = ("--config.profile_first_step=8", "--config.profile_num_steps=5")
    every = "--config.histogram_every_steps=15"
    linear = "--config=tests/cluster/configs/linear.py"
    train("mirrored-2", tmp_path, linear, *profile, every, "--train_steps=30")
    found = histograms(tmp_path)
    assert {tag.partition("/")[0] for tag in found} == {"variables", "gradients"}
    assert len(found) == 4
    assert all(steps == [15, 30] for steps in found.values())
    assert list((tmp_path / "tensorboard" / "train" / "plugins" / "profile").rglob("*.xplane.pb"))
