"""deploy/slurm in a real Slurm: requeue, preemption, faults of nodes and tasks, and mistakes."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.runs import Run, assert_nothing_left, largest_difference, last_step, train
from tests.cluster.test_readme import SLURM
from tests.deploy.slurm import TIMEOUT_SECS, Job, Slurm, reason_why_not, slurm, wait_until
from trainer.exit_codes import EXIT_RESTART, EXIT_USAGE

pytestmark = pytest.mark.skipif(
    bool(reason_why_not()), reason=reason_why_not() or "Slurm can be started"
)

FILE = SLURM[0][1]
SLOW = ("--config=tests/cluster/configs/slow.py", "--num_threads=1")
# Ten steps a second: under ps the others train until Slurm has noticed that a node is gone.
SLOWLY = "--config.pause_secs=1"
MODES = {
    name: command[2:]
    for name, command in zip(("multiworker", "ps-sync", "ps-async"), SLURM, strict=True)
}
NUM_FAULTS = 20
# Fails in one task only, before it connects to the others.
MISTAKE = """
import os
from configs.digits import *
from configs.digits import get_config as usual
def get_config():
    config = usual()
    config.batch_size = -1 if os.environ["SLURM_PROCID"] == "1" else 64
    return config
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    with slurm(tmp_path / "slurm", num_nodes=4) as made:
        yield made


class Training:
    """A run as jobs of Slurm: as often as a job ends early, the user gives the command again."""

    def __init__(self, cluster: Slurm, model_dir: Path, data: Path, *flags: str) -> None:
        self._cluster = cluster
        self._model_dir = model_dir
        self._where = {"RUN": str(model_dir), "DATA": str(data)}
        self._flags = flags
        self.ended: list[Job] = []
        self.submit()

    def submit(self) -> None:
        self.job = self._cluster.submit("--nodes=3", FILE, *self._flags, **self._where)

    @property
    def step(self) -> int:
        return last_step(self._model_dir)

    def progress(self, steps: int = 20) -> int:
        """Returns the step once `steps` more were trained; submits the run again if it has ended.

        Fails if the job has ended with a code that no fault explains.
        """
        goal = self.step + steps

        def advanced() -> bool:
            if (job := self._cluster.job(self.job)).is_over:
                self._check(job)
                self.submit()
            return self.step >= goal

        wait_until(advanced, f"step {goal}", TIMEOUT_SECS, self.output)
        return self.step

    def finish(self) -> Run:
        """Returns the run once a job has ended with 0."""
        while (job := self._cluster.wait(self.job, timeout_secs=600.0)).state != "COMPLETED":
            self._check(job)
            self.submit()
        assert_nothing_left(self._model_dir)
        return Run(job.exit_code, self.output(), "", self._model_dir)

    def _check(self, job: Job) -> None:
        self.ended.append(job)
        resumes = job.exit_code in (EXIT_RESTART, 128 + signal.SIGKILL)
        assert resumes or job.state in ("CANCELLED", "NODE_FAIL"), f"{job}\n{self.output()}"

    def output(self) -> str:
        return self._cluster.output(self.job)


def undisturbed(mode: str, model_dir: Path, data: Path, *flags: str) -> Run:
    """The same run in a local cluster of the same size."""
    topology = "ps-2+1" if "ps" in mode else "multiworker-3"
    flags = (*MODES[mode], f"--data_dir={data}", *flags)
    return train(topology, model_dir, *flags, timeout_secs=600.0)


def test_mistake_of_one_task_ends_the_job_with_2(
    cluster: Slurm, digits: Path, tmp_path: Path
) -> None:
    config = tmp_path / "mistake.py"
    config.write_text(MISTAKE)
    flags = ("--strategy=multiworker", f"--config={config}", "--num_threads=1")
    training = Training(cluster, tmp_path / "run", digits, *flags)
    job = cluster.wait(training.job)
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", EXIT_USAGE, 0), job
    errors = [line for line in training.output().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, errors
    assert "batch_size" in errors[0]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_requeue_preemption_and_the_death_of_a_node_leave_the_weights_as_they_are(
    mode: str, cluster: Slurm, digits: Path, tmp_path: Path
) -> None:
    flags = (*SLOW, "--config.train_steps=1500", "--config.checkpoint_every_steps=50")
    training = Training(cluster, tmp_path / "run", digits, *MODES[mode], *flags, SLOWLY)
    training.progress(40)
    cluster.run("scontrol", "requeue", str(training.job))
    training.progress()
    assert cluster.job(training.job).restarts == 1

    urgent = cluster.submit("--partition=urgent", "--nodes=4", "--wrap=hostname")
    assert cluster.wait(urgent).state == "COMPLETED"
    training.progress()
    assert cluster.job(training.job).restarts == 2

    lost = cluster.job(training.job).nodes[1]
    cluster.kill_node(lost)
    wait_until(lambda: "down" in cluster.state_of(lost), f"loss of {lost}")
    training.progress()
    assert lost not in cluster.job(training.job).nodes, "the job runs on a dead node"
    run = training.finish()
    assert not training.ended, "Slurm requeued the job, and nobody submitted it again"
    assert run.result["step"] >= 1500
    if mode != "ps-async":
        other = undisturbed(mode, tmp_path / "other", digits, *flags)
        assert largest_difference(run.weights(), other.weights()) == 0.0


def inflict(fault: str, training: Training, cluster: Slurm, chance: random.Random) -> None:
    """Returns when the fault has happened."""
    job = str(training.job)
    nodes = cluster.job(training.job).nodes
    node = chance.choice(nodes)
    if fault == "scancel":
        cluster.run("scancel", job)
    elif fault == "requeue":
        cluster.run("scontrol", "requeue", job)
    elif fault == "node":
        cluster.kill_node(node)
        wait_until(lambda: "down" in cluster.state_of(node), f"loss of {node}")
        cluster.start_slurmd(node)
    elif fault == "slurmd":
        cluster.kill_slurmd(node)
        cluster.start_slurmd(node)
    else:
        task = chance.choice([task for node in nodes for task in cluster.tasks(node)])
        task.kill()
        wait_until(lambda: not task.is_running(), f"end of process {task.pid}")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_run_finishes_after_twenty_random_faults(
    mode: str, cluster: Slurm, digits: Path, tmp_path: Path
) -> None:
    began, chance = time.monotonic(), random.Random(38)
    flags = (*SLOW, "--config.train_steps=4000", "--config.checkpoint_every_steps=50")
    faults = ["scancel", "requeue", "node", "task", "slurmd"] * (NUM_FAULTS // 5)
    chance.shuffle(faults)
    training = Training(cluster, tmp_path / "run", digits, *MODES[mode], *flags, SLOWLY)
    for fault in faults:
        step = training.progress(chance.randrange(20, 50))
        print(f"{time.monotonic() - began:.0f} s: step {step}, {fault}")
        inflict(fault, training, cluster, chance)
    run = training.finish()
    assert run.result["step"] >= 4000
    if mode != "ps-async":
        other = undisturbed(mode, tmp_path / "other", digits, *flags)
        assert largest_difference(run.weights(), other.weights()) == 0.0
