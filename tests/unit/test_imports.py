"""Packages import in one direction, without cycles."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("trainer", "strategies", "data", "configs")
FORBIDDEN = {
    "data": {"trainer", "strategies", "configs"},
    "strategies": {"trainer", "configs"},
    "trainer": {"configs"},
    "configs": set[str](),
}


def modules() -> dict[str, ast.Module]:
    """Every module of the packages, parsed."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(), str(path))
    return found


MODULES = modules()


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules that `tree` imports when it is run, in functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else node.module
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            yield from imports(ast.Module(node.orelse, []))
        else:
            yield from imports(node)


def cycle_from(start: str, graph: dict[str, set[str]]) -> list[str] | None:
    """A path of imports from `start` back to `start`."""
    paths, seen = [[start]], set[str]()
    while paths:
        path = paths.pop()
        for module in sorted(graph[path[-1]]):
            if module == start:
                return [*path, start]
            if module not in seen:
                seen.add(module)
                paths.append([*path, module])
    return None


def test_all_modules_are_looked_at() -> None:
    assert {"trainer.loop", "strategies.base", "data.tfrecord.split", "data.tickets"} <= set(
        MODULES
    )
    assert "numpy" in set(imports(MODULES["data.order"]))
    assert "data.order" in set(imports(MODULES["data.reader"]))
    # In a function; and for types alone.
    assert "data.autograph" in set(imports(MODULES["data.features"]))
    source = "if TYPE_CHECKING:\n    import data.order\nelse:\n    import data.reader"
    assert list(imports(ast.parse(source))) == ["data.reader"]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_in_one_direction(package: str) -> None:
    violations = [
        f"{module} imports {imported}"
        for module, tree in MODULES.items()
        if module.partition(".")[0] == package
        for imported in imports(tree)
        if imported.partition(".")[0] in FORBIDDEN[package]
    ]
    assert not violations


def test_no_modules_import_each_other() -> None:
    graph = {
        module: {imported for imported in imports(tree) if imported in MODULES}
        for module, tree in MODULES.items()
    }
    cycles = [cycle for module in graph if (cycle := cycle_from(module, graph))]
    assert not cycles, "\n".join(" -> ".join(cycle) for cycle in cycles)
