"""Hosts leave and join a run of multiworker, and the others go on with the same weights."""

import contextlib
from pathlib import Path

import pytest

from benchmarks.hosts import dropped, hosts, num_dropped
from strategies.cluster.ports import free_ports
from tests.cluster.elastic import Launchers, difference_from, flags_for, group
from tests.cluster.hosts import needs_hosts
from tests.cluster.runs import Run, TrainOnce, assert_same_bits, train

STEPS = 600
FLAGS = flags_for(STEPS)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def undisturbed(train_once: TrainOnce) -> Run:
    return train_once("mirrored-2", *FLAGS)


def launchers_of(
    stack: contextlib.ExitStack, model_dir: Path, number: int, *flags: str, rejoin_secs: int = 6
) -> tuple[Launchers, list[str]]:
    """The launchers of `number` hosts, none of them started yet, and their addresses."""
    addresses = [f"localhost:{port}" for port in free_ports(number)]
    flags = (*FLAGS, "--min_workers=1", f"--rejoin_secs={rejoin_secs}", *flags)
    return Launchers(stack, model_dir, ",".join(addresses), flags), addresses


def grown(stack: contextlib.ExitStack, model_dir: Path, number: int, *flags: str) -> Launchers:
    """A run that host 1 has begun, and `number` hosts continue."""
    launchers, _ = launchers_of(stack, model_dir, number, *flags)
    launchers.start(1)
    launchers.wait_for_group(1)
    launchers.start(0, *range(2, number))
    launchers.wait_for_group(number)
    return launchers


def test_1_then_3_then_1_then_2_workers_train_to_the_same_weights(
    undisturbed: Run, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        launchers = grown(stack, model_dir, 3)
        launchers.kill(0, 1)  # With the chief.
        launchers.wait_for_group(1)
        launchers.start(1)
        launchers.wait_for_group(2)
        launchers.finish(STEPS)
    assert difference_from(undisturbed, model_dir) < 1e-5


@pytest.mark.nightly
def test_virtual_replicas_have_the_bits_of_one_process_on_1_then_4_then_2_then_4_workers(
    tmp_path: Path,
) -> None:
    same_bits = "--config.virtual_replicas=4"
    flags = (*FLAGS, same_bits, "--config.pause_secs=0")
    alone = train("mirrored-1", tmp_path / "alone", *flags)
    model_dir = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        launchers = grown(stack, model_dir, 4, same_bits)
        launchers.kill(0)  # The chief: three are left, of which two train.
        launchers.wait_for_group(2)
        launchers.start(0)
        launchers.wait_for_group(4)
        launchers.finish(STEPS)
    assert difference_from(alone, model_dir) == 0
    assert_same_bits(Run(0, "", "", model_dir), alone)


@pytest.mark.nightly
def test_host_that_was_frozen_while_another_took_over_does_no_harm(
    undisturbed: Run, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        launchers, addresses = launchers_of(stack, model_dir, 2)
        launchers.start(0)
        launchers.wait_for_group(1)
        frozen = launchers.on[0].family()
        for process in frozen:
            process.suspend()
        launchers.start(1)
        other = launchers.on[1]
        other.wait_until(lambda: group(model_dir) == addresses[1:], "a group without host 0")
        other.wait_for_more_steps(40)
        # Its task continues: it needs no other host. Its next call of the executor is its last one.
        for process in frozen:
            process.resume()
        launchers.on[0].wait_until(lambda: launchers.on[0].warned("asks to join") > 0, "the news")
        launchers.wait_for_group(2)
        launchers.finish(STEPS)
    assert difference_from(undisturbed, model_dir) < 1e-5


@pytest.mark.nightly
def test_host_that_returns_with_another_config_is_refused_and_the_run_continues(
    undisturbed: Run, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        launchers, addresses = launchers_of(stack, model_dir, 2, rejoin_secs=60)
        launchers.start(0, 1)
        launchers.on[0].wait_for_step(20)
        launchers.kill(1)
        launchers.start(1, flags=("--learning_rate=0.004",))
        refused = launchers.on.pop(1).wait_alone()
        assert refused.exit_code == 2, refused.stderr
        said = f"already trains on {addresses[0]}, with other code or another config"
        assert said in refused.stderr
        launchers.start(1)
        launchers.on[0].wait_for_more_steps(20)
        launchers.finish(STEPS)
    assert difference_from(undisturbed, model_dir) < 1e-5


@pytest.mark.nightly
@needs_hosts
def test_hosts_continue_without_a_host_that_is_cut_off_and_take_it_in_again(
    undisturbed: Run, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(hosts(3))
        listed = ",".join(host.address for host in places)
        under = tuple(host.command for host in places)
        elastic = ("--min_workers=2", "--rejoin_secs=10")
        launchers = Launchers(stack, model_dir, listed, (*FLAGS, *elastic), under)
        launchers.start(2, 0, 1)
        launchers.on[0].wait_for_step(40)
        assert group(model_dir) == []
        # Host 0 has the chief. It still reaches the directory of the run, and tries to train.
        lost = [(places[0], other) for other in places[1:]]
        with dropped(*lost):
            launchers.wait_for_group(2)
            assert group(model_dir) == [f"{host.address}:2222" for host in places[1:]]
            assert num_dropped(*lost) > 0
        launchers.wait_for_group(3)
        launchers.finish(STEPS)
    assert difference_from(undisturbed, model_dir) < 1e-5
