"""A network namespace: who can connect, the identity of processes inside, and its end.

Skipped, with the kernel's reason, if this user cannot make one.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from strategies.cluster.ports import free_ports
from tests.unit.stand_ins import namespace_or_skip
from trainer.api.arguments import parsed
from trainer.flags.checks import read_recipe
from trainer.local.launching import _network_needed
from trainer.local.network_namespace import Namespace

ROOT = Path(__file__).parents[2]
NOBODY = 65534
LISTEN = """
import socket, sys
with socket.create_server(("localhost", int(sys.argv[1]))) as server:
    print("listens", flush=True)
    server.accept()
"""
CONNECT = "import socket, sys; socket.create_connection(('localhost', int(sys.argv[1]))).close()"


@pytest.mark.parametrize("flag", ["model_dir", "data_dir", "config.warm_start.path"])
def test_tasks_that_read_or_write_at_a_url_need_the_network(flag: str) -> None:
    for place, needed in (("runs/a", ""), ("gs://bucket/a", "gs://bucket/a")):
        with parsed(["--config=configs/digits.py", f"--{flag}={place}"]):
            assert _network_needed(read_recipe()) == needed


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with namespace_or_skip() as namespace:
        yield namespace


def takes_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def started(namespace: Namespace, *argv: str) -> subprocess.Popen[bytes]:
    """A process of Python inside."""
    command = namespace.command([sys.executable, "-c", *argv])
    return subprocess.Popen(command, pass_fds=namespace.fds, stdout=subprocess.PIPE)


def test_port_inside_accepts_connections_only_from_inside(namespace: Namespace) -> None:
    (port,) = free_ports(1)
    with started(namespace, LISTEN, str(port)) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"listens\n"
        for host in ("127.0.0.1", "::1", socket.gethostname()):
            assert not takes_connections(host, port)
        assert server.poll() is None, "a connection came from outside"
        # The server listened all the time.
        with started(namespace, CONNECT, str(port)) as client:
            assert client.wait(10) == 0
        assert server.wait(10) == 0


def test_process_and_user_are_the_same_inside(namespace: Namespace, tmp_path: Path) -> None:
    program = "import os, sys; open(sys.argv[1], 'w').write(f'{os.getpid()} {os.geteuid()}')"
    made = tmp_path / "made"
    with started(namespace, program, str(made)) as process:
        assert process.wait(10) == 0
    assert made.read_text() == f"{process.pid} {os.geteuid()}"
    assert made.stat().st_uid == os.geteuid()


def test_no_process_keeps_the_namespace_alive(namespace: Namespace) -> None:
    print_inode = "import os; print(os.stat('/proc/self/ns/net').st_ino)"
    ours = os.stat("/proc/self/ns/net").st_ino
    inside, _ = started(namespace, print_inode).communicate()
    assert int(inside) != ours
    assert os.fstat(namespace.fds[-1]).st_ino == int(inside)
    namespaces = {p.stat().st_ino for p in Path("/proc").glob("[0-9]*/ns/net") if os.access(p, 4)}
    assert int(inside) not in namespaces, "a process keeps it alive"


def test_user_without_rights_keeps_identity_and_files() -> None:
    """Root needs no user namespace, so root becomes another user here."""
    interpreter = next(filter(None, map(shutil.which, ("/usr/bin/python3", sys.executable))), "")
    program = f"""
import os, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from trainer.local.network_namespace import open_namespace
with open_namespace() as namespace:
    assert len(namespace.fds) == 2, "no user namespace"
    subprocess.run(namespace.command(["touch", sys.argv[1]]), pass_fds=namespace.fds, check=True)
"""
    as_user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        made = Path(directory) / "made"
        try:
            run = subprocess.run(
                [interpreter, "-c", program, str(made)],
                cwd=directory,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                **as_user,  # type: ignore[call-overload]
            )
        except PermissionError:
            pytest.skip(f"user {NOBODY} may not run {interpreter}")
        if "IsolationError" in run.stderr or "Permission denied" in run.stderr:
            pytest.skip(run.stderr.splitlines()[-1])
        assert run.returncode == 0, run.stderr
        assert made.stat().st_uid == (NOBODY if as_user else os.geteuid())
