"""The synopsis at the head of each module uses names and arguments that exist."""

import ast
import builtins
import contextlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = {"tf", "np", "keras", "coordinator"}
DEFINITION = (ast.FunctionDef, ast.ClassDef)


def modules() -> dict[str, ast.Module]:
    """Every module of the packages, parsed."""
    found = {}
    for package in ("trainer", "strategies", "data", "configs"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(), str(path))
    return found


MODULES = modules()


def synopses(tree: ast.Module) -> Iterator[ast.Module]:
    """The indented blocks of a module's docstring that are Python."""
    block: list[str] = []
    for paragraph in [*(ast.get_docstring(tree) or "").split("\n\n"), ""]:
        if paragraph.startswith("    "):
            block.append(paragraph)
            continue
        with contextlib.suppress(SyntaxError):  # A command, or a drawing.
            yield ast.parse(textwrap.dedent("\n\n".join(block)))
        block = []


def names_in(tree: ast.AST) -> set[str]:
    """All names that the code of `tree` defines or uses."""
    fields = ("name", "asname", "id", "attr", "arg")
    found = (getattr(node, field, None) for node in ast.walk(tree) for field in fields)
    return {name for name in found if isinstance(name, str)}


def keywords_of(node: ast.AST) -> set[str] | None:
    """The names of a function's or a class's arguments; None if they cannot be known."""
    parts = list(ast.walk(node))
    if getattr(node, "bases", None) or any(isinstance(n, ast.arguments) and n.kwarg for n in parts):
        return None
    fields = [n.target for n in parts if isinstance(n, ast.AnnAssign)]
    arguments = {n.arg for n in parts if isinstance(n, ast.arg)}
    return arguments | {field.id for field in fields if isinstance(field, ast.Name)}


NAMES = {module: names_in(tree) for module, tree in MODULES.items()}
ALL_NAMES = set().union(*NAMES.values(), dir(builtins), sys.stdlib_module_names)


def faults(module: str, synopsis: ast.Module) -> Iterator[str]:
    """What a synopsis of `module` uses, and the code does not have."""
    bound = {n.name for n in ast.walk(synopsis) if isinstance(n, DEFINITION)}
    for node in ast.walk(synopsis):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if alias.name not in NAMES[node.module] and submodule not in MODULES:
                    yield f"{node.module} has no {alias.name}"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        path = ast.unparse(node.func).split(".")
        name = path[-1]
        if path[0] not in FOREIGN and name not in ALL_NAMES | bound:
            yield f"there is no {name}"
        nodes = [n for n in ast.walk(MODULES[module]) if isinstance(n, DEFINITION)]
        keywords = [keywords_of(node) for node in nodes if node.name == name]
        for keyword in node.keywords:
            if keywords and not any(k is None or keyword.arg in k for k in keywords):
                yield f"{name} has no argument {keyword.arg}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_synopsis_uses_names_and_arguments_that_exist(module: str) -> None:
    found = [fault for synopsis in synopses(MODULES[module]) for fault in faults(module, synopsis)]
    assert not found


def test_faults_of_a_synopsis_are_found() -> None:
    for synopsis, fault in (
        ("from data.order import Disorder", "data.order has no Disorder"),
        ("Order(batches=7)", "Order has no argument batches"),
        ("order = Order(batch_size=7)\norder.recordings(3)", "there is no recordings"),
        ("replica_lanes(4, 0, replicas=2)", "replica_lanes has no argument replicas"),
    ):
        assert list(faults("data.order", ast.parse(synopsis))) == [fault]
    assert sum(bool(list(synopses(tree))) for tree in MODULES.values()) > 40
