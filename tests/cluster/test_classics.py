"""The classic programs of configs/, in a short form, under mirrored and another strategy.

test_parity.py has the options of a step under all strategies.
"""

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import scipy.io

from data.prepare.preparing import prepare
from data.prepare.sources import Options
from tests.cluster.runs import (
    Run,
    assert_same_bits,
    histograms,
    largest_difference,
    train,
)
from trainer.config import load_recipe

pytestmark = pytest.mark.nightly

NUM_TRAIN, NUM_TEST = 120, 30
STEPS = 6
BATCH = 12
RANDOM = np.random.default_rng(0)


def labels_of(num_examples: int) -> np.ndarray:
    return np.arange(num_examples) % 10


def images_of(labels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns uint8 [n, *shape]: a pattern for each class, with noise."""
    patterns = np.random.default_rng(1).integers(0, 200, (10, *shape))
    noise = RANDOM.integers(0, 56, (len(labels), *shape))
    images: np.ndarray = (patterns[labels] + noise).astype(np.uint8)
    return images


def write_svhn(directory: Path) -> None:
    for split, count in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        labels = labels_of(count)
        images = images_of(labels, (32, 32, 3)).transpose(1, 2, 3, 0)
        stored = np.where(labels == 0, 10, labels)[:, np.newaxis].astype(np.uint8)
        scipy.io.savemat(directory / f"{split}_32x32.mat", {"X": images, "y": stored})


def write_cifar10(directory: Path) -> None:
    names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    for name in (*names, "test_batch.bin"):
        count = NUM_TEST if name == "test_batch.bin" else NUM_TRAIN // len(names)
        labels = labels_of(count)
        planes = images_of(labels, (32, 32, 3)).transpose(0, 3, 1, 2).reshape(count, -1)
        rows = np.concatenate([labels[:, np.newaxis], planes], axis=1)
        (directory / name).write_bytes(rows.astype(np.uint8).tobytes())
    (directory / "batches.meta.txt").write_text("\n".join("abcdefghij"))


def write_mnist(directory: Path) -> None:
    for split, count in (("train", NUM_TRAIN), ("t10k", NUM_TEST)):
        labels = labels_of(count).astype(np.uint8)
        images = images_of(labels, (28, 28))
        header = struct.pack(">4i", 0x803, count, 28, 28)
        (directory / f"{split}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">2i", 0x801, count)
        (directory / f"{split}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


@dataclasses.dataclass(frozen=True)
class Classic:
    """A config, and a function that writes its data in the published format (None: digits).

    `same_weights`: `topologies` end in the weights of mirrored.
    """

    name: str
    write: Callable[[Path], None] | None
    num_parameters: int
    topologies: tuple[str, ...]
    layout: str | None = None
    same_weights: bool = True

    @property
    def num_test(self) -> int:
        """Examples that are evaluated."""
        return NUM_TEST if self.write else 360

    def __str__(self) -> str:
        return self.name


CLASSICS = [
    Classic("svhn_cnn", write_svhn, 520_906, ("multiworker-2",)),
    Classic("cifar10_resnet", write_cifar10, 271_098, ("ps-sync-3+1",), same_weights=False),
    Classic("mnist_towers", write_mnist, 397_510, ("ps-2+1",), "image_raw", same_weights=False),
    Classic("custom_step", None, 43_585, ("multiworker-2", "ps-sync-3+1")),
]


@pytest.fixture(scope="module", params=CLASSICS, ids=str)
def classic(request: pytest.FixtureRequest) -> Classic:
    classic: Classic = request.param
    return classic


@pytest.fixture(scope="module")
def flags(
    classic: Classic, digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ...]:
    data = digits
    if classic.write is not None:
        source, data = (tmp_path_factory.mktemp(f"{classic}-{what}") for what in ("from", "to"))
        classic.write(source)
        dataset = classic.name.partition("_")[0]
        prepare(dataset, str(data), str(source), Options(layout=classic.layout))
    return (
        f"--config=configs/{classic}.py",
        f"--data_dir={data}",
        f"--train_steps={STEPS}",
        f"--batch_size={BATCH}",
        f"--config.eval_batch_size={BATCH}",
    )


@pytest.fixture(scope="module")
def mirrored(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train("mirrored-2", tmp_path_factory.mktemp("mirrored") / "run", *flags)


def test_classic_config_trains(
    classic: Classic, flags: tuple[str, ...], mirrored: Run, tmp_path: Path
) -> None:
    assert mirrored.result["step"] == STEPS
    assert mirrored.metrics("eval")[-1]["examples"] == classic.num_test
    exported = keras.models.load_model(mirrored.model_dir / "export" / "model.keras")
    assert exported.count_params() == classic.num_parameters
    recipe = load_recipe(f"configs/{classic}.py")
    keras.utils.set_random_seed(recipe.config.seed)
    initial = recipe.build_model(recipe.config).trainable_variables
    for before, after in zip(initial, exported.trainable_variables, strict=True):
        assert np.abs(after.numpy() - before.numpy()).max() > 1e-5, before.path

    for name in classic.topologies:
        run = train(name, tmp_path / name, *flags, "--config.export=False")
        assert run.result["step"] == STEPS
        assert run.metrics("eval")[-1]["examples"] == classic.num_test
        weights, expected = run.weights(), mirrored.weights()
        assert weights.keys() == expected.keys()
        assert all(np.isfinite(value).all() for value in weights.values())
        if classic.same_weights:
            assert largest_difference(weights, expected) < 1e-5


def test_towers_learn_mnist_and_write_histograms_and_checkpoints(
    mnist_source: Path, tmp_path: Path
) -> None:
    data, model_dir = tmp_path / "data", tmp_path / "run"
    prepare("mnist", str(data), str(mnist_source), Options(layout="image_raw"))
    flags = ("--config=configs/mnist_towers.py", f"--data_dir={data}", "--train_steps=2000")
    run = train("mirrored-2", model_dir, *flags)
    assert run.result["eval"]["accuracy"] >= 0.97
    rates = [report["learning_rate"] for report in run.metrics("train")]
    assert rates == pytest.approx([0.5 * 0.99 ** (step / 600) for step in (1000, 2000)], rel=1e-3)
    assert {"step-00001000", "step-00002000"} < set(run.checkpoints())
    steps = [steps for tag, steps in histograms(model_dir).items() if "kernel" in tag]
    assert steps == [[1000, 2000]] * 4, "two kernels and their gradients"


def test_second_optimizer_of_a_custom_step_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    flags = ("--config=configs/custom_step.py", f"--batch_size={BATCH}")
    half, complete = (tmp_path / name for name in ("half", "complete"))
    train("mirrored-2", half, *flags, "--train_steps=10")
    in_two = train("mirrored-2", half, *flags, "--train_steps=20")
    at_once = train("mirrored-2", complete, *flags, "--train_steps=20")
    assert any("critic_optimizer" in key for key in in_two.variables())
    assert_same_bits(in_two, at_once)
