"""Which checkpoints are removed after a save.

    for name in outdated(chains, "step-00001000", keep=3, verified={"step-00001000"}):
        store.remove(name)

A chain has the checkpoints that together hold the tables of one, the oldest first and that one
last, with the checksums of their marks: another checkpoint of the same name may take a place.
Nothing here reads a file or imports TensorFlow.
"""

from collections.abc import Collection, Mapping
from typing import TypeAlias

from trainer.run_files import step_in

Chain: TypeAlias = Mapping[str, str]


def outdated(
    chains: Mapping[str, Chain | None],
    just_written: str,
    *,
    keep: int,
    verified: Collection[str],
    unreadable: Collection[str] = (),
    resumed_step: int = 0,
    is_shared: bool = False,
) -> list[str]:
    """Returns the names of the checkpoints to remove, in this order.

    The first row that applies decides:

    | checkpoint | removed |
    | --- | --- |
    | best-*, or `unreadable`; with `is_shared` also steps after the one just written | no |
    | in the chain of a best-*, an `unreadable`, the one just written, or one that stays | no |
    | its mark is damaged; or after `resumed_step` and not `verified`: a restart skipped it | yes |
    | complete | if `keep` newer ones stay; but the newest one of another base stays, too |
    | it needs a checkpoint that is damaged or cannot be read now | if all that stay are newer |

    The base is the first of a chain: if it is damaged, so are all checkpoints that need it.

    Args:
        chains: All checkpoints in the order of their steps; None if the mark cannot be read.
        just_written: It is one of the `keep`, even if others are newer. If it is not in `chains`,
            as it was deleted meanwhile or cannot be read now, nothing is removed.
        keep: The number of newest checkpoints that stay.
        verified: The checkpoints that this process wrote or read completely.
        unreadable: Those that the storage failed to read: they may be complete.
        resumed_step: The step from which this process continued.
        is_shared: Another process may write later checkpoints at the same time.
    """
    if just_written not in chains:
        return []
    always = {name for name in chains if name.startswith("best-") or name in unreadable}
    needed = {need for name in {*always, just_written} for need in chains[name] or ()}
    checksums = {name: chain[name] for name, chain in chains.items() if chain}
    complete: dict[str, Chain] = {}
    damaged, incomplete = [], []
    for name, chain in chains.items():
        is_later = is_shared and step_in(name) > step_in(just_written)
        if name in always or is_later:
            continue
        was_skipped = step_in(name) > resumed_step and name not in verified
        if chain is None or was_skipped:
            damaged.append(name)
        elif all(checksums.get(need) == checksum for need, checksum in chain.items()):
            complete[name] = chain
        else:
            incomplete.append(name)
    others = [name for name in complete if name != just_written]
    old = others[: max(0, len(others) + 1 - keep)]
    staying = [name for name in complete if name not in old]
    bases = {next(iter(complete[name])) for name in staying}
    if keep > 1 and len(bases) == 1:
        staying += [name for name in old if next(iter(complete[name])) not in bases][-1:]
    unneeded_damaged = [name for name in damaged if name not in needed]
    needed.update(*(complete[name] for name in staying))
    too_old = [n for n in incomplete if staying and step_in(n) < step_in(staying[0])]
    return unneeded_damaged + [name for name in [*too_old, *old] if name not in needed]
