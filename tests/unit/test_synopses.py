"""The synopsis at the head of each module uses names and arguments that exist."""

import ast
import builtins
import collections
import contextlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = {"tf", "np", "keras", "flags", "coordinator", *sys.stdlib_module_names}
ATTRIBUTES = {name for kind in (str, bytes, list, dict, np.ndarray) for name in dir(kind)}

Definitions = dict[str, list[ast.AST]]


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


def definitions(tree: ast.AST) -> Definitions:
    """All names that `tree` binds, in any scope, with the nodes that bind them."""
    found: Definitions = collections.defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name].append(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id].append(node)
        elif isinstance(node, ast.arg):
            found[node.arg].append(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[(alias.asname or alias.name).partition(".")[0]].append(node)
    return found


def keywords_of(node: ast.AST) -> set[str] | None:
    """The names of a function's or a class's arguments; None if they cannot be known."""
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                return keywords_of(member)
        if node.bases:
            return None
        fields = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
        return {field.id for field in fields if isinstance(field, ast.Name)}
    if isinstance(node, ast.FunctionDef) and node.args.kwarg is None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return {argument.arg for argument in arguments}
    return None


DEFINITIONS = {module: definitions(tree) for module, tree in MODULES.items()}
ALL_NAMES = {name for found in DEFINITIONS.values() for name in found}


def faults(ours: Definitions, synopsis: ast.Module) -> Iterator[str]:
    """What a synopsis of the module that defines `ours` uses, and the code does not have."""
    known = ALL_NAMES | definitions(synopsis).keys() | set(dir(builtins))
    for node in ast.walk(synopsis):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if alias.name not in DEFINITIONS[node.module] and submodule not in MODULES:
                    yield f"{node.module} has no {alias.name}"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        root, _, path = ast.unparse(node.func).partition(".")
        if root in FOREIGN:
            continue
        name = path.rpartition(".")[2] if path else root
        if name not in (known | ATTRIBUTES if path else known):
            yield f"there is no {name}"
        keywords = [keywords_of(definition) for definition in ours.get(name, [])]
        for keyword in node.keywords:
            if keywords and not any(k is None or keyword.arg in k for k in keywords):
                yield f"{name} has no argument {keyword.arg}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_synopsis_uses_names_and_arguments_that_exist(module: str) -> None:
    found = [
        fault
        for synopsis in synopses(MODULES[module])
        for fault in faults(DEFINITIONS[module], synopsis)
    ]
    assert not found


def test_faults_of_a_synopsis_are_found() -> None:
    ours = DEFINITIONS["data.order"]
    for synopsis, fault in (
        ("from data.order import Disorder", "data.order has no Disorder"),
        ("Order(batches=7)", "Order has no argument batches"),
        ("Order(batch_size=7, first_batch=1)", "Order has no argument first_batch"),
        ("order = Order(batch_size=7)\norder.recordings(3)", "there is no recordings"),
        ("order.assign_sub(3)", "there is no assign_sub"),
        ("replica_lanes(4, 0, replicas=2)", "replica_lanes has no argument replicas"),
    ):
        assert list(faults(ours, ast.parse(synopsis))) == [fault]
    assert sum(bool(list(synopses(tree))) for tree in MODULES.values()) > 40
