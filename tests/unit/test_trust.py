import grp
import json
import os
import pwd
from pathlib import Path

import pytest

from trainer.run_record.trust import doubt


def write_config(run: Path, recipe: str) -> None:
    document = {"recipe": recipe, "data_dir": "", "config": {"data": {"eval_split": "test"}}}
    (run / "config.json").write_text(json.dumps(document))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in tmp_path/runs/a, whose config file is tmp_path/code/config.py."""
    for name in ("runs/a", "code/own/models"):
        (tmp_path / name).mkdir(parents=True)
    config = tmp_path / "code/own/config.py"
    config.write_text("")
    for name in ("helper.py", "models/deep.py"):
        (config.parent / name).write_text("")
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
        "code/own/models",
        "code/own/models/deep.py",
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


@pytest.mark.parametrize("path", ["top.py", "code/own/sub/deep.py", "code/__init__.py"])
def test_module_at_the_root_of_the_package_of_a_config_file_is_checked(
    run: Path, path: str
) -> None:
    root = run.parents[1]
    (root / "code/own/sub").mkdir()
    for name in ("code/__init__.py", "code/own/__init__.py", "code/own/sub/deep.py", "top.py"):
        (root / name).write_text("")
    assert doubt(str(run)) == ""
    (root / path).chmod(0o666)
    assert f"{root / path} can be written by every user" in doubt(str(run))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another group")
@pytest.mark.parametrize(
    ("users", "is_doubted"),
    [(["me"], False), (["me", "other"], True), (["other"], True), ([], True)],
)
def test_primary_group_of_one_user_is_private(
    users: list[str], is_doubted: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Jupyter's images: the user jovyan has the group `users`, which can write its home."""
    shared = next(group for group in grp.getgrall() if group.gr_gid and not group.gr_mem)
    os.chown(run, -1, shared.gr_gid)
    run.chmod(0o2775)

    def entry(name: str) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", 0, shared.gr_gid, "", "/", ""))

    monkeypatch.setattr("pwd.getpwuid", lambda _: entry("me"))
    monkeypatch.setattr("pwd.getpwall", lambda: [entry(name) for name in users])
    assert bool(doubt(str(run))) == is_doubted


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
