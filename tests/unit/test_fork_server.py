"""Processes of a fork server: their parent, open files, imports and exit codes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, run_python
from tests.unit.stand_ins import is_gone, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has subreapers")

# Run in a subprocess, since a process stays a subreaper until it ends.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path

import psutil

from tests.unit.stand_ins import wait_for
from trainer.local.launching import fork_server
from trainer.local.task_process import TARGET

directory = Path(sys.argv[1])
read, write = os.pipe()

def start(server, *argv, env={}):
    with (directory / "printed").open("w") as file:
        fds = {1: file.fileno(), 2: file.fileno(), 600: write}
        argv = ["--config=" + str(directory / "config.py"), *argv]
        return server.spawn(TARGET, "worker-7", argv, env, fds)

def await_began():
    wait_for((directory / "began").exists, 60)

with fork_server("label") as server:
    others = {process.pid for process in psutil.Process().children()}
    child = start(server, env={"SAID": "to the task"})
    task = psutil.Process(child.pid)
    assert task.ppid() == os.getpid()
    assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
    await_began()
    said, has_tensorflow, drawn, fds = json.loads((directory / "began").read_text())
    assert (said, has_tensorflow, fds) == ("to the task", True, [0, 1, 2, 600]), fds
    assert task.name() == "worker-7", task.name()
    # A fork would miss threads, and the locks that they hold. TensorFlow starts its own with the
    # first op. OpenBLAS, of NumPy, has ended its own before the fork.
    (server_pid,) = others
    # The kernel counts a thread a moment longer than it runs.
    wait_for(lambda: len(os.listdir(f"/proc/{server_pid}/task")) == 1)
    child.wait()
    assert child.wait() == child.returncode == 2, child.returncode
    printed = (directory / "printed").read_text()
    assert "error: " in printed and "train_steps" in printed, printed

    (directory / "began").unlink()
    child = start(server, env={"STAY": "1"})
    await_began()
    _, _, other, _ = json.loads((directory / "began").read_text())
    assert not set(drawn) & set(other), "two tasks draw the same numbers"
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL

    # A child that a task leaves behind is reaped, too.
    child = start(server, env={"LEAVE": "1"})
    child.wait()
    wait_for(lambda: server.reap_orphans(set()) or len(psutil.Process().children()) == 1)

    assert "label" in psutil.Process(server_pid).cmdline()
    # A stopped fork server is killed, so that it cannot start the task later, and replaced.
    server._connection.settimeout(1.0)
    os.kill(server_pid, signal.SIGSTOP)
    assert start(server).wait() == 2
    assert not psutil.pid_exists(server_pid)
    (second,) = psutil.Process().children()
    assert "label" in second.cmdline()
assert psutil.Process().children() == []
print("passed")
"""

# The task, a trainer, executes this: it notes its state, then ends because of a usage error.
CONFIG = """
import json, os, random, sys, time
from pathlib import Path

import numpy as np

from trainer.config import Config

directory = Path(__file__).parent
is_there = "tensorflow" in sys.modules and "keras" in sys.modules
with os.scandir("/proc/self/fd") as entries:
    fds = sorted(int(entry.name) for entry in entries)
fds = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]
drawn = [random.random(), np.random.random()]
state = json.dumps([os.environ.get("SAID", ""), is_there, drawn, fds])
(directory / "began.part").write_text(state)
(directory / "began.part").rename(directory / "began")
time.sleep(60 if "STAY" in os.environ else 0)
if "LEAVE" in os.environ and os.fork() == 0:
    time.sleep(0.5)
    os._exit(0)

def get_config():
    return Config(dataset="digits", train_steps=-1)

def build_model(config):
    raise AssertionError("nothing is built")
"""


@pytest.mark.slow
def test_tasks_are_children_with_tensorflow_and_only_their_own_files_open(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG)
    ended = run_python("-c", PROGRAM, str(tmp_path))
    assert ended.stdout == "passed\n", ended.stderr
    assert "DeprecationWarning" not in ended.stderr


TARGET = """
import json, os, sys

print("set up by", sys.argv[0].rpartition("/")[2], flush=True)

def set_up():
    os.environ["IS_SET_UP"] = "1"

def write_state():
    is_preloaded = "wave" in sys.modules
    os.write(700, json.dumps([sys.argv, os.environ["IS_SET_UP"], is_preloaded]).encode())

def fail():
    raise ConnectionResetError("of the target")
"""
SPAWN = """
import errno, json, os, signal
from trainer.local.fork_server import ForkServer

with ForkServer("label", setup=["task:set_up"], preload=["wave"]) as server:
    read, write = os.pipe()
    child = server.spawn("task:write_state", "name", ["--flag"], {}, {700: write})
    assert child.wait() == 0
    state = json.loads(os.read(read, 1000))
    assert state == [["name", "--flag"], "1", True], state
    # An error of the target is an exit code, whatever its type.
    assert server.spawn("task:fail", "name", [], {}, {}).wait() == 1
    assert server.spawn("task:missing", "name", [], {}, {}).wait() == 1

    # A request that cannot be sent is no reason to end.
    first = server._process.pid
    try:
        server.spawn("task:write_state", "name", ["x" * (1 << 20)], {}, {700: write})
    except OSError as error:
        assert error.errno == errno.EMSGSIZE, error
    else:
        raise AssertionError("it was sent")
    assert server.spawn("task:write_state", "name", [], {}, {700: write}).wait() == 0
    assert server._process.pid == first
    # One that was killed or stopped is replaced.
    for signum in (signal.SIGKILL, signal.SIGSTOP):
        former = server._process.pid
        server._connection.settimeout(0.5)
        os.kill(former, signum)
        assert server.spawn("task:write_state", "name", [], {}, {700: write}).wait() == 0
        assert not os.path.exists(f"/proc/{former}")
"""


SPAWN_IN_VAIN = """
import os, signal
from trainer.local.fork_server import ForkServer

with ForkServer("label", preload=["no_such_module"]) as server:
    try:
        server.spawn("os:getpid", "name", [], {}, {})
    except OSError as error:
        print(error)
with ForkServer("label") as server:
    os.kill(server._process.pid, signal.SIGSTOP)
    server._connection.settimeout(0.1)
    try:
        server._ask(b"[]", [])
    except TimeoutError as error:
        print(error)
"""


def test_target_is_called_after_setup_and_preload(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TARGET)
    ended = run_python("-c", SPAWN, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "set up by fork_server.py\n" * 3  # Imported once by each server.
    assert "ConnectionResetError: of the target" in ended.stderr


def test_server_that_ends_in_an_import_or_does_not_answer_is_an_error_of_the_caller() -> None:
    ended = run_python("-c", SPAWN_IN_VAIN)
    said = "the fork server has ended\nthe fork server did not answer\n"
    assert ended.stdout == said, ended.stderr
    assert "No module named 'no_such_module'" in ended.stderr


@pytest.mark.parametrize("is_stopped", [False, True])
def test_fork_server_ends_with_its_launcher_even_during_the_import(is_stopped: bool) -> None:
    program = (
        "import sys\n"
        "from trainer.local.launching import fork_server\n"
        "with fork_server('label') as server:\n"
        "    print(server._process.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        wait_for(lambda: "tensorflow" in Path(f"/proc/{pid}/maps").read_text(), 60)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        launcher.kill()
    wait_for(lambda: is_gone(pid))
