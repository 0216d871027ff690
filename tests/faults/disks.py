"""Mounts small file systems, for tests of full and read-only disks."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(*command: str, at: Path) -> Iterator[None]:
    """Mounts a file system at `at` while the context lasts; skips the test without that right."""
    result = subprocess.run(["mount", *command, str(at)], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"needs the right to mount: {result.stderr.strip()}")
    try:
        yield
    finally:
        # Lazily: a process that has been killed may hold it a moment longer.
        subprocess.run(["umount", "-l", str(at)], check=True)
