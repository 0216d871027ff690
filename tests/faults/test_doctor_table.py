"""Faults that `python -m trainer.doctor` must name, and healthy clusters that it must not blame.

A row of FAULTS disturbs the second of three hosts of `multiworker`, if it does not say otherwise.
test_doctor.py has more faults: other code, another port, a silent host, a slow sender, a link that
drops large packets, and a directory that is not shared.
"""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.hosts import Host, dropped, hosts, silent
from tests.cluster.hosts import named, needs_hosts
from tests.cluster.runs import CONFIGS, ROOT, Process
from tests.faults.test_doctor import end, start
from trainer.guards.run_lock import locked

pytestmark = [pytest.mark.nightly, needs_hosts]

PORT = 2222
OLD_RUN = ROOT / "tests" / "cluster" / "old_runs" / "mirrored"


@dataclasses.dataclass
class Doctor:
    """How the doctor of one task is started."""

    host: Host
    listed: list[str]  # --hosts, as this task has it.
    flags: dict[str, str]
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    under: tuple[str, ...] = ()
    starts: bool = True

    def start(self, stack: contextlib.ExitStack) -> Process:
        argv = [f"--{name}={value}" for name, value in self.flags.items()]
        under = (*self.host.command, *self.under)
        cluster = f"--hosts={','.join(self.listed)}"
        flags = (cluster, *argv, "--json", "--num_threads=1")
        return start(stack, *flags, under=under, env=self.env)


class Scene(NamedTuple):
    """The doctors of all tasks, that of worker 1, a directory, and what ends with the test."""

    doctors: list[Doctor]
    one: Doctor
    directory: Path
    stack: contextlib.ExitStack

    @property
    def others(self) -> list[Host]:
        return [doctor.host for doctor in self.doctors if doctor is not self.one]


Disturb = Callable[[Scene], object]


def flag(name: str, value: str) -> Disturb:
    """Worker 1 has another value of a flag."""
    return lambda scene: scene.one.flags.update({name: value})


def all_flags(name: str, value: str) -> Disturb:
    return lambda scene: [doctor.flags.update({name: value}) for doctor in scene.doctors]


def python(code: str) -> Disturb:
    """Worker 1's Python runs `code` when it starts."""

    def disturb(scene: Scene) -> None:
        (scene.directory / "sitecustomize.py").write_text(code)
        scene.one.env["PYTHONPATH"] = str(scene.directory)

    return disturb


def package(name: str, version: str) -> Disturb:
    """Worker 1 finds another version of an installed package first."""

    def disturb(scene: Scene) -> None:
        metadata = scene.directory / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        scene.one.env["PYTHONPATH"] = str(scene.directory)

    return disturb


def other_config_file(scene: Scene) -> None:
    path = scene.directory / "digits.py"
    path.write_text((ROOT / "configs" / "digits.py").read_text() + "# Changed.\n")
    scene.one.flags["config"] = str(path)


def another_program(scene: Scene) -> None:
    """Serves at the address of worker 1, which is not started."""
    command = (*scene.one.host.command, sys.executable, "-m", "http.server", str(PORT))
    server = scene.stack.enter_context(
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    )
    scene.stack.callback(server.kill)
    scene.one.starts = False


def unknown_name(scene: Scene) -> None:
    for doctor in scene.doctors:
        doctor.listed[1] = f"no-such-host:{PORT}"
    scene.one.starts = False


def slow_receiver(scene: Scene) -> None:
    shape = ("root", "tbf", "rate", "20mbit", "burst", "256kb", "latency", "200ms")
    command = ["tc", "qdisc", "replace", "dev", scene.one.host.link, *shape]
    subprocess.run(command, check=True, capture_output=True)


def read_only(scene: Scene) -> None:
    place = scene.directory / "place"
    place.mkdir()
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    scene.one.under = ("unshare", "--mount", "sh", "-c", script, str(place))
    scene.one.flags["model_dir"] = f"{place}/run"


def used_by_another_run(scene: Scene) -> None:
    scene.stack.enter_context(locked(scene.one.flags["model_dir"], 0.0, print))


def small_disk(scene: Scene) -> None:
    place = scene.directory / "place"
    place.mkdir()
    options = ("-t", "tmpfs", "-o", "size=64k", "tmpfs")
    subprocess.run(["mount", *options, str(place)], check=True)
    scene.stack.callback(subprocess.run, ["umount", "--lazy", str(place)], check=True)
    all_flags("model_dir", f"{place}/run")(scene)


def outgoing_port(scene: Scene) -> None:
    setting = "net.ipv4.ip_local_port_range=2000 60000"
    command = [*scene.one.host.command, "sysctl", "--write", setting]
    subprocess.run(command, check=True, capture_output=True)


def former_run(scene: Scene) -> None:
    """A run of batches of 48 examples."""
    shutil.copytree(OLD_RUN, scene.one.flags["model_dir"])
    all_flags("config.batch_size", "16")(scene)


def damaged_data(scene: Scene) -> None:
    data = scene.directory / "data"
    shutil.copytree(scene.one.flags["data_dir"], data)
    shard = max(data.glob("*train*"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-100])
    scene.one.flags["data_dir"] = str(data)


def cut_link(scene: Scene) -> None:
    scene.stack.enter_context(scene.one.host.link_down())


def silent_pair(scene: Scene) -> None:
    scene.stack.enter_context(silent(scene.one.host, scene.others[0]))


def one_way(scene: Scene) -> None:
    """Nothing that worker 1 sends arrives; it hears all others."""
    directions = [(scene.one.host, other) for other in scene.others]
    scene.stack.enter_context(dropped(*directions))


def other_order(scene: Scene) -> None:
    first, second, third = scene.one.listed
    scene.one.listed[:] = [first, third, second]


# The words of the finding, and what is wrong.
FAULTS: dict[str, tuple[str, Disturb]] = {
    "other Python": (
        "python is 3.10 there",
        python("import platform\nplatform.python_version_tuple = lambda: ('3', '10', '1')\n"),
    ),
    "other Keras": ("keras is 3.1.0 there", package("keras", "3.1.0")),
    "other config file": ("config file is another one", other_config_file),
    "other batch size": ("--config.batch_size is another", flag("config.batch_size", "32")),
    "other wire": ("--wire_dtype is another", flag("wire_dtype", "bfloat16")),
    "other order": ("(it is worker 2)", other_order),
    "fewer hosts": ("it was started with worker 2 at None", lambda scene: scene.one.listed.pop()),
    "absent": ("nothing listens at that port", lambda scene: setattr(scene.one, "starts", False)),
    "another program": ("another program serves there", another_program),
    "unknown name": ("the name of its host is unknown", unknown_name),
    "cut link": ("its host does not answer", cut_link),
    "silent pair": ("did not come from worker 0", silent_pair),
    "one way": ("its host does not answer", one_way),
    "slow receiver": ("it receives", slow_receiver),
    "other clock": (
        "its clock differs by +90",
        python("import time\nreal = time.time\ntime.time = lambda: real() + 90\n"),
    ),
    "read-only directory": ("this user cannot write to", read_only),
    "used directory": ("is in use: ", used_by_another_run),
    "small disk": ("the checkpoints of a run need", small_disk),
    "other run": ("batch_size: 48 there", former_run),
    "no data": ("no-such-directory", flag("data_dir", "/no-such-directory")),
    "damaged data": ("it was cut short", damaged_data),
    "outgoing port": ("for outgoing connections", outgoing_port),
    "death in the sum": (
        "A worker was lost",
        python(
            "import os, sys\n"
            "def profile(frame, event, _):\n"
            "    if event == 'call' and frame.f_code.co_name == 'check_devices':\n"
            "        os._exit(2)\n"
            "def hook(event, args):\n"
            "    if event == 'import' and args[0] == 'trainer.doctor.devices':\n"
            "        sys.setprofile(profile)\n"
            "sys.addaudithook(hook)\n"
        ),
    ),
}
# What all tasks share, and an error of the sum, are named at worker 0.
SHARED = ("used directory", "small disk", "other run", "death in the sum")


@contextlib.contextmanager
def scene_of(num_hosts: int, digits: Path, tmp_path: Path, **flags: str) -> Iterator[Scene]:
    directory = tmp_path / "scene"
    directory.mkdir()
    usual = {
        "strategy": "multiworker",
        "model_dir": str(tmp_path / "run"),
        "data_dir": str(digits),
        "deadline_secs": "150",
        **flags,
    }
    with hosts(num_hosts) as places, contextlib.ExitStack() as stack:
        listed = [f"{place.address}:{PORT}" for place in places]
        doctors = [Doctor(place, list(listed), dict(usual)) for place in places]
        for place in places:
            place.limit_rate("400mbit")
        yield Scene(doctors, doctors[1], directory, stack)


def printed(scene: Scene, *exit_codes: int) -> list[str]:
    """Runs the doctors; what each prints."""
    processes = [doctor.start(scene.stack) for doctor in scene.doctors if doctor.starts]
    limit_secs = max(float(doctor.flags["deadline_secs"]) for doctor in scene.doctors) + 60
    return [end(process, *exit_codes, limit_secs=limit_secs) for process in processes]


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named_with_its_task(name: str, digits: Path, tmp_path: Path) -> None:
    words, disturb = FAULTS[name]
    with scene_of(3, digits, tmp_path) as scene:
        disturb(scene)
        found = json.loads(printed(scene, 0, 2)[0])["findings"]
    named_at = {finding["task"] for finding in found if words in finding["text"]}
    assert named_at, found
    assert name in SHARED or named_at == {"worker 1"}, found


def two_paths(scene: Scene) -> None:
    """Worker 1 has an equal config file at another path."""
    path = scene.directory / "digits.py"
    shutil.copy(ROOT / "configs" / "digits.py", path)
    scene.one.flags["config"] = str(path)


def by_name(scene: Scene) -> None:
    names = {f"node-{i}": doctor.host for i, doctor in enumerate(scene.doctors)}
    scene.stack.enter_context(named(names))
    for doctor in scene.doctors:
        doctor.listed = [f"{name}:{PORT}" for name in names]


def proxies(scene: Scene) -> None:
    for doctor in scene.doctors:
        doctor.env["https_proxy"] = "http://localhost:9"  # Nothing listens there.


def slow_links(scene: Scene) -> None:
    for doctor in scene.doctors:
        doctor.host.limit_rate("50mbit")


def nothing(scene: Scene) -> None:
    pass


PS = {"strategy": "ps"}
HEALTHY: dict[str, tuple[int, dict[str, str], Disturb]] = {
    "two workers": (2, {}, nothing),
    "four workers": (4, {}, nothing),
    "ps": (3, PS | {"ps": "1"}, nothing),
    "two ps, synchronous": (4, PS | {"ps": "2", "sync_replicas": "true"}, nothing),
    "equal config files": (3, {}, two_paths),
    "names": (3, {}, by_name),
    "proxies": (2, {}, proxies),
    "slow links": (3, {}, slow_links),
    "large model": (2, {"config": str(CONFIGS / "large.py")}, nothing),
    "16-bit gradients": (3, {"wire_dtype": "bfloat16"}, nothing),
}


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Keeps the cores busy with `number` processes."""
    command = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        yield


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_cluster_on_busy_cores_has_no_finding(
    name: str, digits: Path, tmp_path: Path
) -> None:
    number, flags, arrange = HEALTHY[name]
    flags = {**flags, "deadline_secs": "900"}
    with scene_of(number, digits, tmp_path, **flags) as scene, busy(10):
        arrange(scene)
        for output in printed(scene, 0):
            assert json.loads(output)["findings"] == []
