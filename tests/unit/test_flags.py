"""Each flag works, or is refused: no strategy and no cluster ignores a flag that is given."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from data.system.flags import with_home
from tests.commands import run_python
from trainer import flags
from trainer.api.arguments import parsed
from trainer.flags.checks import read_recipe
from trainer.flags.start import model_dir_of

# Does what a command does before TensorFlow is imported, for each row in a fork: flags are global.
PROGRAM = """
import json, os, sys
from data.system.errors import UsageError
from trainer import cli, flags
from trainer.flags.checks import check_sizes
from trainer.flags.cluster import cluster_here
from trainer.flags.parsing import parse_words
from trainer.flags.start import num_workers
def check(words, tf_config):
    if tf_config:
        os.environ["TF_CONFIG"] = tf_config
    sys.argv = ["trainer", *words]
    parse_words(sys.argv)
    recipe, cluster = cli._read(["trainer"], is_launched=False)
    cluster = cluster or cluster_here()
    check_sizes(recipe, num_workers(cluster), cluster.num("ps"))
for words, tf_config in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        message = ""
        try:
            check(words, tf_config)
        except UsageError as error:
            message = str(error)
        print(json.dumps(message), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""

# A value of each flag that has a scope and does not take 2.
VALUES = {
    "allow_public_address": "true",
    "chief_hosts": "localhost:1",
    "cluster": "local",
    "communication": "ring",
    "cpu_affinity": "on",
    "existing_servers": "true",
    "hosts": "localhost,b",
    "isolate": "on",
    "job_name": "worker",
    "keep_serving": "true",
    "ps_hosts": "localhost:1",
    "read_dtype": "float16",
    "rejoin_secs": "9",
    "sync_replicas": "true",
    "wire_dtype": "float16",
    "worker_hosts": "localhost:1",
}


def config(task: str, **hosts: int) -> str:
    """A TF_CONFIG; `hosts` has the number of tasks of each job."""
    ports = iter(range(1111, 1200))
    cluster = {job: [f"localhost:{next(ports)}" for _ in range(n)] for job, n in hosts.items()}
    return json.dumps({"cluster": cluster, "task": {"type": task, "index": 0}})


WORKERS = config("worker", worker=2)
WITH_EVALUATOR = config("worker", worker=2, evaluator=1)
PS = config("chief", chief=1, worker=1, ps=1)
SERVER = config("worker", chief=1, worker=1, ps=1)
MULTI = "--strategy=multiworker"
ANY_PS, SYNC = "--strategy=ps", "--strategy=ps --sync_replicas"
OF_TASKS = f"{ANY_PS} --ps_hosts=a:1 --worker_hosts=b:1"
HOSTS, PS_HOSTS = f"{MULTI} --hosts=localhost,b", f"{ANY_PS} --hosts=localhost,b,c"
KEEP_SERVING = f"{ANY_PS} --keep_serving"

# Flags, and what the message must name; no message: they work.
WITHOUT_TF_CONFIG = [
    ("", ()),
    ("--max_restarts=0", ()),
    ("--grace_secs=1 --stall_timeout_secs=0", ()),
    ("--replicas=2 --config.data.prefetch_batches=2", ()),
    ("--quiet --verbose", ("--quiet", "--verbose")),
    ("--quiet --plain", ()),
    ("--epochs=1 --train_steps=1", ("--epochs", "--train_steps")),
    ("--config.profile_num_steps=4", ("profile_num_steps=4", "profile_first_step=100")),
    ("--config.profile_num_steps=4 --config.profile_first_step=9", ()),
    ("--config.penalty.variables=x", ("penalty.variables=x", "penalty.l2=")),
    ("--config.penalty.variables=x --config.penalty.l1=0.1", ()),
    ("--config.warm_start.exclude=x", ("exclude=x", "or leave warm_start.exclude out.")),
    ("--data_cache_dir=copies --data_cache_bytes=5", ()),
    ("--config.data.on_corrupt=ignore", ("on_corrupt", "fail or skip", "'ignore'")),
    ("--config.train_steps=0", ("train_steps", "at least 1")),
    ("--config=a.py --config=b.py", ("2 times", "a.py, b.py")),
    ("--batch_size=32 --config.batch_size=128", ("--batch_size=32", "--config.batch_size", "128")),
    ("--config.data_dir=a --data_dir=b", ("--data_dir=b", "--config.data_dir", "a")),
    ("--batch_size=32 --config.eval_batch_size=128", ()),
    ("--flagfile=/no/such", ("--flagfile", "/no/such")),
    (f"{MULTI} --workers=1 --cpu_affinity=on", ()),
    (f"{MULTI} --wire_dtype=float16 --bucket_mb=1 --communication=ring", ()),
    (f"{MULTI} --workers=1 --wire_dtype=float16", ("--wire_dtype=float16", "one worker")),
    (f"{MULTI} --min_workers=1", ("--min_workers", "--hosts")),
    (f"{MULTI} --rejoin_secs=9", ("--rejoin_secs", "--hosts")),
    (f"{MULTI} --port=2222", ("--port", "several hosts")),
    (f"{MULTI} --task_index=0", ("--task_index", "--worker_hosts")),
    (f"{MULTI} --chief_timeout_secs=9", ("--chief_timeout_secs", "--hosts")),
    (f"{HOSTS} --min_workers=3", ("--min_workers=3", "2 hosts")),
    (f"{HOSTS} --min_workers=1 --rejoin_secs=9", ()),
    (f"{HOSTS} --rejoin_secs=30", ("--rejoin_secs=30", "--min_workers")),
    (f"{HOSTS} --min_workers=1 --rejoin_secs=nan", ("--rejoin_secs=nan", "--rejoin_secs=60")),
    ("--stall_timeout_secs=nan", ("--stall_timeout_secs=nan", "--stall_timeout_secs=300")),
    ("--grace_secs=inf", ("--grace_secs=inf", "--grace_secs=25")),
    ("--learning_rate=nan", ("--learning_rate=nan", "Leave it out")),
    (f"{HOSTS} --min_workers=1 --max_restarts=0", ("--min_workers=1", "--max_restarts=0")),
    (f"{ANY_PS} --workers=4 --min_workers=1", ()),
    (f"{ANY_PS} --min_workers=3", ("--min_workers=3", "2 workers", "--min_workers=2")),
    (f"{ANY_PS} --min_workers=1 --rejoin_secs=9", ("--rejoin_secs", "--hosts")),
    (f"{ANY_PS} --min_workers=1 --max_restarts=0", ("--min_workers=1", "--max_restarts=0")),
    (f"{PS_HOSTS} --min_workers=2", ()),
    (f"{PS_HOSTS} --min_workers=3", ("--min_workers=3", "2 hosts")),
    (f"{PS_HOSTS} --min_workers=1 --chief_timeout_secs=9", ("=1", "--chief_timeout_secs")),
    (f"{PS_HOSTS} --min_workers=1 --keep_serving", ("--min_workers=1", "--keep_serving")),
    (f"{ANY_PS} --max_staleness=1 --read_dtype=float16", ()),
    (f"{ANY_PS} --workers=1 --wire_dtype=float16", ()),
    (f"{ANY_PS} --ps=2 --ps_standby=5", ()),
    (f"{SYNC} --ps=2 --ps_standby=5", ()),
    (f"{ANY_PS} --ps_standby=10", ("--ps_standby=10", "ps tasks is 1", "--ps=2")),
    (f"{ANY_PS} --replicas_to_aggregate=2", ("=2 needs --sync_replicas",)),
    (f"{SYNC} --replicas_to_aggregate=2", ()),
    (
        f"{SYNC} --replicas_to_aggregate=3",
        ("--replicas_to_aggregate", "from 1 to the number of workers, 2", "3"),
    ),
    (f"{SYNC} --replicas_to_aggregate=0", ("from 1", "0")),
    (f"{SYNC} --max_staleness=3", ("--max_staleness=3", "--sync_replicas")),
    (KEEP_SERVING, ("--keep_serving", "TF_CONFIG")),
    (f"{ANY_PS} --job_name=ps", ("--job_name", "--ps_hosts")),
    (f"{OF_TASKS} --job_name=pss", ("--job_name", "pss")),
    (f"{OF_TASKS} --job_name=ps --task_id=0", ("--task_id",)),  # Removed.
    (f"{OF_TASKS} --job_name=ps --existing_servers", ("--existing_servers", "--job_name=ps")),
    ("--download_only", ("--model_dir=",)),
    (f"{ANY_PS} --num_gpus=2", ("--num_gpus=2", "a worker for each GPU")),
    (f"{ANY_PS} --deterministic", ("--deterministic", "Add --sync_replicas, without")),
    (
        f"{SYNC} --deterministic --replicas_to_aggregate=1",
        ("--deterministic", "without --replicas_to_aggregate"),
    ),
    (f"{MULTI} --workers=0", ("--workers=0",)),
    (f"{MULTI} --max_restarts=-1", ("max_restarts", "-1")),
    (f"{MULTI} --wire_dtype=int8", ("wire_dtype", "float16", "bfloat16")),
    (f"{ANY_PS} --max_staleness=-1", ("max_staleness", "-1")),
    ("--num_threads=-1", ("num_threads", "-1")),
]
# Flags, TF_CONFIG, and what the message must name.
WITH_TF_CONFIG = [
    ("", WORKERS, ("TF_CONFIG", "--strategy=multiworker")),
    (f"{MULTI} --workers=2", WORKERS, ("--workers", "TF_CONFIG")),
    (f"{MULTI} --isolate=off", WORKERS, ("--isolate", "TF_CONFIG")),
    (f"{MULTI} --cpu_affinity=off", WORKERS, ("--cpu_affinity", "TF_CONFIG")),
    (f"{MULTI} --hosts=a,b", WORKERS, ("TF_CONFIG", "--hosts")),
    (f"{MULTI} --port=2222", WORKERS, ("TF_CONFIG", "--port")),
    (f"{MULTI} --job_name=worker", WORKERS, ("TF_CONFIG", "--job_name")),
    (f"{MULTI} --min_workers=1", WORKERS, ("--min_workers=1", "--hosts=a,b,c")),
    (f"{MULTI} --chief_timeout_secs=9", WORKERS, ("--chief_timeout_secs=9", "--stall_timeout")),
    (f"{MULTI} --chief_timeout_secs=9", WITH_EVALUATOR, ()),
    (f"{MULTI} --max_restarts=1 --bucket_mb=1", WORKERS, ()),
    (f"{ANY_PS} --min_workers=1", PS, ("--min_workers=1", "--hosts=a,b,c")),
    (f"{ANY_PS} --ps_standby=10", PS, ("--ps_standby=10", "ps tasks is 1")),
    (KEEP_SERVING, PS, ("--keep_serving", "chief 0")),
    (KEEP_SERVING, SERVER, ()),
    (f"{KEEP_SERVING} --max_restarts=2", SERVER, ("--max_restarts", "--keep_serving")),
    (f"{KEEP_SERVING} --chief_timeout_secs=9", SERVER, ("--chief_timeout_secs", "--keep_serving")),
    (f"{ANY_PS} --chief_timeout_secs=9", SERVER, ()),
    (f"{ANY_PS} --existing_servers", PS, ("TF_CONFIG", "--existing_servers")),
    (f"{ANY_PS} --ps=2", PS, ("--ps", "TF_CONFIG")),
    (f"{ANY_PS} --ps_hosts=a:1", PS, ("TF_CONFIG", "--ps_hosts", "two descriptions")),
    (f"{ANY_PS} --check", SERVER, ("--check", "worker 0", "chief 0")),
    ("", config("evaluator", worker=1, evaluator=1), ("evaluator 0", "eval_every_steps")),
    (f"{MULTI} --download_only", WORKERS, ("env -u TF_CONFIG python -m trainer",)),
]
OF_OTHER_STRATEGIES = [
    (f"--strategy={strategy} --{name}={VALUES.get(name, 2)}", (f"--{name}=", f"under {strategy}"))
    for name, scope in flags.SCOPES.items()
    for strategy in flags.STRATEGIES
    if strategy not in scope.strategies
]
ALONE = [(words, "", named) for words, named in [*WITHOUT_TF_CONFIG, *OF_OTHER_STRATEGIES]]
ROWS = [*ALONE, *WITH_TF_CONFIG]


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], str]:
    """The message for each row; "" where the flags are accepted."""
    model_dir = f"--model_dir={tmp_path_factory.mktemp('run')}"
    commands = [([*words.split(), model_dir], tf_config) for words, tf_config, _ in ROWS]
    done = run_python("-c", PROGRAM, input=json.dumps(commands), check=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip((row[:2] for row in ROWS), said, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("words", "tf_config", "named"), ROWS)
def test_flag_works_or_is_refused(
    words: str, tf_config: str, named: tuple[str, ...], messages: Mapping[tuple[str, str], str]
) -> None:
    message = messages[words, tf_config]
    assert bool(message) is bool(named), message
    assert [part for part in named if part not in message] == [], message


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--model_dir=~/a b", "--model_dir=/home/me/a b"),
        ("-config.warm_start.path=~/", "-config.warm_start.path=/home/me/"),
        ("~/b", "/home/me/b"),
        ("--delimiter=~", "--delimiter=~"),
        ("--data_dir=~root/a", "--data_dir=~root/a"),
        ("--config=~/a.py:small", "--config=/home/me/a.py:small"),
        ("--model_dir=./~/a", "--model_dir=./~/a"),
        ("--model_dir=s3://b/~/a", "--model_dir=s3://b/~/a"),
        ("--splits=train=~/a", "--splits=train=~/a"),
    ],
)
def test_home_directory_is_found_at_the_begin_of_a_value(
    typed: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert with_home(["trainer", typed]) == ["trainer", meant]


def test_every_command_replaces_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with parsed(["--config=configs/digits.py", "--model_dir", "~/a", "--config.data_dir=~/d"]):
        assert flags.MODEL_DIR.value == str(tmp_path / "a")
        assert f"{tmp_path}/a" in sys.argv  # The tasks of a cluster get it.
        assert read_recipe().config.data_dir == str(tmp_path / "d")
    other = run_python("-m", "data.inspect", "--data_dir=~/d", "--verify")
    assert f"{tmp_path}/d" in other.stderr


def test_file_of_flags_is_read_before_the_settings_of_a_run_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = str(Path("configs/digits.py").resolve())
    recorded = {"seed": 5, "data": {"eval_split": "test"}}
    run = {"strategy": "mirrored", "recipe": recipe, "data_dir": "/d", "config": recorded}
    (tmp_path / "config.json").write_text(json.dumps(run))
    file = tmp_path / "my.flags"
    for words, batch_size, seed in (
        (["--config=configs/digits.py", "--config.batch_size=32"], 32, 0),
        ([f"--config={recipe}", "--model_dir=~/.", "--config.seed=3"], 64, 3),
        (["--model_dir=~/."], 64, 5),
    ):
        file.write_text("\n".join(words))
        with parsed([f"--flagfile={file}"]):
            config = read_recipe().config
            assert (config.batch_size, config.seed) == (batch_size, seed)


def test_runs_of_the_same_second_have_directories_of_their_own() -> None:
    with parsed(["--config=configs/digits.py"]):
        recipe = read_recipe()
        names = {model_dir_of(recipe) for _ in range(3)}
    assert len(names) == 3
    assert not any(map(os.path.exists, names)), "they are made when training begins"


def test_each_help_text_belongs_to_a_flag() -> None:
    assert flags._HELP.keys() == flags.DEFINED - {"config"}
