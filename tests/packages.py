"""The packages that an installation of this project has, without installing it.

installed_with({"dev"})       # names of all that `pip install '.[dev]'` brings
pins()                        # name -> version in constraints.txt
"""

import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    """Name -> version, of all packages in constraints.txt."""
    lines = re.findall(
        r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    return {canonicalize_name(name): version for name, version in lines}


def installed_with(extras: Iterable[str] = ()) -> set[str]:
    """Names of the packages that the project needs with `extras`, also indirectly.

    A package that is not installed here has an unknown need, and so it is the last of its chain.
    """
    found: set[tuple[str, str]] = set()
    waiting = [(PROJECT["name"], extra) for extra in ("", *extras)]
    while waiting:
        package, extra = waiting.pop()
        for required in _required(package, extra):
            name = canonicalize_name(required.name)
            new = {(name, wanted) for wanted in ("", *required.extras)} - found
            found |= new
            waiting += new
    return {name for name, _ in found} - {PROJECT["name"]}


def _required(package: str, extra: str) -> Iterator[Requirement]:
    """The direct requirements of `package` with `extra`, or without extras if that is ""."""
    if package == PROJECT["name"]:  # The file, and not what an older installation says.
        lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    else:
        try:
            lines = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            return
    for required in map(Requirement, lines):
        if required.marker is None or required.marker.evaluate({"extra": extra}):
            yield required
