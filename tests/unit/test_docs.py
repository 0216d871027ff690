"""The documents agree with the code, with each other, and in both languages."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import keras
import pytest

from data.prepare.preparing import prepare
from data.prepare.sources import Options
from trainer.config import Config, flatten, load_recipe
from trainer.preflight import preflight

ROOT = Path(__file__).resolve().parents[2]
ENGLISH = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CHINESE = (ROOT / "README.zh.md", *sorted((ROOT / "docs" / "zh").glob("*.md")))
# Fields that a config file of the documents adds to Config.
FIELDS = {*flatten(Config()), "hidden_units", "width", "dropout", "epsilon", "FIELD"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> list[tuple[str, str]]:
    """The language and the text of each code block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def prose(path: Path) -> str:
    """The document without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    """The links to files that do not exist, and to headings that a file does not have."""
    broken = []
    for link in re.findall(r"\]\(([^)]*)\)", prose(path)):
        if re.match(r"https?:", link):
            continue
        name, _, section = link.partition("#")
        target = path.parent / name if name else path
        if not target.is_file() or (section and section not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", [*ENGLISH, *CHINESE], ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    assert broken_links(path) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](#no-title) [c](page.md) [d](no.md#a-title)")
    assert broken_links(page) == ["#no-title", "no.md#a-title"]


def test_each_document_is_in_the_index() -> None:
    for start, *documents in (ENGLISH, CHINESE):
        index = (documents[0].parent / "README.md").read_text()
        rows = re.findall(r"^\| \[\w+\.md\]\((\w+\.md)\)", index, re.MULTILINE)
        assert set(rows) == {path.name for path in documents} - {"README.md"}
        assert start.name in index


@pytest.mark.parametrize("path", [*ENGLISH, *CHINESE], ids=name_of)
def test_names_in_the_text_exist(path: Path) -> None:
    """Flags, config fields, files of this repository, and callbacks of Keras, in `code`."""
    spans = re.findall(r"`([^`]+)`", prose(path))
    wrong = [span for span in spans for _ in unknown_names(span)]
    assert wrong == []


def flags_of_this_repository() -> set[str]:
    """The flags that any file defines; each command has its own."""
    texts = [path.read_text() for top in PACKAGES for path in (ROOT / top).rglob("*.py")]
    define = r'(?:DEFINE_\w+\(\s*"|add_argument\(\s*"--)(\w+)"'
    return {name for text in texts for name in re.findall(define, text)}


PACKAGES = ("trainer", "strategies", "data", "benchmarks", "tests")
KNOWN_FLAGS = {
    *flags_of_this_repository(),
    *Options._fields,  # Of data.prepare.
    *("config", "help", "helpfull", "FLAG"),
    *("train_dir", "log_dir", "checkpoint_dir", "max_steps"),  # Of TensorFlow 1 programs.
    "nproc_per_node",  # Of torchrun.
    "distribution",  # Of srun.
    "logdir",  # Of tensorboard.
    "noheader",  # absl's negation of --header.
}


def unknown_names(span: str) -> Iterator[str]:
    for flag in re.findall(r"(?<![\w-])--(?!config\.)(\w+)", span):
        if flag not in KNOWN_FLAGS:
            yield flag
    for field in re.findall(r"(?<![\w.])(?:--)?config\.([\w.]*\w)", span):
        groups = {known.rpartition(".")[0] for known in FIELDS}
        if field not in FIELDS | groups | {"json", "py"}:
            yield field
    is_path = re.fullmatch(rf"({'|'.join(PACKAGES)}|configs|docs)(/[\w.]+)+/?", span)
    if is_path and not (ROOT / span).exists():
        yield span
    for name in re.findall(r"keras\.callbacks\.(\w+)", span):
        if not hasattr(keras.callbacks, name):
            yield name


@pytest.mark.parametrize(
    "span", ["--no_such_flag", "config.no_such_field", "trainer/no_such_file.py"]
)
def test_unknown_names_are_found(span: str) -> None:
    assert list(unknown_names(span))


# tests/cluster/test_readme.py trains the code of these two files.
TRAINED = ("README.md", "your_own.md")
PYTHON = [
    (path, code)
    for path in ENGLISH
    for language, code in blocks(path)
    if language == "python" and path.name not in TRAINED
]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of docs/embeddings.md, by its command."""
    directory = tmp_path_factory.mktemp("data")
    rows = [f"{i}|{i + 1}|{i + 2},Drama|Science Fiction,{i % 2}" for i in range(300)]
    lines = ["tags,genres,clicked", *rows, "7,Drama,1", ",,0"]
    (directory / "films.csv").write_text("\n".join(lines))
    options = Options(label="clicked", lists="tags,genres")
    prepare("csv:films", str(directory / "films"), str(directory / "films.csv"), options)
    return directory / "films"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "code"), PYTHON, ids=[f"{path.stem}-{i}" for i, (path, _) in enumerate(PYTHON)]
)
def test_code_fits_the_real_api(
    path: Path,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    digits: Path,
    films: Path,
) -> None:
    """Executes each block. A complete config is checked as `--check` does, with real data."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"block_of_{path.stem}.py"
    file.write_text(code)
    module = load(file)
    if not (hasattr(module, "get_config") and hasattr(module, "build_model")):
        return
    recipe = load_recipe(str(file))
    recipe.config.data_dir = str(films if recipe.config.dataset == "films" else digits)
    if recipe.build_hooks:
        for hook in recipe.build_hooks(recipe.config, str(tmp_path)):
            hook.begin(0)
    preflight(recipe, str(tmp_path / "run"))


def in_chinese(path: Path) -> Path:
    return ROOT / "README.zh.md" if path == ENGLISH[0] else ROOT / "docs" / "zh" / path.name


def test_each_document_has_a_translation() -> None:
    assert {in_chinese(path) for path in ENGLISH} == set(CHINESE)


def essence(language: str, code: str) -> str:
    """What must be equal in both languages: comments and explanations may be translated."""
    if language == "sh":
        lines = [line for line in code.splitlines() if line[0] != "#"]
        return "\n".join(line.partition(" #")[0].rstrip() for line in lines)
    if language == "text":
        return "\n".join(line.split()[0] for line in code.splitlines() if line.strip())
    return code


@pytest.mark.parametrize("path", ENGLISH, ids=name_of)
def test_both_languages_have_the_same_commands_and_code(path: Path) -> None:
    here, there = blocks(path), blocks(in_chinese(path))
    assert [language for language, _ in here] == [language for language, _ in there]
    for (language, ours), (_, theirs) in zip(here, there, strict=True):
        assert essence(language, theirs) == essence(language, ours)


@pytest.mark.parametrize("path", ENGLISH, ids=name_of)
def test_both_languages_have_the_same_headings_rows_and_names(path: Path) -> None:
    """Counts headings and rows of tables, and compares flags and config fields."""
    here, there = prose(path), prose(in_chinese(path))
    for start in ("\n#", "\n| "):
        assert here.count(start) == there.count(start), start
    names = r"--\w[\w.]*|config\.\w[\w.]*\w"
    assert set(re.findall(names, here)) == set(re.findall(names, there))


def test_images_are_those_of_the_script() -> None:
    images = ROOT / "docs" / "images"
    drawn = load(images / "draw.py").files()
    assert drawn == {path.name: path.read_text() for path in images.glob("*.svg")}


def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """`make docs` runs the same command. It follows links and anchors in both languages."""
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    load(ROOT / "docs" / "images" / "draw.py")  # Perhaps its byte code is written.
    site = tmp_path / "site"
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(site)))
    for name in ("contents.html", "start.html", "zh/start.html", "zh/how_it_works.html"):
        assert (site / name).is_file()
    assert '<h1 id="three-minutes">' in (site / "index.html").read_text()
    assert '<h1 id="三分钟">' in (site / "zh/index.html").read_text()
    assert '<span class="kn">import</span>' in (site / "notebook.html").read_text()
    assert '[data-bs-theme="dark"] .codehilite .kn' in (site / "css/code.css").read_text()
    assert not [*site.rglob("*.py*")]
