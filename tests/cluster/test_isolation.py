"""The ports of a local cluster: only its own tasks can connect."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from strategies.cluster.peers import identify
from strategies.cluster.ports import free_ports
from strategies.cluster.tf_config import Task
from tests.cluster.runs import assert_refused, run, start
from tests.unit.stand_ins import namespace_or_skip
from trainer.local.network_namespace import Namespace

SLOW = "--config=tests/cluster/configs/slow.py"
LINEAR = ("--config=tests/cluster/configs/linear.py", "--num_threads=1", "--train_steps=20")
IDENTIFY = "import sys; from strategies.cluster.peers import identify; print(identify(sys.argv[1]))"


@pytest.fixture
def can_isolate() -> None:
    namespace_or_skip().__exit__()


def namespace_of(process: psutil.Process) -> Namespace:
    kinds = [
        kind
        for kind in ("user", "net")
        if os.stat(f"/proc/{process.pid}/ns/{kind}").st_ino
        != os.stat(f"/proc/self/ns/{kind}").st_ino
    ]
    return Namespace([os.open(f"/proc/{process.pid}/ns/{kind}", os.O_RDONLY) for kind in kinds])


def test_metrics_of_an_isolated_chief_are_read_from_outside(
    can_isolate: None, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    flags = (SLOW, "--isolate=on", f"--metrics_port={port}")
    with start("multiworker-2", tmp_path, *flags) as process:
        process.wait_for_step(20)
        url = f"http://127.0.0.1:{port}/metrics"

        def page() -> str:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return str(answer.read(), "utf-8")

        # The page is written after metrics.jsonl.
        process.wait_until(lambda: 'trainer_loss{split="train"}' in page(), "the loss")
        process.send(signal.SIGTERM)
        process.wait(exit_code=75)


@pytest.mark.parametrize("isolate", ["auto", pytest.param("off", marks=pytest.mark.nightly)])
def test_servers_answer_only_inside_the_namespace(
    isolate: str, can_isolate: None, tmp_path: Path
) -> None:
    with start("ps-2+1", tmp_path, SLOW, f"--isolate={isolate}") as process:
        process.wait_for_step(20)
        jobs = json.loads((tmp_path / "config.json").read_text())["cluster"]["cluster"]
        addresses = {Task(job, i): a for job in ("worker", "ps") for i, a in enumerate(jobs[job])}
        assert len(addresses) == 3
        from_outside = {task: identify(address) for task, address in addresses.items()}
        if isolate == "off":
            assert from_outside == {task: task for task in addresses}
        else:
            assert from_outside == dict.fromkeys(addresses, None)
            with namespace_of(process.task("ps 0")) as namespace:
                for task, address in addresses.items():
                    # The server answers from inside the namespace.
                    inside = subprocess.run(
                        namespace.command([sys.executable, "-c", IDENTIFY, address]),
                        pass_fds=namespace.fds,
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    assert inside.stdout.strip() == str(task)
        run = process.wait()
    assert run.stderr.count("isolated") == 1
    assert ("not isolated (--isolate=off)" in run.stderr) == (isolate == "off")


def test_refused_namespace_is_an_error_for_on_and_a_warning_for_auto(
    digits: Path, tmp_path: Path
) -> None:
    """Takes the right to make a namespace from root. Other users cannot drop this right."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("only root with setpriv can drop the right to make namespaces")
    unable = (setpriv, "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    argv = ("--strategy=multiworker", "--workers=1", *LINEAR, f"--data_dir={digits}")
    for isolate in ("on", "auto"):
        model_dir = tmp_path / isolate
        flags = (*argv, f"--isolate={isolate}", f"--model_dir={model_dir}")
        if isolate == "on":
            said = ("--isolate=on", "CAP_SYS_ADMIN", "--isolate=auto")
            assert_refused(flags, model_dir, *said, under=unable)
            assert not (model_dir / "tasks").exists()
        else:
            done = run(flags, model_dir, under=unable)
            assert "not isolated (root without CAP_SYS_ADMIN" in done.stderr


def test_run_with_a_url_is_not_isolated_and_has_local_logs(digits: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/far"
    flags = ("--strategy=multiworker", "--workers=1", f"--data_dir={digits}", f"--model_dir={url}")
    (tmp_path / "here").mkdir()
    config = f"--config={Path(__file__).parent}/configs/linear.py"
    argv = (*flags, config, *LINEAR[1:])
    done = run(argv, tmp_path / "far", cwd=tmp_path / "here")
    assert f"not isolated ({url} is reached over the network)" in done.stderr
    assert done.result["step"] == 20
    of_url = f"{tmp_path}/far".lstrip("/")
    assert (tmp_path / "here" / "runs" / of_url / "tasks" / "worker-0.log").exists()
