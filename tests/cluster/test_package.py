"""What pip installs is complete: it runs in a new environment, from an empty directory."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packages import PROJECT, ROOT, installed_with

PACKAGES = ("configs", "data", "strategies", "trainer")
SDIST = f"tf_distribution_trainer-{PROJECT['version']}"
FEW_STEPS = ("--train_steps=20", "--num_threads=1")


def files_of_the_project(*below: str) -> set[str]:
    """The files that git has or would add; of a new folder, too."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *below]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that pip makes of it.

    They are built from a copy, because setuptools would also take what an earlier build has left.
    """
    copy = tmp_path_factory.mktemp("copy")
    for name in files_of_the_project():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("built")
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=copy, check=True)
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    wheel = [sys.executable, "-m", "pip", "wheel", *offline, f"{SDIST}.tar.gz"]
    subprocess.run(wheel, cwd=out, check=True)
    return out


def test_wheel_and_sdist_have_the_files_that_git_has(built: Path) -> None:
    needed = files_of_the_project(*PACKAGES)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == needed, "a folder with code needs __init__.py; other files: package-data"
    with tarfile.open(built / f"{SDIST}.tar.gz") as sdist:
        members = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    in_packages = {name for name in members if name.partition("/")[0] in PACKAGES}
    assert in_packages == needed
    others = {name for name in members - needed if not re.match(r".*\.egg-info/|setup\.cfg$", name)}
    assert others == {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}


@pytest.fixture(scope="module")
def scripts(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a new environment: the wheel, and of all other packages those that it needs.

    They are links to the packages of this environment, so nothing is downloaded.
    """
    environment = tmp_path_factory.mktemp("new") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    (new,) = run(python, "-c", code, cwd=environment).stdout.splitlines()
    for package in installed_with():
        distribution = importlib.metadata.distribution(package)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            source, target = Path(str(distribution.locate_file(top))), Path(new, top)
            if top != "__pycache__" and not target.exists():
                target.symlink_to(source)
    return environment / "bin"


def run(
    executable: Path, *arguments: str, cwd: Path, exit_code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [executable, *arguments],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


def test_new_environment_has_neither_the_checkout_nor_extras(scripts: Path, tmp_path: Path) -> None:
    print_files = "print(*(sys.modules[name].__file__ for name in sys.argv[1:]))"
    code = f"import sys, {', '.join(PACKAGES)}; {print_files}"
    for file in run(scripts / "python", "-c", code, *PACKAGES, cwd=tmp_path).stdout.split():
        assert Path(file).is_relative_to(scripts.parent), file
    for module in ("sklearn", "scipy", "tensorflow_datasets", "obstore", "pytest"):
        run(scripts / "python", "-c", f"import {module}", cwd=tmp_path, exit_code=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("data.prepare", "digits"),
        ("trainer", "--strategy=ps", *FEW_STEPS),
        ("trainer.doctor", "--strategy=ps", "--deadline_secs=150"),
    ],
    ids=" ".join,
)
def test_module_runs_from_an_empty_directory(
    arguments: tuple[str, ...], scripts: Path, tmp_path: Path
) -> None:
    run(scripts / "python", "-m", *arguments, cwd=tmp_path)
    if arguments[0] == "trainer":
        assert (tmp_path / "runs" / "latest" / "result.json").is_file()


def test_command_trains_and_its_run_is_reported(scripts: Path, tmp_path: Path) -> None:
    run(scripts / "tf-distribution-trainer", *FEW_STEPS, cwd=tmp_path)
    run(scripts / "python", "-m", "trainer.report", "runs/latest", cwd=tmp_path)
    assert list(tmp_path.rglob("*.html"))


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (("data.prepare", "tfds:mnist"), "importlib_resources", "tfds"),
        (("trainer", "--config=regression"), "sklearn", "samples"),
        (("data.prepare", "diabetes"), "sklearn", "samples"),
        (("data.prepare", "parquet:a", "--source=."), "pyarrow", "parquet"),
        (("data.prepare", "python:a", "--source=a.py:f"), "pyarrow", "parquet"),
        (("data.prepare", "svhn", "--source=."), "scipy", "samples"),
        (("data.prepare", "digits", "--data_dir=s3://bucket/digits"), "obstore", "s3"),
        (("trainer", "--model_dir=s3://bucket/run"), "obstore", "s3"),
        (("trainer", "--config.trackers=mlflow"), "mlflow", "mlflow"),
        (("trainer", "--config.trackers=wandb"), "wandb", "wandb"),
    ],
    ids=str,
)
def test_missing_package_is_named_with_the_command_that_installs_it(
    arguments: tuple[str, ...], module: str, extra: str, scripts: Path, tmp_path: Path
) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}_32x32.mat").touch()
    done = run(scripts / "python", "-m", *arguments, cwd=tmp_path, exit_code=2)
    assert f"needs the package {module}, which is not installed" in done.stderr
    command = f"{scripts}/python -m pip install 'tf-distribution-trainer[{extra}]'"
    assert done.stderr.count(command) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "datasets").exists()
