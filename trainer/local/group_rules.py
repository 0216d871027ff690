"""Which hosts train together when some are lost and others come: pure functions, no files.

    sightings = Sightings(own=0)
    sightings.update(snapshot, group)            # for each snapshot of the records of all hosts
    members = next_members(group, sightings, rules)      # None: the group stays as it is

Hosts are numbers, their places in --hosts. A group is a set of hosts with a generation, a number
that grows with each change. Before the first change the group has all hosts.

| the hosts | next group |
| --- | --- |
| all members are there and reach each other | the same, with the hosts that are ready to join |
| a member is away, for less than `rejoin_secs` | no change: the members wait for it |
| a member is away for `rejoin_secs` | without it, with all hosts that ask to join |
| all members are away for `rejoin_secs` | the hosts that ask to join |
| fewer than `min_workers` would be left | no change |
| under ps: the launcher of a worker has ended itself | at once without it |
| under ps: a host with a ps is away | the others wait for it |
| three of four hosts are left, with `powers_of_two` | two of them; the third waits for a fourth |

A host is ready to join when a checkpoint was completed since it asked, or if the group did not
train when it asked. Hosts that do not reach each other cannot train together: of two parts the
larger one continues; of two equal parts, the part without the last host.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# A host whose record has not changed for this long is away. Records change about every second.
SILENT_SECS = 5.0
# The longest time that one snapshot adds. A launcher that was frozen has not seen what others did.
_MOST_SECS_PER_SNAPSHOT = 2.5


class Group(NamedTuple):
    """The hosts that train together. Generation 0 has all hosts, and is not written down."""

    generation: int
    members: frozenset[int]


class HostRecord(NamedTuple):
    """The record that the launcher of a host writes about every second.

    `start` is different for each start of the launcher; `beat` grows. `reaches` are the hosts that
    it could connect to. `ended` is the exit code of the launcher; None while it runs. `identity` is
    a hash of the code and the config.
    """

    start: str
    beat: int
    reaches: frozenset[int]
    ended: int | None = None
    identity: str = ""


class Snapshot(NamedTuple):
    """All records at a time of the reading launcher's monotonic clock, in seconds."""

    time: float
    records: Mapping[int, HostRecord]
    saved_step: int  # Of the newest complete checkpoint.


class Rules(NamedTuple):
    """`--min_workers` and `--rejoin_secs`; under ps also the hosts with a ps task.

    The group always has the hosts of `servers`, which are no workers: it waits for them.
    With `powers_of_two`, as config.virtual_replicas needs it without servers, a group has a power
    of two of hosts: those that are left out wait.
    """

    min_workers: int
    rejoin_secs: float
    servers: frozenset[int] = frozenset()
    powers_of_two: bool = False


@dataclass
class Sightings:
    """The state of all hosts, as one launcher has seen it so far. Only its own clock counts.

    Attributes:
        identity: Of the record of host `own`.
        saves_regularly: False if there are no checkpoints to wait for.
        present: The hosts whose launchers run with the code and config of this one.
        others: The hosts whose launchers run with another code or config.
        core: The members of the group that can train together now.
        away_secs: For each member, how long it has not been in `core`.
        waiting: The present hosts that are not in the group.
        ready: The waiting hosts that may join without another reason for a change.
        left: The hosts whose launchers have ended themselves since the first snapshot.
        is_done: True if a launcher has ended with 0 since the first snapshot: the run is complete.
    """

    own: int
    identity: str = ""
    saves_regularly: bool = True
    present: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    core: frozenset[int] = frozenset()
    away_secs: dict[int, float] = field(default_factory=dict)
    waiting: frozenset[int] = frozenset()
    ready: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    is_done: bool = False

    def __post_init__(self) -> None:
        self._last_time: float | None = None
        self._last_seen: dict[int, tuple[str, int]] = {}
        self._silent_secs: dict[int, float] = {}
        self._have_run: frozenset[int] = frozenset()
        self._asked_at: dict[int, int] = {}  # The saved step when a host asked to join.
        self._links: frozenset[tuple[int, int]] = frozenset()

    def update(self, snapshot: Snapshot, group: Group) -> None:
        """Takes a new snapshot into account."""
        passed = 0.0 if self._last_time is None else snapshot.time - self._last_time
        secs = min(passed, _MOST_SECS_PER_SNAPSHOT)
        is_first, self._last_time = self._last_time is None, snapshot.time
        for host in snapshot.records.keys() | self._silent_secs.keys():
            record = snapshot.records.get(host)
            # A record that was there in the first snapshot may be of a launcher that is dead.
            if record is None or is_first or record[:2] == self._last_seen.get(host):
                self._silent_secs[host] = self._silent_secs.get(host, SILENT_SECS) + secs
            else:
                self._silent_secs[host] = SILENT_SECS if record.ended is not None else 0.0
                self.is_done |= record.ended == 0
            if record is not None:
                self._last_seen[host] = record[:2]
        self._silent_secs[self.own] = 0.0
        running = frozenset(h for h, s in self._silent_secs.items() if s < SILENT_SECS)
        self._have_run |= running
        self.left = frozenset(
            host
            for host, record in snapshot.records.items()
            if host in self._have_run - running and record.ended is not None
        )
        self.others = frozenset(
            host
            for host, record in snapshot.records.items()
            if host in running - {self.own} and record.identity != self.identity
        )
        self.present = running - self.others
        self._links = frozenset(
            (host, other)
            for host, record in snapshot.records.items()
            if host in self.present
            for other in record.reaches
        )
        self.core = connected(group.members & self.present, self._links)
        self.away_secs = {
            # Silence begins before it is noticed.
            host: self._silent_secs.get(host, 0.0)
            if host in self.core
            else self.away_secs.get(host, 0.0) + secs
            for host in group.members
        }
        self.waiting = self.present - group.members
        trains = self.core == group.members
        for host in self.waiting - self._asked_at.keys():
            self._asked_at[host] = snapshot.saved_step if trains and self.saves_regularly else -1
        for host in self._asked_at.keys() - self.waiting:
            del self._asked_at[host]
        self.ready = frozenset(
            h for h, step in self._asked_at.items() if snapshot.saved_step > step
        )

    def extended(self, core: frozenset[int], others: Iterable[int]) -> frozenset[int]:
        """`core`, plus the hosts in `others` that every member of `core` reaches."""
        if not core:
            return connected(others, self._links)
        for host in sorted(others):
            if connected(core | {host}, self._links) == core | {host}:
                core |= {host}
        return core


def next_members(group: Group, sightings: Sightings, rules: Rules) -> frozenset[int] | None:
    """Returns the members of the next group if this launcher must propose one, else None."""
    kept = frozenset(h for h, secs in sightings.away_secs.items() if secs < rules.rejoin_secs)
    if rules.servers:
        kept = (kept - sightings.left) | rules.servers
    is_complete = kept == group.members
    if is_complete and sightings.core != group.members:
        return None
    able = sightings.extended(sightings.core, sightings.ready if is_complete else sightings.waiting)
    members = kept | able
    if rules.powers_of_two:  # Members stay before others come.
        ranked = sorted(members, key=lambda host: (host not in group.members, host))
        members = frozenset(ranked[: 1 << len(ranked).bit_length() - 1])
    # A host outside the group decides only if no member is left to decide.
    has_say = sightings.own in group.members or not group.members & sightings.present
    if sightings.own not in able or not has_say:
        return None
    if members == group.members or len(members - rules.servers) < rules.min_workers:
        return None
    return members


def connected(hosts: Iterable[int], links: Collection[tuple[int, int]]) -> frozenset[int]:
    """Returns a part of `hosts` in which each host reaches all others.

    Removes the host with the most missing links (the last one of several) until no link is missing.
    """
    left = sorted(hosts)
    while left:
        missing = {
            host: sum((host, o) not in links or (o, host) not in links for o in left if o != host)
            for host in left
        }
        worst = max(left, key=lambda host: (missing[host], host))
        if not missing[worst]:
            break
        left.remove(worst)
    return frozenset(left)
