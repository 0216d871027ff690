"""`python -m tests.models` trains, compares and evaluates the exports of models of Keras users."""

from pathlib import Path

import pytest

from tests.models.__main__ import MODELS, MODES, compare
from tests.models.examples import write_examples
from trainer.config import load_recipe


@pytest.mark.quick
def test_each_model_has_a_config() -> None:
    for name, path in MODELS.items():
        config = load_recipe(path).config
        assert getattr(config, "model", "") in ("", name)


def test_model_with_its_own_loss_is_equal_on_servers_and_where_it_was_exported_to(
    tmp_path: Path,
) -> None:
    write_examples(tmp_path / "data")
    modes = ["mirrored-1", "ps-sync-2+1"]
    assert set(modes) <= MODES.keys()
    cells, is_right = compare("vae_compute_loss", modes, tmp_path / "data", tmp_path)
    assert is_right, cells
    assert len(cells) == 3
