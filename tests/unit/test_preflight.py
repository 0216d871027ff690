"""A complete run is recognised, so that it is not trained again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from trainer.config import Config
from trainer.preflight import finished_result

CONFIG = Config(dataset="digits", train_steps=100)
EARLY = dataclasses.asdict(CONFIG.early_stopping)


@pytest.mark.parametrize(
    ("result", "is_finished"),
    [
        ({"step": 100, "exit_code": 0}, True),
        ({"step": 99, "exit_code": 0}, False),
        ({"step": 50, "exit_code": 0, "stopped_early_by": EARLY}, True),
        ({"step": 50, "exit_code": 0, "stopped_early_by": {**EARLY, "patience": 9}}, False),
        ({"step": 100, "exit_code": 75}, False),
        # Ended while a step was on devices that did not answer.
        ({"step": None, "exit_code": 75}, False),
    ],
)
def test_only_a_run_of_enough_steps_that_ended_well_is_finished(
    result: dict[str, Any], is_finished: bool, tmp_path: Path
) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert finished_result(str(tmp_path), CONFIG) == (result if is_finished else None)


def test_run_without_a_result_is_not_finished(tmp_path: Path) -> None:
    assert finished_result(str(tmp_path), CONFIG) is None
