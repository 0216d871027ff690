"""Every command in README.md and docs/ works, and the code that the README quotes is the code.

A command is a line of a `sh` block. Each belongs to one of the categories below, and
`test_every_command_has_a_test` fails for a command in none of them.
"""

import contextlib
import inspect
import json
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from strategies.cluster.ports import free_ports
from tests.cluster.runs import ROOT, Process, Run, TrainOnce, run_together
from tests.cluster.runs import run as run_trainer
from tests.cluster.test_classics import write_mnist
from tests.commands import run_python
from trainer.loop import train

README = ROOT / "README.md"
DOCS = (README, *sorted((ROOT / "docs").glob("*.md")))

# Commands that are not executed, with the reason. Their flags are parsed all the same.
TOO_LONG = {
    "benchmarks.run": "takes hours, and needs MNIST files and PyTorch",
    "benchmarks.scaling": "needs the result of benchmarks.run; tests/unit/test_cost_model.py",
    "benchmarks.table": "takes many minutes, and needs MNIST files",
    "benchmarks.linear_scaling": "takes an hour, and needs MNIST files",
    "benchmarks.long_runs": "takes half an hour; tests/unit/test_long_runs.py",
    "benchmarks.large_models": "takes an hour; tests/cluster/test_large_model.py",
    "benchmarks.startup": "takes many minutes",
    "benchmarks.rounding": "takes minutes",
    "benchmarks.embeddings": "takes ten minutes",
    "benchmarks.object_storage": "takes minutes",
    "benchmarks.watching": "takes ten minutes; tests/unit/test_watching.py",
    "benchmarks.gpu": "needs a GPU; tests/cluster/test_gpu_benchmark.py",
    "benchmarks.wire": "takes many minutes, and needs MNIST files",
    "benchmarks.network": "takes many minutes, and needs root and PyTorch",
    "benchmarks.slow_tables": "takes minutes, and needs root and a data set",
    "tests.chaos": "takes half an hour; tests/faults/test_chaos.py disturbs shorter runs",
    "tests.chaos.links": "takes minutes; tests/faults/test_elastic.py cuts links, too",
    "tests.chaos.times": "takes half an hour; tests/faults/test_goodput.py disturbs shorter runs",
}
READERS = ("evaluate", "runs", "compare", "report")
NEEDS_THE_NETWORK = ("pip install ",)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def split_commands(block: str) -> list[tuple[str, ...]]:
    """The words of each command of a shell script; a quoted string may go over several lines."""
    commands, line = [], ""
    for part in block.replace("\\\n", " ").splitlines():
        line += part
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # A quotation continues in the next line.
            line += " "
            continue
        if words:
            commands.append(tuple(words))
        line = ""
    assert not line, f"unfinished: {line}"
    return commands


# Each command once, even if several files show it.
COMMANDS = list(
    dict.fromkeys(c for path in DOCS for block in blocks(path, "sh") for c in split_commands(block))
)


def is_python(command: tuple[str, ...], module: str) -> bool:
    return command[:3] == ("python", "-m", module)


def needs_hosts(command: tuple[str, ...]) -> bool:
    return "$HOSTS" in command or any("/shared/" in word for word in command)


MAKE = [command for command in COMMANDS if command[0] == "make"]
INSTALL = [command for command in COMMANDS if " ".join(command).startswith(NEEDS_THE_NETWORK)]
EXPORTS = [command for command in COMMANDS if command[0] == "export"]
MKDIR = [command for command in COMMANDS if command[0] == "mkdir"]
LONG = [c for c in COMMANDS if c[:2] == ("python", "-m") and c[2] in TOO_LONG]
TRAINER = [command for command in COMMANDS if is_python(command, "trainer")]
CHECKS = [command for command in TRAINER if "--check" in command]
ON_HOSTS = [command for command in TRAINER if needs_hosts(command)]
ON_MNIST = [command for command in TRAINER if "--config=configs/mnist_replica.py" in command]
OWN_FILES = {  # The examples of your_own.md; the first line of each is its name.
    block.partition("\n")[0].removeprefix("# "): block
    for block in blocks(ROOT / "docs" / "your_own.md", "python")
}
OWN_SCRIPTS = [c for c in COMMANDS if c[0] == "python" and c[1] in OWN_FILES]
OWN = [c for c in TRAINER if any(word == f"--config={name}" for word in c for name in OWN_FILES)]
TRAININGS = [c for c in TRAINER if c not in (*CHECKS, *ON_HOSTS, *ON_MNIST, *OWN)]
CLICKS = ("configs/dlrm.py", "configs/recommender.py")
PREPARE = [command for command in COMMANDS if is_python(command, "data.prepare")]
INSPECT = [command for command in COMMANDS if is_python(command, "data.inspect")]
SLURM = [command for command in COMMANDS if command[0] == "sbatch"]  # tests/deploy/test_slurm.py
DOCTOR = [command for command in COMMANDS if is_python(command, "trainer.doctor")]
PREDICT = [command for command in COMMANDS if is_python(command, "trainer.predict")]
READING = [
    command
    for command in COMMANDS
    if command[2:] and command[2].removeprefix("trainer.") in READERS
]


def ids(commands: list[tuple[str, ...]]) -> list[str]:
    return [" ".join(command) for command in commands]


def run(
    command: tuple[str, ...], cwd: Path, *flags: str, **replaced: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command of the documentation, with its placeholders replaced; it must end well."""
    words = list(command)
    for index, (name, equals, value) in enumerate(word.rpartition("=") for word in command):
        words[index] = name + equals + replaced.get(value, value)
    assert words[0] == "python"
    return run_python(*words[1:], *flags, cwd=cwd, check=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory with the example configs, but without data."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


@pytest.fixture
def checkout_with_digits(checkout: Path, digits: Path) -> Path:
    (checkout / "datasets").mkdir()
    shutil.copytree(digits, checkout / "datasets" / "digits")
    return checkout


@pytest.mark.quick
def test_every_command_has_a_test() -> None:
    of_data = (PREPARE, INSPECT, PREDICT, READING)
    others = (MAKE, INSTALL, EXPORTS, MKDIR, LONG, SLURM)
    categories = (*others, TRAINER, DOCTOR, OWN_SCRIPTS, *of_data)
    found = [sum(command in category for category in categories) for command in COMMANDS]
    assert [c for c, number in zip(COMMANDS, found, strict=True) if number != 1] == []
    assert all(categories), "a category has no command"
    assert {command[2] for command in LONG} == TOO_LONG.keys()


@pytest.mark.quick
def test_readme_is_short() -> None:  # tests/unit/test_docs.py follows its links.
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.quick
def test_loop_in_the_readme_is_the_loop() -> None:
    quoted, _ = blocks(README, "python")
    assert quoted.strip() == inspect.getsource(train).strip()


@pytest.mark.quick
def test_documents_show_a_command_for_each_strategy() -> None:
    shown = {word for command in TRAINER for word in command if "--strategy=" in word}
    assert shown == {"--strategy=mirrored", "--strategy=multiworker", "--strategy=ps"}
    assert "python -m pytest" in (ROOT / "Makefile").read_text()
    assert "STRATEGY ?= mirrored" in (ROOT / "Makefile").read_text(), "of `make train`"


@pytest.mark.quick
@pytest.mark.parametrize("command", MAKE, ids=ids(MAKE))
def test_make_command_exists(command: tuple[str, ...]) -> None:
    """Says what it would do: a virtual environment needs the network. `.ci/run` does it."""
    done = subprocess.run(
        [*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "python -m" in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("module", TOO_LONG)
def test_flags_of_long_commands_exist(module: str) -> None:
    words = [word for command in LONG if command[2] == module for word in command]
    names = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
    # Of argparse, and of absl, which ends with 1 after it.
    texts = [run_python("-m", module, flag, cwd=ROOT).stdout for flag in ("--help", "--helpfull")]
    known = set(re.findall(r"^\s+--(?:\[no\])?(\w+)", "\n".join(texts), re.MULTILINE))
    assert names <= known


@pytest.mark.nightly
@pytest.mark.parametrize("argv", [c[3:] for c in TRAININGS], ids=ids(TRAININGS))
def test_training_command_trains_on_a_machine_that_has_no_data(
    argv: tuple[str, ...], checkout: Path
) -> None:
    run_trainer((*argv, "--train_steps=20"), checkout, cwd=checkout)
    latest = checkout / "runs" / "latest"
    (model_dir,) = set((checkout / "runs").iterdir()) - {latest}
    if any(word.startswith("--model_dir=") for word in argv):
        assert not latest.exists()
    else:
        assert latest.resolve() == model_dir.resolve()
    assert (model_dir / "result.json").exists()
    (config,) = [word for word in argv if word.startswith("--config=")] or [""]
    generated = {"configs/regression.py": "diabetes"} | dict.fromkeys(CLICKS, "clicks")
    data_set = generated.get(config.removeprefix("--config="), "digits")
    assert (checkout / "datasets" / data_set / "features.json").exists()


def trained_own(name: str, cwd: Path, *flags: str) -> Run:
    """A run of the config file `name` in `cwd`, in the directory `run` there."""
    argv = (f"--config={name}", f"--model_dir={cwd / 'run'}", *flags)
    return run_trainer(argv, cwd / "run", cwd=cwd)


def test_model_of_the_readme_trains(checkout: Path) -> None:
    _, model = blocks(README, "python")
    (checkout / "my_model.py").write_text(model)
    assert "`python -m trainer --config=my_model.py`" in README.read_text()
    assert trained_own("my_model.py", checkout, "--train_steps=20").result["step"] == 20


def test_own_model_of_the_first_three_minutes_reaches_its_accuracy(
    checkout_with_digits: Path,
) -> None:
    path = ROOT / "docs" / "three_minutes.md"
    (model,) = blocks(path, "python")
    (checkout_with_digits / "my_model.py").write_text(model)
    (accuracy,) = re.findall(r"reaches an accuracy of (0\.\d+)", path.read_text())
    done = trained_own("my_model.py", checkout_with_digits, "--config.export=false")
    assert done.result["eval"]["accuracy"] >= float(accuracy)


@pytest.mark.nightly
@pytest.mark.parametrize("command", OWN, ids=ids(OWN))
def test_example_of_your_own_trains(command: tuple[str, ...], checkout_with_digits: Path) -> None:
    (name,) = (word.partition("=")[2] for word in command if word.startswith("--config="))
    assert len(OWN_FILES[name].splitlines()) < 40
    (checkout_with_digits / name).write_text(OWN_FILES[name])
    for script in OWN_SCRIPTS:
        if script[1] == name:
            for directory in MKDIR:
                subprocess.run(directory, cwd=checkout_with_digits, check=True)
            run(script, checkout_with_digits)
    others = [word for word in command[3:] if not word.startswith("--config=")]
    flags = (*others, "--train_steps=20", "--config.export=false")
    done = trained_own(name, checkout_with_digits, *flags)
    assert done.result["step"] == 20
    if name == "my_hook.py":
        lines = (done.model_dir / "loss.csv").read_text().splitlines()
        assert [line.split(",")[0] for line in lines] == ["10", "20"]


@pytest.mark.nightly
@pytest.mark.parametrize("command", CHECKS, ids=ids(CHECKS))
def test_check_starts_nothing_and_prints_where_variables_would_be(
    command: tuple[str, ...], checkout: Path
) -> None:
    done = run_trainer(command[3:], checkout, cwd=checkout)
    assert re.search(r"^ps 1: [\d,]+ bytes", done.stdout, re.MULTILINE)
    assert '"batch_size"' not in done.stdout  # Only --verbose prints the whole config.
    assert len(done.stdout.splitlines()) <= 10, done.stdout
    assert not (checkout / "runs").exists()


def prepare_command(name: str) -> tuple[str, ...]:
    (command,) = [command for command in PREPARE if command[3] == name]
    return command


def test_mnist_is_prepared_and_trained_on(checkout: Path) -> None:
    source = checkout / "idx"
    source.mkdir()
    write_mnist(source)
    run(prepare_command("mnist"), checkout, DIRECTORY_WITH_THE_IDX_FILES=str(source))
    assert (checkout / "datasets" / "mnist" / "features.json").exists()
    (command,) = ON_MNIST
    # The files of this test have 120 examples.
    run_trainer((*command[3:], "--batch_size=20", "--train_steps=10"), checkout, cwd=checkout)


def test_data_set_is_written_to_a_directory(checkout: Path) -> None:
    run(prepare_command("digits"), checkout, DIRECTORY_TO_WRITE=str(checkout / "written"))
    assert (checkout / "written" / "features.json").exists()


def test_clicks_of_the_documentation_are_generated(checkout: Path) -> None:
    run(prepare_command("clicks"), checkout, "--num_clicks=2000")
    assert (checkout / "datasets" / "clicks" / "clicks.json").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("command", INSPECT, ids=ids(INSPECT))
def test_inspect_command_ends_well(command: tuple[str, ...], checkout_with_digits: Path) -> None:
    if "--ids" in command:
        run(prepare_command("clicks"), checkout_with_digits, "--num_clicks=2000")
    run(command, checkout_with_digits)
    for word in command[4:]:
        name, _, path = word.partition("=")
        assert name in ("--verify", "--ids") or (checkout_with_digits / path).exists()


@pytest.mark.nightly
@pytest.mark.parametrize("command", DOCTOR, ids=ids(DOCTOR))
def test_doctor_finds_nothing_wrong(command: tuple[str, ...], checkout_with_digits: Path) -> None:
    done = run(command, checkout_with_digits, "--deadline_secs=90")
    assert "nothing wrong was found" in done.stdout
    assert re.search(r"^ps 1: [\d,]+ bytes", done.stdout, re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize("command", PREDICT + READING, ids=ids(PREDICT + READING))
def test_command_that_reads_runs_ends_well(
    command: tuple[str, ...], train_once: TrainOnce, tmp_path: Path
) -> None:
    run_dir = train_once("mirrored-1", "--train_steps=20").model_dir
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    directories = {"runs": run_dir.parent, "runs/RUN": run_dir, "runs/OTHER": copy}
    directories |= {"runs/latest": run_dir, "runs/a": run_dir, "runs/b": copy}
    done = run(command, ROOT, **{name: str(path) for name, path in directories.items()})
    assert len(done.stdout.splitlines()) >= (3 if command in PREDICT else 1)


def shared(words: tuple[str, ...], model_dir: Path, digits: Path) -> tuple[str, ...]:
    """The words with directories of this machine."""
    here = {"/shared/run": str(model_dir), "/shared/digits": str(digits)}
    return tuple(
        name + equals + here.get(value, value)
        for name, equals, value in (word.partition("=") for word in words)
    )


def hosts_on_this_machine() -> tuple[str, ...]:
    """The flags in $HOSTS, with free ports of this machine."""
    ports = iter(free_ports(3))
    (exported,) = [command[1] for command in EXPORTS if command[1].startswith("HOSTS=")]
    local = re.sub(r"host-\w:2222", lambda _: f"localhost:{next(ports)}", exported)
    return tuple(local.removeprefix("HOSTS=").split())


def with_hosts(
    command: tuple[str, ...], hosts: tuple[str, ...], model_dir: Path, digits: Path
) -> tuple[str, ...]:
    words = [word for part in command[3:] for word in (hosts if part == "$HOSTS" else (part,))]
    return (*shared(tuple(words), model_dir, digits), "--num_threads=1")


TERMINALS = [c for c in ON_HOSTS if any(word.startswith("--job_name") for word in c)]
SERVED = [command for command in ON_HOSTS if "--existing_servers" in command]
WITH_TF_CONFIG = [c for c in ON_HOSTS if "--strategy=multiworker" in c and "--hosts" not in str(c)]


def test_terminals_of_the_readme_train_together(digits: Path, tmp_path: Path) -> None:
    hosts, model_dir = hosts_on_this_machine(), tmp_path / "run"
    assert len(TERMINALS) == 3
    runs = run_together(
        Process((*with_hosts(command, hosts, model_dir, digits), "--train_steps=20"), model_dir)
        for command in TERMINALS
    )
    assert runs[-1].result["step"] >= 20


def test_servers_that_keep_serving_train_for_one_chief_after_another(
    digits: Path, tmp_path: Path
) -> None:
    hosts = hosts_on_this_machine()
    (command,) = SERVED
    with contextlib.ExitStack() as stack:
        servers = []
        for job, index in (("ps", 0), ("worker", 0), ("worker", 1)):
            task = (f"--job_name={job}", f"--task_index={index}", "--keep_serving")
            argv = ("--strategy=ps", *task, *hosts, "--num_threads=1")
            servers.append(stack.enter_context(Process(argv, tmp_path / "none")))
        for name in ("first", "second"):
            argv = (*with_hosts(command, hosts, tmp_path / name, digits), "--train_steps=20")
            with Process(argv, tmp_path / name) as chief:
                done = chief.wait_alone()
                assert done.exit_code == 0, chief.output() + servers[0].output()
            assert done.result["step"] >= 20
            assert [server.popen.poll() for server in servers] == [None] * 3
        for server in servers:
            server.send(signal.SIGTERM)
        assert [server.wait_alone().exit_code for server in servers] == [75] * 3
        for server in servers:
            server.wait_for_family_to_end()


def test_workers_with_the_tf_config_of_the_readme_train_together(
    digits: Path, tmp_path: Path
) -> None:
    (command,) = WITH_TF_CONFIG
    (exported,) = [c[1] for c in EXPORTS if c[1].startswith("TF_CONFIG=")]
    tf_config = json.loads(exported.removeprefix("TF_CONFIG="))
    ports = free_ports(2)
    tf_config["cluster"]["worker"] = [f"localhost:{port}" for port in ports]
    model_dir = tmp_path / "run"
    argv = (*shared(command[3:], model_dir, digits), "--num_threads=1", "--train_steps=20")
    tasks = [{**tf_config["task"], "index": index} for index in range(2)]
    runs = run_together(
        Process(argv, model_dir, env={"TF_CONFIG": json.dumps({**tf_config, "task": task})})
        for task in tasks
    )
    assert runs[0].result["step"] == 20


def test_each_command_on_hosts_is_run_here() -> None:
    # tests/faults/test_agents.py, test_elastic.py and test_resizing.py start them on each host.
    launched = [
        command
        for command in ON_HOSTS
        if "--max_restarts=3" in command or "--min_workers=2" in command
    ]
    assert len({*launched}) == 3
    assert {*ON_HOSTS} == {*TERMINALS, *SERVED, *WITH_TF_CONFIG, *launched}
