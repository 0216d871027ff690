"""Tasks as forks of a template: whose children they are, what they have open, and how they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has subreapers")

# In a process of its own: it stays a subreaper.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

import psutil

NUMPY_THREADS = int(sys.argv[2])

from trainer.template import Template

directory = Path(sys.argv[1])
read, write = os.pipe()

def start(template, *argv, env={}):
    with (directory / "printed").open("w") as file:
        fds = {1: file.fileno(), 2: file.fileno(), 600: write}
        argv = ["--config=" + str(directory / "config.py"), *argv]
        return template.start("worker-7", argv, env, fds)

def await_file(name):
    deadline = time.monotonic() + 60
    while not (directory / name).exists():
        assert time.monotonic() < deadline, (directory / "printed").read_text()
        time.sleep(0.01)

with Template("label") as template:
    others = {process.pid for process in psutil.Process().children()}
    child = start(template, env={"SAID": "to the task"})
    task = psutil.Process(child.pid)
    assert task.ppid() == os.getpid()
    assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
    await_file("began")
    said, tensorflow, *drawn, fds = (directory / "began").read_text().splitlines()
    assert said == "to the task"
    assert tensorflow == "imported", tensorflow
    assert fds == "[0, 1, 2, 600]", fds
    assert task.name() == "worker-7", task.name()
    # NumPy's alone: none that a fork would miss, since no op has run.
    (template_pid,) = others
    assert len(os.listdir(f"/proc/{template_pid}/task")) <= NUMPY_THREADS
    child.wait()
    assert child.wait() == child.returncode == 2, child.returncode
    printed = (directory / "printed").read_text()
    assert "error: " in printed and "train_steps" in printed, printed

    (directory / "began").unlink()
    child = start(template, env={"STAY": "1"})
    await_file("began")
    _, _, *other, _ = (directory / "began").read_text().splitlines()
    assert not set(drawn) & set(other), "two tasks draw the same numbers"
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL

    # What a task leaves behind is reaped too.
    child = start(template, env={"LEAVE": "1"})
    child.wait()
    deadline = time.monotonic() + 10
    while len(psutil.Process().children()) > 1:
        assert time.monotonic() < deadline
        template.reap_orphans(set())
        time.sleep(0.01)

    # One that was killed is replaced.
    (first,) = others
    os.kill(first, signal.SIGKILL)
    assert start(template).wait() == 2
    (second,) = psutil.Process().children()
    assert second.pid != first
    assert "label" in second.cmdline()
assert psutil.Process().children() == []
print("all well")
"""

# Run by the task itself, which is a trainer: what it is, then a mistake that ends it.
CONFIG = """
import os, random, sys, time
from pathlib import Path

import numpy as np

from trainer.config import Config

directory = Path(__file__).parent
is_there = "tensorflow" in sys.modules and "keras" in sys.modules
with os.scandir("/proc/self/fd") as entries:
    fds = sorted(int(entry.name) for entry in entries)
fds = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]
(directory / "began.part").write_text("\\n".join((
    os.environ.get("SAID", ""),
    "imported" if is_there else "",
    str(random.random()), str(np.random.random()),
    str(fds),
)))
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


def test_tasks_are_children_with_all_imported_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG)
    count = "import os, numpy; print(len(os.listdir('/proc/self/task')))"
    threads = subprocess.run(
        [sys.executable, "-c", count], capture_output=True, text=True, timeout=100, check=True
    )
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), threads.stdout],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.stdout == "all well\n", ended.stderr


@pytest.mark.parametrize("is_stopped", [False, True])
def test_template_ends_with_who_started_it_also_while_it_imports(is_stopped: bool) -> None:
    program = (
        "import sys\n"
        "from trainer.template import Template\n"
        "with Template('label') as template:\n"
        "    print(template._process.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        deadline = time.monotonic() + 60
        while "tensorflow" not in Path(f"/proc/{pid}/maps").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        launcher.kill()
    # It is a zombie where nobody reaps orphans.
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
