"""Functions of satellites, which are loaded by name."""

import sys
from pathlib import Path

import pytest

from data.system.errors import UsageError
from data.system.extras import of_satellite


@pytest.mark.parametrize(
    ("module", "deleted"),
    [("data.gone", "data.gone"), ("data.gone.deeper", "data.gone"), ("data.sys", "data.sys")],
)
def test_function_of_a_deleted_satellite_is_a_mistake_of_the_user(
    module: str, deleted: str
) -> None:
    with pytest.raises(UsageError, match=f"This needs {deleted}, which was deleted"):
        of_satellite(module, "anything")


def test_missing_package_of_others_is_no_deleted_satellite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "satellite_here.py").write_text("import sat")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="'sat'"):
        of_satellite("satellite_here", "anything")
    assert "satellite_here" not in sys.modules
