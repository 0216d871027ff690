"""Help of the command line: the fields of the config, shell completion, names of runs."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_python
from trainer.config import Config, flatten, load_recipe, overridden_fields
from trainer.flags import DEFINED
from trainer.flags.config_help import MOST_USED
from trainer.flags.start import changes

STRATEGIES = ("mirrored", "multiworker", "ps")


def trainer(*flags: str) -> str:
    return run_python("-m", "trainer", *flags, check=True).stdout


@pytest.fixture(scope="module")
def script() -> str:
    return trainer("--completion=bash")


def help_text(word: str) -> str:
    """What `word` prints; it needs no package that takes long to import, and no config."""
    argv = ("-X", "importtime", "-m", "trainer", "--config=not-there.py", word)
    done = run_python(*argv, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "absl.flags" in imported
    assert not imported & {"tensorflow", "keras", "numpy", "trainer.cli"}
    return done.stdout


def test_full_help_describes_each_flag_and_each_field_of_the_config() -> None:
    text = help_text("--helpfull")
    assert set(re.findall(r"^  --(?:\[no\])?(\w+):", text, re.MULTILINE)) >= DEFINED
    described = re.findall(r"^  --config\.([\w.]+)=.*\n    \S", text, re.MULTILINE)
    assert described == list(flatten(Config()))


def test_short_help_has_each_flag_once_in_groups_the_most_used_first() -> None:
    text = help_text("--help")
    assert "--config.batch_size" in text
    names = re.findall(r"^  --(?!config\.|helpfull)(\w+)=?", text, re.MULTILINE)
    assert names[:8] == list(MOST_USED)
    assert sorted(names) == sorted(DEFINED)
    groups = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert groups == ["used most", "start", "run", "cluster", "parameter servers", "config"]
    assert text.index("\nparameter servers:") < text.index("--sync_replicas")
    assert len(text.splitlines()) < 140


def complete(script: str, line: str) -> list[str]:
    """What bash offers after `line`; it divides words at "=", too."""
    words = re.findall(r"=|[^\s=]+", line) + ([""] if line.endswith((" ", "=")) else [])
    quoted = " ".join(f"'{word}'" for word in words)
    program = f"""
        {script}
        COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}
        _tf_distribution_trainer {words[0]}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("python -m trainer --strategy", [f"--strategy={name}" for name in STRATEGIES]),
        ("python -m trainer --strategy=m", ["mirrored", "multiworker"]),
        ("tf-distribution-trainer --sync", ["--sync_replicas"]),
        ("python -m trainer --config.clip.glob", ["--config.clip.global_norm="]),
        ("python -m trainer --strategy=ps --batch", ["--batch_size="]),
        ("tf-distribution-trainer --config=dig", ["digits"]),
        ("python other.py --strat", []),
    ],
)
def test_bash_completes_flags_values_and_fields(script: str, line: str, offered: list[str]) -> None:
    assert complete(script, line) == offered


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_other_lines_of_python_are_completed_as_before(script: str) -> None:
    former = "_former() { COMPREPLY=(former); }\ncomplete -F _former python\n"
    assert complete(former + script, "python other.py --strat") == ["former"]
    twice = f"FUNCNEST=100\n{former}{script}\n{script}"  # As if a shell reads its .bashrc again.
    assert complete(twice, "python other.py --strat") == ["former"]
    assert complete(former + script, "python -m trainer --sync") == ["--sync_replicas"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("python -m trainer --strategy=m", ["--strategy=mirrored", "--strategy=multiworker"]),
        ("tf-distribution-trainer --sync", ["--sync_replicas"]),
        ("python other.py --strat", []),
    ],
)
def test_fish_completes_flags_and_values(line: str, offered: list[str], tmp_path: Path) -> None:
    program = f"{trainer('--completion=fish')}\ncomplete -C '{line}'"
    command = ["fish", "--no-config", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)  # No files.
    assert [each.split("\t")[0] for each in done.stdout.splitlines()] == offered, done.stderr


def test_zsh_gets_the_same_script(script: str) -> None:
    first, _, rest = trainer("--completion=zsh").partition("\n")
    assert "bashcompinit" in first
    assert rest == script


def test_name_of_a_run_says_what_was_changed() -> None:
    recipe = load_recipe("digits")
    assert changes(recipe) == []
    fields: Any = {"batch_size": 128, "learning_rate": 1e-5, "optimizer": "sgd"}
    others: Any = {"train_steps": 7, "data_dir": "/x", "log_every_steps": 3}
    config = dataclasses.replace(recipe.config, **fields, **others)
    recipe = dataclasses.replace(recipe, config=config)
    assert changes(recipe) == ["batch_size=128", "optimizer=sgd", "learning_rate=1e-05"]
    assert {"data_dir", "log_every_steps", "optimizer"} < set(overridden_fields(recipe))


def test_value_in_the_name_of_a_run_is_complete_or_left_out() -> None:
    recipe = load_recipe("digits")
    recipe.config.learning_rate, recipe.config.freeze = 0.12345678, "block_1|" * 5
    recipe.config.schedule.warmup_steps = 100
    words = changes(recipe)
    assert words == ["learning_rate=0.12345678", "freeze", "schedule.warmup_steps=100"]


@pytest.mark.parametrize("config", [["--config=digits"], ["--config", "digits"]])
def test_field_may_come_before_its_config(config: list[str]) -> None:
    program = "import sys; from trainer.flags import CONFIG, STRATEGY, parsing; "
    program += "parsing.parse_words(sys.argv); print(CONFIG.value.batch_size, STRATEGY.value)"
    words = ["--config.batch_size=7", "--strategy=ps", *config, "--workers=3"]
    done = run_python("-c", program, *words)
    assert done.stdout == "7 ps\n", done.stderr
