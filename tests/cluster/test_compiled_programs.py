"""Programs that XLA compiled are read by the next start of a run, unless they are damaged."""

import gzip
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.runs import Process, assert_nothing_left, start, train

FLAGS = ("--config=tests/cluster/configs/linear.py", "--config.jit_compile=True")


def started(topology: str, model_dir: Path) -> Process:
    flags = (*FLAGS, "--train_steps=1_000_000")
    return start(topology, model_dir, *flags)


def programs(model_dir: Path) -> list[Path]:
    return sorted(model_dir.glob("compiled/*.pb.gz"))


def is_whole(program: Path) -> bool:
    try:
        return len(gzip.decompress(program.read_bytes())) > 1000
    except (OSError, EOFError, zlib.error):
        return False


@pytest.mark.parametrize(
    ("topology", "damage"),
    [
        ("mirrored-1", lambda content: b""),
        ("multiworker-2", lambda content: content[:-1]),
        ("ps-2+1", lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]),
    ],
    ids=["mirrored, empty", "multiworker, truncated", "ps, one bit"],
)
def test_damaged_programs_of_a_killed_run_are_compiled_again(
    topology: str, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    with started(topology, model_dir) as process:
        process.wait_until(lambda: bool(programs(model_dir)), "program")
    process.wait_for_family_to_end()

    (program,) = programs(model_dir)  # All workers need the same one.
    program.write_bytes(damage(program.read_bytes()))
    assert not is_whole(program)
    # Without a checksum that is right, TensorFlow must not see it.
    with started(topology, model_dir) as process:
        process.wait_until(lambda: is_whole(program), "program that was compiled again")
    process.wait_for_family_to_end()
    assert programs(model_dir) == [program]
    if topology != "mirrored-1":
        return

    # With it, TensorFlow reads what it cannot use: the proof that it reads, after a resume too.
    program.write_bytes(gzip.compress(gzip.decompress(program.read_bytes())[:-1000] + b'"'))
    with started(topology, model_dir) as process:
        assert process.wait_alone().exit_code != 0
        process.wait_for_family_to_end()
        assert_nothing_left(model_dir)


def test_result_is_the_same_with_kept_programs(tmp_path: Path) -> None:
    topology = "mirrored-1"
    flags = (*FLAGS, "--train_steps=40")
    compiled = train(topology, tmp_path / "first", *flags)
    kept = programs(compiled.model_dir)
    shutil.copytree(compiled.model_dir / "compiled", tmp_path / "second" / "compiled")
    read = train(topology, tmp_path / "second", *flags)

    assert len(kept) == 2  # Of the step and of the evaluation.
    assert [p.name for p in programs(read.model_dir)] == [p.name for p in kept]
    assert read.result["eval"] == compiled.result["eval"]
    weights = compiled.weights()
    for name, value in read.weights().items():
        np.testing.assert_array_equal(value, weights[name], name)
