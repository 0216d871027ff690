"""configs/text_lm.py: text is packed, training resumes inside a document, and workers agree."""

from pathlib import Path

import numpy as np
import pytest

from data.prepare.preparing import prepare
from tests.cluster.runs import assert_same_bits, largest_difference, train

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two documents of 40,000 and 20,000 bytes: sequences of 256 begin and end inside them."""
    directory = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    words = ["once", "upon", "a", "time", "there", "was", "mouse", "and", "cat", "the"]
    source = directory / "source"
    source.mkdir()
    for name, size in (("a.txt", 40_000), ("b.txt", 20_000)):
        chosen = " ".join(random.choice(words, size // 4))
        (source / name).write_text(chosen[:size])
    prepare("text:mine", str(directory / "data"), str(source))
    return directory / "data"


def test_language_model_resumes_bit_for_bit_and_two_workers_agree_with_one(
    text: Path, tmp_path: Path
) -> None:
    flags = (
        "--config=configs/text_lm.py",
        f"--data_dir={text}",
        "--config.width=16",
        "--config.blocks=1",
        "--batch_size=16",
        "--config.schedule.decay_steps=30",
        "--config.schedule.warmup_steps=5",
        "--learning_rate=0.01",
        "--config.export=False",
    )
    one = "mirrored-1"
    whole = train(one, tmp_path / "whole", *flags, "--train_steps=30")
    shared = train("multiworker-2", tmp_path / "shared", *flags, "--train_steps=30")
    # 19 steps of 16 sequences: inside the first document, in the second epoch.
    train(one, tmp_path / "parts", *flags, "--train_steps=19")
    parts = train(one, tmp_path / "parts", *flags, "--train_steps=30")

    assert_same_bits(whole, parts)
    assert largest_difference(whole.weights(), parts.weights("step-00000019")) > 1e-3
    figures = [run.result["eval"] for run in (whole, shared)]
    assert figures[0]["bits_per_byte"] == pytest.approx(figures[1]["bits_per_byte"], abs=0.01)
    assert figures[0]["perplexity"] == pytest.approx(np.exp(figures[0]["loss"]), rel=1e-6)
    assert figures[0]["bits_per_byte"] < 5  # Of random bytes: 8.
