"""The public interface of Python: documented names are the names, and the import is cheap."""

import dataclasses
import re
from pathlib import Path

import pytest

import trainer
from tests.cluster.runs import ROOT
from tests.commands import run_python
from trainer.api.arguments import parsed, recipe_named, split_arguments, words_and_values
from trainer.config import Config
from trainer.flags.checks import read_recipe


def test_documented_names_are_the_public_names() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    (section,) = re.findall(r"^## Public names\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(documented) == sorted(trainer.__all__)
    for name in trainer.__all__:
        assert getattr(trainer, name).__name__ == name
        assert getattr(trainer, name).__doc__


def test_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        trainer.trane  # noqa: B018  # The access is what is tested.


def test_import_loads_neither_tensorflow_nor_flags() -> None:
    code = "import sys, trainer; print({'tensorflow', 'keras', 'absl', 'numpy'} & set(sys.modules))"
    assert run_python("-c", code, check=True).stdout == "set()\n"


def test_types_are_announced() -> None:
    for package in ("data", "strategies", "trainer"):
        assert (ROOT / package / "py.typed").exists()


def test_arguments_become_flags_and_fields() -> None:
    from trainer import flags

    assert flags.STRATEGY.name == "strategy"  # The flags are declared.
    arguments = {
        "strategy": "ps",
        "train_steps": 5,
        "verbose": True,
        "model_dir": None,
        "export": False,
        "data": {"lanes": 8, "inputs": ["a", "b"]},
        "class_weight": {0: 2.0},
        "data.shuffle": False,
    }
    words, values = words_and_values(arguments, Config())
    assert values == {}
    assert words == [
        "--strategy=ps",
        "--train_steps=5",
        "--verbose=True",
        "--config.export=False",
        "--config.data.lanes=8",
        "--config.data.inputs=('a', 'b')",
        "--config.class_weight={0: 2.0}",
        "--config.data.shuffle=False",
    ]


@dataclasses.dataclass
class Own(Config):
    act: str | None = "x"
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])


def test_none_is_not_given_to_fields_whose_type_has_no_none() -> None:
    arguments: dict[str, object] = {
        "act": None,
        "seed": None,
        "config.seed": None,
        "names": None,
        "class_weight": None,
        "clip": None,
        "data": {"label": None, "lanes": 8},
        "data.inputs": None,
        "ratee": None,
    }
    words, values = words_and_values(arguments, Own())
    assert values == {"act": None}
    assert words == ["--config.data.lanes=8", "--ratee=None"], "what is unknown must be refused"
    functions, others = split_arguments({"build_model": None, "check": None, "seed": None})
    assert (functions, others) == ({}, {"check": None, "seed": None})


def test_none_that_the_field_has_already_is_given_to_a_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from tests.unit.test_public_names import Own as get_config\nbuild_model = print"
    )
    calls: list[list[str]] = []
    monkeypatch.setattr("trainer.api.training.run_command", calls.append)
    trainer.train(str(file), strategy="ps", names=["a"], seed=None, clip=None)
    assert calls == [[f"--config={file}", "--strategy=ps"]]
    with pytest.raises(trainer.UsageError, match="cannot be given to the processes"):
        trainer.train(str(file), strategy="ps", act=None)


def test_values_that_no_text_means_are_set_in_the_config() -> None:
    arguments: dict[str, object] = {"config.act": None, "seed": 1, "names": [], "batch_size": None}
    words, values = words_and_values(arguments, Own())
    assert values == {"act": None, "names": []}
    assert words == ["--config.seed=1"]
    with recipe_named(Own(), {"build_model": print}) as target:
        with parsed([f"--config={target}"], {"act": None, "names": ["b"]}):
            config = read_recipe().config
            assert isinstance(config, Own)
            assert (config.act, config.names) == (None, ["b"])
        with (
            parsed([f"--config={target}"], {"data.label": None}),
            pytest.raises(trainer.UsageError, match=r"config\.data\.label must be of type str"),
        ):
            read_recipe()
