import grp
import json
import os
from pathlib import Path

import pytest

from trainer.run_record.trust import doubt


def write_config(run: Path, recipe: str) -> None:
    document = {"recipe": recipe, "data_dir": "", "config": {"data": {"eval_split": "test"}}}
    (run / "config.json").write_text(json.dumps(document))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in tmp_path/runs/a, whose config file is tmp_path/code/config.py."""
    for name in ("runs/a", "code/own"):
        (tmp_path / name).mkdir(parents=True)
    config = tmp_path / "code/own/config.py"
    config.write_text("")
    (config.parent / "helper.py").write_text("")
    write_config(tmp_path / "runs/a", f"{config}:get_config")
    return tmp_path / "runs/a"


def test_own_files_are_trusted(run: Path) -> None:
    run.parent.chmod(0o775)  # Of a group.
    assert doubt(str(run)) == ""


@pytest.mark.parametrize(
    "path",
    [
        "runs",
        "runs/a",
        "runs/a/config.json",
        "code",
        "code/own",
        "code/own/config.py",
        "code/own/helper.py",
    ],
)
def test_file_that_others_can_write_or_replace_is_doubted(run: Path, path: str) -> None:
    found = run.parents[1] / path
    found.chmod(0o777)
    reason = doubt(str(run))
    assert f"{found} can be written by every user" in reason
    assert "--trust" in reason
    if found.is_dir():
        found.chmod(0o1777)  # As /tmp: nobody replaces the files of others.
        assert doubt(str(run)) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another group")
@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("runs/a", 0o2775),
        ("code/own", 0o2775),
        ("code/own/config.py", 0o664),
        ("code/own/helper.py", 0o664),
    ],
)
def test_file_that_a_shared_group_can_write_is_doubted(run: Path, path: str, mode: int) -> None:
    found = run.parents[1] / path
    found.chmod(mode)
    assert doubt(str(run)) == "", "the group is private"
    shared = next(group for group in grp.getgrall() if group.gr_gid)
    os.chown(found, -1, shared.gr_gid)
    found.chmod(mode)
    assert f"{found} can be written by the group {shared.gr_name}" in doubt(str(run))
    found.chmod(0o755)
    assert doubt(str(run)) == ""
    os.chown(found, -1, 54321)  # As the fsGroup of a pod.
    found.chmod(mode)
    assert doubt(str(run)) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("path", ["runs/a", "code/own/config.py", "code/own/helper.py"])
def test_file_of_another_user_is_doubted(run: Path, path: str) -> None:
    found = run.parents[1] / path
    os.chown(found, 12345, -1)
    assert f"{found} belongs to another user (uid 12345)" in doubt(str(run))


def test_config_file_of_this_program_is_as_safe_as_the_program(run: Path) -> None:
    shipped = Path(__file__).resolve().parents[2] / "configs" / "digits.py"
    write_config(run, str(shipped))
    assert doubt(str(run)) == ""
