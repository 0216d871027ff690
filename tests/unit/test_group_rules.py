"""Who trains together, from records and times alone: no files, no processes, no clock."""

import itertools

import pytest

from trainer.local.group_rules import (
    SILENT_SECS,
    Group,
    HostRecord,
    Rules,
    Sightings,
    Snapshot,
    connected,
    next_members,
)

RULES = Rules(min_workers=2, rejoin_secs=30.0)


class World:
    """Four hosts whose launchers look about once a second; `alive` and `cut` change meanwhile."""

    def __init__(self, *alive: int, members: frozenset[int] | None = None) -> None:
        self.alive = set(alive)
        self.cut: set[tuple[int, int]] = set()  # From the first to the second.
        self.group = Group(0, members if members is not None else frozenset(range(4)))
        self.saved_step = 100
        self.time = 0.0
        self._starts, self._beats = [0] * 4, [0] * 4
        self.records: dict[int, HostRecord] = {}
        self.identities = [""] * 4
        self.sightings = {host: Sightings(host) for host in range(4)}

    def restart(self, host: int) -> None:
        self.alive.add(host)
        self._starts[host] += 1
        self.sightings[host] = Sightings(host, identity=self.identities[host])

    def reaches(self, host: int) -> frozenset[int]:
        # A connection needs packets in both directions.
        cut = {other for other in range(4) if {(host, other), (other, host)} & self.cut}
        return frozenset(range(4)) - {host} - cut

    def poll(self, secs: float = 1.0, *, frozen: frozenset[int] = frozenset()) -> None:
        self.time += secs
        awake = self.alive - frozen
        for host in awake:
            self._beats[host] += 1
            start = f"{host}-{self._starts[host]}"
            beat, reaches = self._beats[host], self.reaches(host)
            self.records[host] = HostRecord(start, beat, reaches, identity=self.identities[host])
        for host in awake:
            snapshot = Snapshot(self.time, dict(self.records), self.saved_step)
            self.sightings[host].update(snapshot, self.group)

    def wait(self, secs: int) -> None:
        for _ in range(secs):
            self.poll()

    def wishes(self, rules: Rules = RULES) -> dict[int, list[int]]:
        """What each launcher proposes."""
        found = {h: next_members(self.group, self.sightings[h], rules) for h in self.alive}
        return {host: sorted(members) for host, members in found.items() if members is not None}

    def change(self, rules: Rules = RULES) -> None:
        """The first proposal becomes the next group."""
        members = frozenset(next(iter(self.wishes(rules).values())))
        self.group = Group(self.group.generation + 1, members)


def all_there() -> World:
    world = World(0, 1, 2, 3)
    world.wait(3)
    return world


@pytest.mark.parametrize(
    ("lost", "cut", "left"),
    [
        (set(), set(), None),
        ({0}, set(), [1, 2, 3]),  # The chief.
        (set(), {(1, host) for host in range(4)}, [0, 2, 3]),
        # A link that is cut costs one host.
        (set(), {(2, 0)}, [0, 1, 3]),
        (set(), {(0, 2)}, [0, 1, 3]),
        (set(), {(0, 2), (2, 0)}, [0, 1, 3]),
    ],
)
@pytest.mark.parametrize("is_back", [True, False])
def test_host_that_is_away_is_waited_for_and_then_left_out(
    lost: set[int], cut: set[tuple[int, int]], left: list[int] | None, is_back: bool
) -> None:
    world = all_there()
    world.alive -= lost
    world.cut = cut.copy()
    world.wait(28 if is_back else 29)
    assert world.wishes() == {}
    if is_back:
        world.cut.clear()
        for host in lost:
            world.restart(host)
    world.wait(2)
    if left and not is_back:
        assert world.wishes() == dict.fromkeys(left, left)
        world.change()
    world.wait(100)
    assert world.wishes() == {}


def test_group_is_never_smaller_than_min_workers() -> None:
    world = all_there()
    world.alive -= {0, 1, 2}
    world.wait(200)
    assert world.wishes() == {}
    assert world.wishes(RULES._replace(min_workers=1)) == {3: [3]}


def test_first_hosts_begin_when_the_others_do_not_come() -> None:
    world = World(1, 2)
    world.wait(29)
    assert world.wishes() == {}
    world.wait(5)
    assert world.wishes() == {1: [1, 2], 2: [1, 2]}


def test_host_joins_at_the_next_checkpoint() -> None:
    world = World(0, 1, 2, members=frozenset({0, 1, 2}))
    world.wait(5)
    world.restart(3)
    world.wait(50)
    assert world.sightings[0].waiting == {3}
    assert world.wishes() == {}
    world.saved_step = 200
    world.poll()
    assert set(map(tuple, world.wishes().values())) == {(0, 1, 2, 3)}
    assert 3 not in world.wishes(), "members decide"
    world.change()
    world.wait(50)
    assert world.wishes() == {}


def test_host_joins_at_once_if_no_checkpoints_are_saved_or_the_group_does_not_train() -> None:
    world = World(0, 1, members=frozenset({0, 1}))
    world.sightings[0] = Sightings(0, saves_regularly=False)
    world.wait(3)
    world.restart(2)
    world.wait(2)
    assert world.wishes() == {0: [0, 1, 2]}

    world = World(0, members=frozenset({0, 1}))
    world.wait(3)
    world.restart(2)  # While host 1 is missing.
    world.wait(3)
    world.restart(1)
    world.wait(3)
    assert world.wishes()[0] == [0, 1, 2]


def test_waiting_hosts_are_taken_in_when_a_member_is_left_out() -> None:
    world = World(0, 1, 3, members=frozenset({0, 1}))
    world.wait(5)
    world.alive.remove(1)
    world.wait(31)
    assert world.wishes() == {0: [0, 3]}


def test_host_that_some_members_do_not_reach_does_not_join() -> None:
    world = World(0, 1, 2, members=frozenset({0, 1}))
    world.cut = {(2, 1)}
    world.wait(5)
    world.saved_step = 200
    world.wait(100)
    assert world.wishes() == {}
    world.cut.clear()
    world.wait(2)
    assert world.wishes()[0] == [0, 1, 2]


def test_of_two_parts_the_larger_one_continues_and_the_other_waits() -> None:
    world = all_there()
    world.cut = {(0, other) for other in range(4)}
    world.wait(40)
    one = RULES._replace(min_workers=1)
    assert set(map(tuple, world.wishes(one).values())) == {(1, 2, 3)}
    world.change(one)
    world.wait(100)
    assert world.wishes(one) == {}, "host 0 must not train alone"


@pytest.mark.parametrize(("ours", "others"), [((0, 1), (2, 3)), ((1, 2), (0, 3))])
def test_of_two_equal_parts_the_one_without_the_last_host_continues(
    ours: tuple[int, int], others: tuple[int, int]
) -> None:
    world = all_there()
    world.cut = set(itertools.product(ours, others))
    world.wait(40)
    assert world.wishes() == {host: list(ours) for host in ours}
    world.change()
    world.wait(100)
    assert world.wishes() == {}
    world.alive -= set(ours)  # Now for good.
    world.wait(30)
    assert world.wishes() == {host: list(others) for host in others}


def test_launcher_that_was_frozen_blames_no_other_host() -> None:
    world = all_there()
    world.poll(secs=1000.0, frozen=frozenset({1, 2, 3}))  # Host 0 was frozen: it looks first.
    assert max(world.sightings[0].away_secs.values()) < SILENT_SECS
    world.wait(3)
    assert world.wishes() == {}


def test_host_that_is_frozen_is_left_out() -> None:
    world = all_there()
    for _ in range(34):
        world.poll(frozen=frozenset({0}))
    assert world.wishes() == {host: [1, 2, 3] for host in (1, 2, 3)}


def test_records_of_dead_launchers_do_not_count() -> None:
    world = all_there()
    world.alive = set()
    world.restart(0)
    world.poll()
    assert world.sightings[0].present == {0}
    world.wait(3)
    assert world.sightings[0].present == {0}


def test_host_with_another_config_is_not_taken_in() -> None:
    world = World(0, 1, 2, members=frozenset({0, 1, 2}))
    world.identities[3] = "another"
    world.wait(3)
    world.restart(3)
    world.saved_step += 100
    world.wait(40)
    assert world.sightings[0].present == {0, 1, 2}
    assert world.sightings[0].others == {3}
    assert world.sightings[3].others == {0, 1, 2}
    assert world.wishes() == {}


def test_launcher_that_has_ended_is_away_at_once_and_says_if_the_run_is_done() -> None:
    world = all_there()
    for code, is_done in ((75, False), (0, True)):
        world.alive.discard(2)
        world.records[2] = HostRecord("2-end", code, frozenset(), ended=code)
        world.poll()
        assert 2 not in world.sightings[0].present
        assert world.sightings[0].is_done == is_done


def test_connected_leaves_out_as_few_hosts_as_it_finds() -> None:
    everyone = {(a, b) for a in range(5) for b in range(5) if a != b}
    assert connected(range(5), everyone) == frozenset(range(5))
    assert connected(range(5), everyone - {(1, 4)}) == {0, 1, 2, 3}
    assert connected(range(5), {e for e in everyone if 2 not in e}) == {0, 1, 3, 4}
    assert connected([], everyone) == frozenset()
    assert connected([3], ()) == {3}


def test_group_of_virtual_replicas_has_a_power_of_two_of_hosts() -> None:
    rules = RULES._replace(powers_of_two=True)
    world = all_there()
    world.alive.remove(1)
    world.wait(40)
    assert set(map(tuple, world.wishes(rules).values())) == {(0, 2)}
    world.change(rules)
    # Host 3 is left out, and waits until a fourth host is there.
    world.wait(40)
    world.saved_step += 20
    world.wait(5)
    assert world.wishes(rules) == {}
    world.restart(1)
    world.wait(5)
    world.saved_step += 20
    world.wait(5)
    assert set(map(tuple, world.wishes(rules).values())) == {(0, 1, 2, 3)}
