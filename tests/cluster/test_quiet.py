"""No command prints TensorFlow's start-up lines, nor its advice while graphs are traced."""

from pathlib import Path

import pytest

from tests.unit.compat.test_quiet import noise_in, run


@pytest.mark.parametrize(
    "strategy", ["mirrored", pytest.param("multiworker", marks=pytest.mark.nightly), "ps"]
)
def test_training_and_its_commands_are_quiet(strategy: str, digits: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "digits" if strategy == "mirrored" else digits
    model_dir = tmp_path / "run"
    flags = (f"--strategy={strategy}", f"--data_dir={data_dir}", f"--model_dir={model_dir}")
    # With all graphs of asynchronous ps.
    training = ("trainer", *flags, "--train_steps=100", "--num_threads=1")
    commands: tuple[tuple[str, ...], ...] = (training,)
    if strategy == "mirrored":
        commands = (
            ("data.prepare", "digits", f"--data_dir={data_dir}"),
            ("data.inspect", f"--data_dir={data_dir}"),
            ("trainer", *flags, "--check"),
            training,
            ("trainer.predict", f"--model_dir={model_dir}", "--num_examples=1"),
        )
    printed = "".join(run("-m", *command) for command in commands)
    logs = "".join(path.read_text() for path in model_dir.glob("tasks/*.log"))
    assert (strategy != "mirrored") == bool(logs)
    assert noise_in(printed + logs) == []
    assert [line for line in (printed + logs).splitlines() if line.startswith("WARNING")] == []
