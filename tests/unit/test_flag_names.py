"""A flag of one name means the same in every command, and a former name is refused with the new."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.commands import ROOT, run_python

ABOUT_RECORDS = "Directory with TFRecord files"


class Flag(NamedTuple):
    command: str
    name: str
    kind: str
    meaning: str

    @property
    def subject(self) -> str:
        """The meaning up to what differs from command to command, such as the default."""
        return re.split("[.,;:]", self.meaning)[0].split(" of the ")[0].split(" that ")[0]


def commands() -> list[str]:
    """The modules that are run with flags of absl: `trainer`, `data.prepare`, ..."""
    found = []
    starts = r"^ +(app\.run|run_tool|run_from_command_line)\("
    for folder in ("trainer", "data", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            _, is_main, code = path.read_text().partition('if __name__ == "__main__":')
            if is_main and re.search(starts, code, re.MULTILINE):
                module = path.relative_to(ROOT).with_suffix("").parts
                found.append(".".join(part for part in module if part != "__main__"))
    return found


# Prints the flags of each command, in forks of a process that has imported what many of them need.
HELP = """
import os, runpy, sys
from trainer.tf_setup import import_tensorflow
import_tensorflow()
for command in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv = [command, "--helpxml"]
        try:
            runpy.run_module(command, run_name="__main__", alter_sys=True)
        except SystemExit:
            sys.stdout.flush()
            os._exit(0)  # A normal exit would first delete all that TensorFlow has made.
    os.wait()
"""


@pytest.fixture(scope="module")
def flags() -> list[Flag]:
    printed = run_python("-c", HELP, *commands(), check=True).stdout
    documents = re.split("(?=<.xml)", printed)[1:]
    named = zip(commands(), documents, strict=True)
    return [flag for command, document in named for flag in flags_of(command, document)]


def flags_of(command: str, document: str) -> Iterator[Flag]:
    for flag in ElementTree.fromstring(document).iter("flag"):
        text = {child.tag: child.text or "" for child in flag}
        if not text["file"].startswith("absl"):
            meaning = " ".join(text["meaning"].split())
            yield Flag(command, text["name"], text["type"], meaning)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["trainer", "trainer.predict", "data.prepare", "data.inspect"])
def test_help_is_no_mistake(command: str) -> None:
    done = run_python("-m", command, "--no_such_flag", "-h" if "." in command else "--help")
    assert done.returncode == 0, done.stderr
    assert "--" in done.stdout


@pytest.mark.slow
def test_flag_of_one_name_has_one_type_and_one_meaning(flags: list[Flag]) -> None:
    by_name: dict[str, list[Flag]] = {}
    for flag in flags:
        by_name.setdefault(flag.name, []).append(flag)
    shared = {name: found for name, found in by_name.items() if len(found) > 1}
    assert {"data_dir", "model_dir", "num_examples", "split"} <= shared.keys()
    for name, found in shared.items():
        assert len({flag.kind for flag in found}) == 1, f"--{name}: {found}"
        assert len({flag.subject for flag in found}) == 1, f"--{name}: {found}"


def test_directory_with_records_is_always_data_dir(flags: list[Flag]) -> None:
    assert {flag.name for flag in flags if ABOUT_RECORDS in flag.meaning} == {"data_dir"}
    data_dirs = {flag.command for flag in flags if flag.name == "data_dir"}
    assert {"trainer", "trainer.evaluate", "trainer.predict", "data.prepare"} <= data_dirs
    assert "data.inspect" in data_dirs


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("data.prepare", "digits", "--out", "datasets/a"), "write --data_dir"),
        (("trainer", f"--config={ROOT}/configs/digits.py", "--bind_cores=on"), "--cpu_affinity"),
    ],
)
def test_former_spelling_names_the_new(tmp_path: Path, argv: tuple[str, ...], message: str) -> None:
    done = run_python("-m", *argv, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is written"
