"""A loss of NaN ends the run; the message has the steps, and no checkpoint has NaN."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.runs import topologies, train


@pytest.mark.parametrize(
    "topology",
    topologies("multiworker-2", "ps-sync-2+1", nightly=("mirrored-2", "ps-2+1")),
)
def test_diverging_run_names_the_steps_and_keeps_no_checkpoint_with_nan(
    topology: str, tmp_path: Path
) -> None:
    often = ("--config.checkpoint_every_steps=1", "--config.steps_per_call=5")
    flags = ("--config=tests/cluster/configs/linear.py", *often)
    too_large = ("--learning_rate=3e38", "--config.optimizer=sgd")
    run = train(topology, tmp_path, *flags, *too_large, exit_code=1)
    output = run.stdout + run.stderr
    # If a gradient overflows before the loss, the check of the variables before a save finds it.
    said = re.findall(r"error: (?:The loss became \S+ somewhere in steps|At step) (\d+)", output)
    assert said, run.stderr
    first = int(said[0])
    assert 1 <= first <= 20
    assert "Traceback" not in output
    assert run.result["exit_code"] == 1
    assert f" {first} " in run.result["why"]
    if (tmp_path / "checkpoints").exists():
        for name in run.checkpoints():
            assert int(name.partition("-")[2]) < first
            assert all(np.isfinite(value).all() for value in run.variables(name).values())
    assert not (tmp_path / "export").exists()
