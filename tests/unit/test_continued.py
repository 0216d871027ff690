"""`--model_dir=RUN` alone continues a run, with the settings in its config.json."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import pytest

from tests.cluster.runs import ROOT
from tests.commands import run_python
from tests.unit.test_cluster_sources import INDEXED_JOB, SLURM
from trainer.config import Config, ConfigError, flatten_as, load_recipe, recipe_of_run, to_json
from trainer.flags.continued import Settings, print_next, settings_of_run

DIGITS = str(ROOT / "configs" / "digits.py")
FLAGS = ["--strategy=ps", "--workers=3", "--sync_replicas"]


def write_run(directory: Path, recipe: str = DIGITS, flags: Any = FLAGS, **fields: Any) -> str:
    config = json.loads(to_json(load_recipe(DIGITS).config)) | fields
    document = {"strategy": "ps", "recipe": recipe, "data_dir": "/data/digits", "config": config}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**document, "flags": flags}))
    return f"--model_dir={directory}"


def continued(*words: str) -> Settings:
    found = settings_of_run(["trainer", *words])
    assert found
    return found


def test_settings_are_the_config_file_the_fields_and_the_flags(tmp_path: Path) -> None:
    schedule = {"kind": "step", "boundaries": [3, 5], "values": [0.1, 0.2, 0.3]}
    given = write_run(tmp_path / "run", batch_size=32, schedule=schedule)
    config, fields, flags = continued(given)
    assert config == DIGITS
    assert fields["batch_size"] == 32
    assert fields["schedule.boundaries"] == (3, 5)
    assert fields["data_dir"] == "/data/digits"
    assert flags == FLAGS


def test_what_is_typed_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = write_run(tmp_path / "run")
    assert "--workers=3" not in continued("--strategy=mirrored", given).flags
    same = continued("--strategy=ps", given).flags
    assert same == FLAGS[1:], "the strategy is what it was"
    assert settings_of_run(["trainer", given, f"--config={DIGITS}"]) is None
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}}')
    words = continued(given).flags
    assert "--sync_replicas" in words
    assert "--workers=3" not in words, "it is for a cluster on this machine"


def test_scheduler_of_many_tasks_says_how_many_workers_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = write_run(tmp_path / "run", flags=["--strategy=ps", "--workers=3", "--ps=2"])

    def sizes(*words: str) -> list[str]:
        continued = settings_of_run(["trainer", given, *words])
        assert continued
        return [word for word in continued.flags if word.startswith(("--workers", "--ps"))]

    def set_all(environment: dict[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    assert sizes() == ["--workers=3", "--ps=2"]
    assert sizes("--hosts=a,b") == ["--ps=2"]
    set_all(SLURM)
    assert sizes() == ["--ps=2"]
    assert sizes("--cluster=local") == ["--workers=3", "--ps=2"]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert sizes() == ["--workers=3", "--ps=2"], "a single task starts a cluster on its machine"
    monkeypatch.delenv("SLURM_JOB_ID")
    set_all(INDEXED_JOB)
    assert sizes() == ["--workers=3", "--ps=2"], "a pod does not know how many there are"


def test_new_directory_and_missing_config_file(tmp_path: Path) -> None:
    new = f"--model_dir={tmp_path / 'new'}"
    assert settings_of_run(["trainer", new]) is None
    given = write_run(tmp_path / "run", recipe="/gone.py")
    with pytest.raises(ConfigError, match=r"/gone\.py, which does not exist any more"):
        continued(given)


def test_recipe_of_a_run_has_the_config_of_the_run(tmp_path: Path) -> None:
    given = write_run(tmp_path / "run", batch_size=32, class_weight={0: 2.0})
    document = json.loads((tmp_path / "run" / "config.json").read_text())
    document["config"]["lost"] = 3  # A field of another version.
    config = recipe_of_run(document).config
    assert (config.batch_size, config.data_dir) == (32, "/data/digits")
    assert config.class_weight == {0: 2.0}
    assert continued(given).fields["class_weight"] == {0: 2.0}


OWN = """
from dataclasses import dataclass, field
from trainer.config import Config

@dataclass
class Own(Config):
    act: str | None = "x"
    sizes: tuple[int, ...] | None = (1,)
    rate: float | None = 0.5
    names: list = field(default_factory=lambda: ["a"])
    tag: object = 3

get_config, build_model = Own, print
"""


def test_continued_run_has_the_values_that_were_recorded_and_what_is_typed(
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "own.py"
    recipe.write_text(OWN)
    # The defaults of the file were others when the run began.
    recorded = {"act": None, "sizes": None, "rate": None, "names": ["b", "c"], "tag": "None"}
    given = write_run(tmp_path / "run", str(recipe), [], **recorded, seed=5, train_steps=70)
    program = "import sys; from trainer.flags import CONFIG, parsing, checks; "
    program += "parsing.parse_words(sys.argv); config = checks.read_recipe().config; "
    program += f"print([getattr(config, name) for name in {list(recorded)}], config.seed, "
    program += "config.train_steps, sys.argv[1:])"
    typed = [given, "--config.seed=7", "--config.rate=0.25", "--train_steps=90"]
    done = run_python("-c", program, *typed)
    values = [None, None, 0.25, ["b", "c"], "None"]
    assert done.stdout == f"{values} 7 90 {typed}\n", done.stderr


@dataclass
class Group:
    by_float: dict[float, int] = field(default_factory=dict)
    optional: Optional[dict[int, float]] = None  # noqa: UP045  # Users may write it so.
    ranges: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"x": (1, 2)})
    numbers: list[int] = field(default_factory=list)
    pairs: tuple[Any, ...] = ()
    cleared: int | None = 3


@dataclass
class OwnConfig(Config):
    group: Group = field(default_factory=Group)
    now_a_group: Group = field(default_factory=Group)
    once_a_group: int = 4


def test_values_of_a_run_have_the_types_of_the_config() -> None:
    stored = {
        "by_float": {"0.5": 2},
        "optional": {"3": 1.5},
        "ranges": {"x": [1, 2]},
        "numbers": [1, 2],
        "pairs": [[1, 2], [3]],
        "cleared": None,
    }
    document = {"group": stored, "now_a_group": 3, "once_a_group": {"x": 1}, "unknown": 1}
    assert flatten_as(OwnConfig(), document) == {
        "group.by_float": {0.5: 2},
        "group.optional": {3: 1.5},
        "group.ranges": {"x": (1, 2)},
        "group.numbers": [1, 2],
        "group.pairs": ((1, 2), (3,)),
        "group.cleared": None,
    }


@pytest.mark.parametrize(
    ("exit_code", "line"),
    [
        (75, "continue: python -m trainer --model_dir='{}'\n"),
        (
            0,
            "next: python -m trainer.evaluate '{0}'   or: python -m trainer.report '{0}'   "
            "or: tensorboard --logdir='{0}'\n",
        ),
        (1, ""),
        (2, ""),
    ],
)
def test_last_line_says_what_to_type(
    exit_code: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "a run"
    print_next(exit_code, str(directory))
    assert capsys.readouterr().out == "", "nothing was trained"
    write_run(directory)
    print_next(exit_code, str(directory))
    assert capsys.readouterr().out == line.format(directory)
