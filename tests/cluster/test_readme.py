"""The README's commands work as they stand there, and what it quotes is what the code says."""

import contextlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

from strategies.ports import free_ports
from tests.cluster.runs import ROOT, Process
from trainer.loop import train

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def trainings() -> list[list[str]]:
    """The arguments of each `python -m trainer` that needs nothing which a reader must bring."""
    brought = ("/shared", "mnist", "$HOSTS", "--check")
    return [c for c in commands() if not any(b in word for word in c for b in brought)]


def commands() -> list[list[str]]:
    """The arguments of each `python -m trainer`."""
    lines = [line for b in blocks("sh") for line in b.replace("\\\n", " ").splitlines()]
    return [shlex.split(x, comments=True)[3:] for x in lines if x.startswith("python -m trainer ")]


def test_readme_shows_a_command_for_each_strategy() -> None:
    shown = {word for command in trainings() for word in command if "--strategy" in word}
    assert shown == {"--strategy=mirrored", "--strategy=multiworker", "--strategy=ps"}


@pytest.mark.parametrize("argv", trainings(), ids=" ".join)
def test_command_of_the_readme_trains_on_a_machine_that_has_no_data(
    argv: list[str], tmp_path: Path
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    with Process((*argv, "--train_steps=20"), tmp_path, cwd=tmp_path) as process:
        run = process.wait()
        assert run.exit_code == 0, process.output()
    (model_dir,) = (tmp_path / "runs").iterdir()
    assert (model_dir / "result.json").exists()
    assert (tmp_path / "datasets" / "digits" / "features.json").exists()


def test_check_of_the_readme_starts_nothing_and_says_where_variables_would_be(
    tmp_path: Path,
) -> None:
    (argv,) = [command for command in commands() if "--check" in command]
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    with Process(tuple(argv), tmp_path, cwd=tmp_path) as process:
        run = process.wait()
    assert run.exit_code == 0, run.stderr
    assert re.search(r"^ps 1: [\d,]+ bytes", run.stdout, re.MULTILINE)
    assert not (tmp_path / "runs").exists()


def test_terminals_of_the_readme_train_together(digits: Path, tmp_path: Path) -> None:
    ports = iter(free_ports(3))
    hosts = re.search(r'export HOSTS="(.*)"', README)
    assert hosts is not None
    local = re.sub(r"host-\w:2222", lambda _: f"localhost:{next(ports)}", hosts[1])
    model_dir = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        terminals = []
        for command in commands():
            if "--job_name" not in " ".join(command):
                continue
            line = " ".join(command).replace("$HOSTS", local)
            line = line.replace("/shared/run", str(model_dir)).replace(
                "/shared/digits", str(digits)
            )
            argv = (*line.split(), "--train_steps=20", "--num_threads=1")
            terminals.append(stack.enter_context(Process(argv, model_dir)))
        runs = [terminal.wait_alone() for terminal in terminals]
        assert [run.exit_code for run in runs] == [0, 0, 0], terminals[-1].output()
    assert runs[-1].result["step"] >= 20


def test_loop_in_the_readme_is_the_loop() -> None:
    (quoted,) = blocks("python")
    assert quoted.strip() == inspect.getsource(train).strip()


def test_tree_in_the_docs_has_every_file_and_no_other() -> None:
    tree = (ROOT / "docs" / "tree.md").read_text()
    named = set(re.findall(r"\b[\w/]+\.py\b", tree))
    for name in named:
        here = [name, *(f"{folder}/{name}" for folder in ("strategies", "data"))]
        assert any((ROOT / path).exists() for path in here), name
    for folder in ("trainer", "strategies", "data"):
        files = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
        assert files - {Path(name).name for name in named} == set()
