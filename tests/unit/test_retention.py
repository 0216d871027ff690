"""Which checkpoints a save removes: one row for each rule."""

from typing import Any

import pytest

from trainer.checkpoints.retention import Chain, outdated


def name_of(text: str) -> str:
    """`7` is step-00000007, and `b7` is best-00000007."""
    return f"{'best' if text[0] == 'b' else 'step'}-{int(text.lstrip('b')):08d}"


def chains_of(text: str) -> dict[str, Chain | None]:
    """`9` is complete, `9!` has a damaged mark, and `9<3<6` needs 3, and 6 after it.

    In `9<3?` another checkpoint is at the place of 3.
    """
    chains: dict[str, Chain | None] = {}
    for item in text.split():
        own, *needs = item.split("<")
        name = name_of(own.rstrip("!"))
        others = {name_of(n.rstrip("?")): "other" if "?" in n else n for n in needs}
        chains[name] = None if "!" in own else {**others, name: own}
    return chains


@pytest.mark.parametrize(
    ("there", "options", "removed"),
    [
        ("1 2 3 4", {"keep": 2}, "1 2"),
        ("1 2", {"keep": 2}, ""),
        ("4", {"keep": 1}, ""),
        ("b2 b3 3 4", {"keep": 1}, "3"),
        # The one just written is one of those that stay, wherever its step is.
        ("3 4 7 9", {"keep": 1, "just_written": "4"}, "3 7 9"),
        ("3 4 7 9", {"keep": 3, "just_written": "4"}, "3"),
        # It was deleted meanwhile, or its mark cannot be read now.
        ("3 4 7", {"keep": 1, "just_written": "9"}, ""),
        ("", {"keep": 1, "just_written": "9"}, ""),
        # Damaged marks do not count.
        ("3 5! 7 8", {"keep": 3}, "5"),
        ("3 5! 7 8", {"keep": 2}, "5 3"),
        # Later ones that a restart skipped do not count, though their marks are right.
        ("3 7 8 9", {"keep": 3, "resumed": 7, "just_written": "8"}, "9"),
        ("3 4 7 9", {"keep": 1, "resumed": 3, "just_written": "4"}, "7 9 3"),
        ("3 7 8 9", {"keep": 9, "resumed": 7, "just_written": "8", "verified": "8 9"}, ""),
        ("3! 2", {"keep": 2, "resumed": 0, "just_written": "2"}, "3"),
        # Later ones belong to another process.
        ("10 20 30", {"keep": 1, "just_written": "20", "is_shared": True}, "10"),
        ("10 20 30!", {"keep": 1, "just_written": "20", "is_shared": True}, "10"),
        ("10 20 30", {"keep": 2, "just_written": "20", "is_shared": True, "resumed": 0}, "10"),
        # What others need stays.
        ("3 6<3 9<3<6", {"keep": 1}, ""),
        ("3 6<3 9<3<6 12", {"keep": 1}, "3 6 9"),
        ("b6<3 3 6<3 9<3<6 12", {"keep": 1}, "6 9"),
        ("3! 6<3", {"keep": 1}, ""),
        ("b3<3 3! 6", {"keep": 1}, ""),
        ("4 7<4 8 9", {"keep": 1, "resumed": 4, "unreadable": "7"}, "8"),
        ("4 7<4 8 9", {"keep": 1, "resumed": 4}, "7 8 4"),
        # A damaged base damages all that need it: a second one stays, with its chain.
        ("3 6<3 9<3<6 12 15<12 18<12<15", {"keep": 2}, ""),
        ("1 2<1 3 6<3 9<3<6 12 15<12 18<12<15", {"keep": 2}, "1 2"),
        ("3 6<3 9<3<6 12 15<12 18<12<15", {"keep": 1}, "3 6 9"),
        ("3 6<3 12 15<12", {"keep": 3}, ""),
        # What needs a damaged one goes when all that stay are newer: the storage may answer later.
        ("3! 6<3 9", {"keep": 1}, "3 6"),
        ("3 6<3? 9", {"keep": 2}, ""),
        ("3 6<3? 9", {"keep": 1}, "6 3"),
        ("3! 6<3 9<3<6", {"keep": 2}, ""),
    ],
)
def test_checkpoints_that_are_removed(there: str, options: dict[str, Any], removed: str) -> None:
    chains = chains_of(there)
    just_written = options.pop("just_written", "") or there.split()[-1].partition("<")[0]
    found = outdated(
        chains,
        name_of(just_written),
        verified=set(map(name_of, options.pop("verified", just_written).split())),
        unreadable=set(map(name_of, options.pop("unreadable", "").split())),
        resumed_step=options.pop("resumed", 99),
        **options,
    )
    assert found == list(map(name_of, removed.split()))
