"""`python -m tests.models` trains, compares and evaluates the exports of models of Keras users."""

from pathlib import Path

import pytest

from tests.cluster.runs import assert_same_bits
from tests.models.__main__ import MAX_EXPORT_ERROR, MODELS, compare, export_errors, train
from tests.models.examples import write_examples
from trainer.config import load_recipe

pytestmark = pytest.mark.nightly


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
    cells, is_right = compare("vae_compute_loss", modes, tmp_path / "data", tmp_path)
    assert is_right, cells
    assert len(cells) == 3


# Without batch statistics, but with a loss that makes each rounding visible; and with them.
@pytest.mark.parametrize("model", ["triplet_hinge", "normed"])
def test_two_replicas_and_two_workers_end_in_the_same_bits_and_evaluate_as_their_exports(
    model: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    write_examples(data)
    modes = ("mirrored-2", "multiworker-2")
    runs = [train(model, mode, data, tmp_path / mode) for mode in modes]
    assert [run.exit_code for run in runs] == [0, 0]
    assert_same_bits(*runs)
    assert runs[0].result["eval"] == runs[1].result["eval"]
    # Each replica evaluates with the same statistics, and these are saved.
    assert max(export_errors(model, runs, data, tmp_path)) <= MAX_EXPORT_ERROR
