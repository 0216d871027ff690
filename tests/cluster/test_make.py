"""The environment that make makes: of the right Python, and new after a failure.

A small project takes the place of this one, so that pip installs nothing else.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import PROJECT, ROOT

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = '''
import os, zipfile

def build_editable(directory, config_settings=None, metadata_directory=None):
    """An empty wheel, but for its metadata."""
    needed = os.environ.get("NEEDED", "")
    metadata = "Metadata-Version: 2.1\\nName: small\\nVersion: 1\\nProvides-Extra: docs\\n"
    name = "small-1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        info = "small-1.dist-info"
        wheel.writestr(f"{info}/METADATA", metadata + (needed and f"Requires-Dist: {needed}\\n"))
        tag = "Root-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\n" + tag)
        wheel.writestr(f"{info}/RECORD", "")
    return name
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    shutil.copy(ROOT / "Makefile", directory)
    (directory / "pyproject.toml").write_text(PYPROJECT)
    (directory / "backend.py").write_text(BACKEND)
    (directory / "constraints.txt").touch()
    (directory / "trainer.py").write_text("import sys; print('trained with', sys.prefix)")
    return directory


def another_python(path: Path) -> Path:
    """A program that says of itself that it is Python 3.10."""
    path.unlink(missing_ok=True)
    path.write_text("#!/bin/sh\necho 3.10\n")
    path.chmod(0o755)
    return path


def make(project: Path, *arguments: str, needed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "train", *arguments],
        cwd=project,
        env={"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "NEEDED": needed},
        capture_output=True,
        text=True,
        timeout=200,
    )


OURS = f"PYTHON={sys.executable}"


def test_versions_in_the_makefile_are_those_of_the_package() -> None:
    (cases,) = re.findall(r"in ([\d.|]+)\) ;;", (ROOT / "Makefile").read_text())
    versions = cases.split("|")
    minors = [int(version.removeprefix("3.")) for version in versions]
    assert PROJECT["requires-python"] == f">=3.{min(minors)},<3.{max(minors) + 1}"
    assert minors == list(range(min(minors), max(minors) + 1))
    (message,) = re.findall(r"needed is ([\d., or]+)\. ", (ROOT / "Makefile").read_text())
    assert re.findall(r"[\d.]+\d", message) == versions


@pytest.mark.parametrize(
    ("name", "said"), [("python3.10", "is Python 3.10"), ("missing", "is not a Python that starts")]
)
def test_wrong_python_is_refused_before_anything_is_made(
    name: str, said: str, project: Path, tmp_path: Path
) -> None:
    another_python(tmp_path / "python3.10")
    done = make(project, f"PYTHON={tmp_path / name}")
    assert done.returncode == 2
    assert f"{tmp_path / name} {said}; needed is 3.11, 3.12 or 3.13." in done.stderr
    assert re.search(r"type: make train PYTHON=python3\.1[123]\n", done.stderr)
    assert not (project / ".venv").exists()


@pytest.mark.nightly
def test_environment_is_made_anew_after_a_failure_and_kept_after_success(project: Path) -> None:
    venv = project / ".venv"
    failed = make(project, OURS, needed="no-such-package")
    assert failed.returncode == 2
    assert "no-such-package" in failed.stderr
    (venv / "left").touch()
    done = make(project, OURS)
    assert f"trained with {venv}\n" in done.stdout, done.stderr
    assert not (venv / "left").exists(), "of the call that failed"

    (venv / "left").touch()
    (project / "constraints.txt").touch()
    done = make(project)  # The PYTHON of the environment.
    assert "pip install" in done.stdout
    assert (venv / "left").exists(), "an update keeps the environment"
    assert "pip install" not in make(project).stdout
    assert "pip install" not in make(project, OURS).stdout


@pytest.mark.nightly
def test_environment_of_another_python_is_made_anew(project: Path) -> None:
    venv = project / ".venv"
    (venv / "bin").mkdir(parents=True)
    another_python(venv / "bin" / "python")
    (venv / ".installed-3.10-train").touch()
    done = make(project, OURS)
    assert f"trained with {venv}\n" in done.stdout, done.stderr
    assert not (venv / ".installed-3.10-train").exists()


def test_environment_that_make_has_not_made_is_kept(project: Path) -> None:
    own = project / ".venv"
    (own / "bin").mkdir(parents=True)
    python = another_python(own / "bin" / "python")
    done = make(project, OURS)
    assert done.returncode == 2
    assert "make has not made it" in done.stderr
    assert python.read_text() == "#!/bin/sh\necho 3.10\n"
    (advice,) = re.findall(r"Type: make train (VENV=\S+)\n", done.stderr)
    done = make(project, OURS, advice)
    assert f"trained with {project / advice.removeprefix('VENV=')}\n" in done.stdout, done.stderr
