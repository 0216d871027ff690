"""Programs that XLA compiled are read by the next start of a run, unless they are damaged."""

import hashlib
from pathlib import Path

import pytest

from tests.cluster.runs import TOPOLOGIES, Run, start

FLAGS = (
    "--config=tests/cluster/configs/linear.py",
    "--config.jit_compile=True",
    "--config.export=False",
    "--num_threads=1",
)


def run(model_dir: Path, digits: Path, topology: str, num_steps: int) -> Run:
    flags = (*FLAGS, f"--data_dir={digits}", f"--train_steps={num_steps}")
    with start(TOPOLOGIES[topology], model_dir, *flags) as process:
        return process.wait()


def programs(model_dir: Path) -> list[Path]:
    return sorted(model_dir.glob("compiled/*/*.pb.*"))


@pytest.mark.parametrize("topology", ["mirrored-1", "multiworker-2"])
def test_damaged_programs_are_compiled_again_and_others_are_read(
    topology: str, digits: Path, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    assert run(model_dir, digits, topology, 5).exit_code == 0
    kept = programs(model_dir)
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:-100])

    assert run(model_dir, digits, topology, 10).exit_code == 0

    again = programs(model_dir)
    assert {p.name.partition(".pb")[0] for p in again} == {p.name.partition(".pb")[0] for p in kept}
    for path in again:  # With its checksum, a damaged program is read: TensorFlow refuses it.
        damaged = path.read_bytes()[:-100]
        digest = hashlib.sha256(damaged).hexdigest()[:16]
        path.with_name(f"{path.name.rpartition('.')[0]}.{digest}").write_bytes(damaged)
        path.unlink()
    assert run(model_dir, digits, topology, 15).exit_code != 0
