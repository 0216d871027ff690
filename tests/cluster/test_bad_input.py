"""Bad input gets one clear message and exit code 2, with nothing started, made or lost.

The cases are examples of each stage. In tests/unit are more mistakes in flags (test_flags.py,
test_mistakes.py), in TF_CONFIG (test_tf_config.py), in config files (test_config_file.py,
test_options.py) and in data (test_split.py, test_inputs.py).
"""

import contextlib
import dataclasses
import json
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import trainer
from tests.cluster.runs import ROOT, assert_refused, run, snapshot
from tests.damage import flip_bit

LINEAR = "tests/cluster/configs/linear.py"


@dataclasses.dataclass(frozen=True)
class Case:
    """What is typed, in flags with {tmp} and {digits}, and what the message must name."""

    flags: str
    named: tuple[str, ...]
    tf_config: str = ""
    recipe: str = ""
    make: Callable[[Path, Path], None] = lambda tmp, digits: None


def cluster_of(jobs: Mapping[str, object], job: str = "worker", index: object = 0) -> str:
    return json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})


def copy_of(digits: Path, tmp: Path) -> Path:
    copy = tmp / "data"
    shutil.copytree(digits, copy)
    return copy


def corrupt(tmp: Path, digits: Path) -> None:
    """Flips a bit in the first record of a shard of the test split."""
    flip_bit(next(copy_of(digits, tmp).glob("*test.tfrecord*")), 20)


def one_label_less(tmp: Path, digits: Path) -> None:
    """features.json says 9 classes, but there are 10."""
    features = copy_of(digits, tmp) / "features.json"
    text = features.read_text()
    fewer = text.replace('"numClasses": "10"', '"numClasses": "9"')
    assert fewer != text
    features.write_text(fewer)


def model_dir_is_a_file(tmp: Path, digits: Path) -> None:
    (tmp / "run").write_text("in the way")


RECIPE = "from configs.digits import *\n"
CALLBACK = (
    RECIPE
    + """
def build_hooks(config, model_dir):
    import keras
    return [keras.callbacks.History()]
"""
)
SYNCHRONIZED = (
    RECIPE
    + """
def build_model(config):
    import keras
    norm = keras.layers.BatchNormalization(synchronized=True, name="norm")
    return keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10), norm]
    )
"""
)
TENSOR = RECIPE + "import tensorflow as tf\nMEAN = tf.zeros([3])\n"
WORKERS = {"worker": ["localhost:1111", "localhost:1112"]}
PS = {"chief": ["localhost:1113"], "worker": ["localhost:1111"], "ps": ["localhost:1114"]}
MULTI = "--strategy=multiworker"

OWN = "--config={tmp}/recipe.py --data_dir={digits}"
CHECKED = ("", " --check")

CASES = {
    "a job of another strategy": Case(MULTI, ("ps", "--strategy=ps"), tf_config=cluster_of(PS)),
    "argument that is no flag": Case("train", ("train",)),
    "tensor at import": Case(
        f"{MULTI} {OWN}", ("creates a tensor when it is imported (MEAN)",), recipe=TENSOR
    ),
    **{
        f"sums over workers in the forward pass{check}": Case(
            f"--strategy=ps --sync_replicas {OWN}{check}",
            ("'norm' of {tmp}/recipe.py is synchronized=True", "Type --strategy=multiworker"),
            recipe=SYNCHRONIZED,
        )
        for check in CHECKED
    },
    "rounds of local steps that would look like a stall": Case(
        f"{MULTI} --config.local_steps.every_secs=200 --data_dir={{digits}}",
        ("every_secs=200", "--stall_timeout_secs=800"),
    ),
    **{
        f"model_dir that cannot be written {flag}": Case(
            f"{flag} --data_dir={{digits}}", ("--model_dir={tmp}/run",), make=model_dir_is_a_file
        )
        for flag in ("", MULTI)
    },
    "missing data of a cluster": Case("--strategy=ps --data_dir={tmp}/data", ("{tmp}/data",)),
    "batch that all hosts could not share": Case(
        f"{MULTI} --hosts=localhost,b --min_workers=1 --num_gpus=3 --batch_size=5 "
        "--data_dir={digits}",
        ("batch_size=5", "6 replicas"),
    ),
    **{
        f"standby of dynamic ids{check}": Case(
            "--config=tests/cluster/configs/tables.py --data_dir={digits} --strategy=ps --ps=2 "
            f"--ps_standby=10{check}",
            ("--ps_standby=10", "dynamic ids", "--config.checkpoint_every_steps=10"),
        )
        for check in CHECKED
    },
    **{
        f"table of dynamic ids that would be zeros for ever {more}": Case(
            "--config=tests/cluster/configs/tables.py --data_dir={digits} --config.freeze=few "
            + more,
            ("ShardedEmbedding few", "has none", "leave it out of config.freeze"),
        )
        for more in ("", "--check", MULTI)
    },
    "early stopping with an evaluator": Case(
        f"{MULTI} --config.early_stopping.patience=2 --config.eval_every_steps=10",
        ("config.early_stopping", "evaluator"),
        tf_config=cluster_of({"worker": ["a:1"], "evaluator": ["b:1"]}),
    ),
}

# Found after TensorFlow is imported: `trainer.train` raises the message of the command.
FOUND_HERE = {
    "unknown optimizer": Case(
        "--config.optimizer=sdg --data_dir={digits}", ("sdg", "adam", "build_optimizer")
    ),
    "unknown best metric": Case(
        "--config.best_metric=acuracy --data_dir={digits}", ("acuracy", "loss, accuracy")
    ),
    "corrupt record": Case(
        "--data_dir={tmp}/data", ("test.tfrecord", "record 0 at byte 0", "CRC"), make=corrupt
    ),
    "label that the features deny": Case(
        "--data_dir={tmp}/data", ("label", "[0, 9)"), make=one_label_less
    ),
    "features of another shape": Case(
        "--config=configs/mnist_replica.py --data_dir={digits}", ("8, 8, 1", "28, 28")
    ),
    "warm start from nothing": Case(
        "--data_dir={digits} --config.warm_start.path={tmp}/nothing",
        ("config.warm_start.path={tmp}/nothing", "checkpoints/step-*"),
    ),
}


@contextlib.contextmanager
def nothing_made_or_changed(case: Case, digits: Path, tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Arranges the files of `case`; gives what the names in its flags stand for."""
    case.make(tmp_path, digits)
    (tmp_path / "recipe.py").write_text(case.recipe)
    before = snapshot(tmp_path), snapshot(digits)
    was_there = (tmp_path / "run").exists()
    yield {"tmp": tmp_path, "digits": digits}
    assert (tmp_path / "run").exists() == was_there
    after = snapshot(tmp_path), snapshot(digits)
    for former, latter in zip(before, after, strict=True):
        made = {name for name in latter.keys() - former.keys() if not name.endswith(".index.npz")}
        assert made == set()
        assert former.items() <= latter.items()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_explained(case: Case, digits: Path, tmp_path: Path) -> None:
    model_dir = tmp_path / "run"
    env = {"TF_CONFIG": case.tf_config} if case.tf_config else {}
    with nothing_made_or_changed(case, digits, tmp_path) as names:
        flags = (*case.flags.format(**names).split(), f"--model_dir={model_dir}")
        parts = (part.format(**names) for part in case.named)
        assert assert_refused(flags, model_dir, *parts, env=env).stdout == ""


@pytest.mark.parametrize("case", FOUND_HERE.values(), ids=FOUND_HERE)
def test_bad_data_and_code_are_explained(case: Case, digits: Path, tmp_path: Path) -> None:
    with nothing_made_or_changed(case, digits, tmp_path) as names:
        words = case.flags.format(**names).split()
        given = dict(word.removeprefix("--").split("=") for word in words)
        config = given.pop("config", "digits")
        with pytest.raises(trainer.UsageError) as raised:
            trainer.train(config, model_dir=tmp_path / "run", **given)
    message = str(raised.value)
    missing = [part for part in case.named if part.format(**names) not in message]
    assert missing == [], message


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--replicas=64", ("batch_size=3", "64 replicas")),
        (f"{MULTI} --workers=4", ("batch_size=3", "4 replicas")),
        ("--num_gpus=7", ("--num_gpus=7",)),
    ],
)
def test_refused_run_without_a_model_dir_leaves_the_latest_run(
    words: str, named: tuple[str, ...], digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs/old").mkdir(parents=True)
    (tmp_path / "runs/latest").symlink_to("old")
    flags = (*words.split(), "--batch_size=3", f"--data_dir={digits}")
    assert_refused(flags, tmp_path / "none", *named, cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["latest", "old", "runs"]
    assert (tmp_path / "runs/latest").readlink() == Path("old")


def test_callback_of_keras_as_a_hook_ends_the_run_before_its_first_step(
    digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.py").write_text(CALLBACK)
    model_dir = tmp_path / "run"
    with pytest.raises(trainer.UsageError, match=r"(?s)History.*build_callbacks"):
        trainer.train(tmp_path / "recipe.py", data_dir=digits, model_dir=model_dir)
    assert not (model_dir / "metrics.jsonl").exists()


def test_port_in_use_is_explained(digits: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        env = {"TF_CONFIG": cluster_of({"worker": [f"localhost:{port}", "localhost:1"]})}
        flags = (MULTI, f"--config={LINEAR}", f"--data_dir={digits}", f"--model_dir={tmp_path}")
        assert_refused(flags, tmp_path, f"localhost:{port}", "in use", env=env)
    assert list(tmp_path.iterdir()) == []


def test_tf_config_without_a_model_dir_is_explained(tmp_path: Path) -> None:
    env = {"TF_CONFIG": cluster_of(WORKERS)}
    assert_refused([MULTI], tmp_path, "worker 0 needs --model_dir", env=env)


@pytest.mark.parametrize("strategy", ["mirrored", "ps"])
def test_download_only_prepares_the_data_and_nothing_else(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    done = run((f"--strategy={strategy}", "--download_only"), tmp_path, cwd=tmp_path)
    assert "train: 1,437 examples" in done.stdout
    assert "test: 360 examples" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs", "datasets"]
    assert (tmp_path / "datasets" / "digits" / "features.json").exists()


def test_download_only_of_unavailable_data_is_explained(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    flags = ("--download_only", "--config=configs/mnist_replica.py")
    command = "python -m data.prepare mnist --source=PATH"
    assert_refused(flags, tmp_path, "train-images-idx3-ubyte.gz", command, cwd=tmp_path)
    assert not (tmp_path / "datasets").exists(), "an empty directory is left"
