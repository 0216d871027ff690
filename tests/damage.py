"""Damage to files, as disks and networks do it."""

from pathlib import Path


def flip_bit(path: Path, at: int) -> None:
    """Flips the lowest bit of the byte at `at`, counted from the end if it is negative."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
