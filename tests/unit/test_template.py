"""Tasks as forks of a template: whose children they are, what they have open, and how they end."""

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

from trainer.template import Template

directory = Path(sys.argv[1])
read, write = os.pipe()

def start(template, *argv, env={}):
    with (directory / "printed").open("w") as file:
        fds = {1: file.fileno(), 2: file.fileno(), 600: write}
        return template.start(["--config=" + str(directory / "config.py"), *argv], env, fds)

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
    said, tensorflow, fds = (directory / "began").read_text().splitlines()
    assert said == "to the task"
    assert tensorflow == "imported, no threads", tensorflow
    assert fds == "[0, 1, 2, 600]", fds
    child.wait()
    assert child.wait() == child.returncode == 2, child.returncode
    printed = (directory / "printed").read_text()
    assert "error: " in printed and "train_steps" in printed, printed

    (directory / "began").unlink()
    child = start(template, env={"STAY": "1"})
    await_file("began")
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL

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
import os, sys, threading, time
from pathlib import Path
from trainer.config import Config

directory = Path(__file__).parent
threads = len(os.listdir("/proc/self/task"))
is_there = "tensorflow" in sys.modules and "keras" in sys.modules
with os.scandir("/proc/self/fd") as entries:
    fds = sorted(int(entry.name) for entry in entries)
fds = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]
(directory / "began.part").write_text("\\n".join((
    os.environ.get("SAID", ""),
    "imported, " + ("no threads" if threads == 1 else f"{threads} threads") if is_there else "",
    str(fds),
)))
(directory / "began.part").rename(directory / "began")
time.sleep(60 if "STAY" in os.environ else 0)

def get_config():
    return Config(dataset="digits", train_steps=-1)

def build_model(config):
    raise AssertionError("nothing is built")
"""


def test_tasks_are_children_with_all_imported_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert ended.stdout == "all well\n", ended.stderr


def test_template_ends_with_who_started_it() -> None:
    program = (
        "import os, signal\n"
        "from trainer.template import Template\n"
        "with Template('label') as template:\n"
        "    print(template._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 1.0  # Much less than an import takes.
    while _runs(int(ended.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
