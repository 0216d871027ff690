"""Every strategy trains real data to the same accuracy, and leaves a complete run directory."""

import functools
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.example_features import read_features
from data.features import default_parse
from data.tfrecord.split import open_split
from tests.cluster.runs import (
    ONE_OF_EACH_STRATEGY,
    ROOT,
    Run,
    Topology,
    assert_one_error,
    events,
    largest_difference,
    snapshot,
    train,
    train_here,
)
from tests.cluster.runs import run as run_trainer

TRAINED = [*ONE_OF_EACH_STRATEGY, Topology("ps-sync-3+1")]
LINEAR = "--config=tests/cluster/configs/linear.py"


@pytest.fixture(params=TRAINED)
def topology(request: pytest.FixtureRequest) -> Topology:
    topology: Topology = request.param
    return topology


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Returns the complete run of a topology with the default config; all tests share it.

    Temporary files of the run go to a directory next to it.
    """

    @functools.cache
    def trained(topology: str) -> Run:
        directory = tmp_path_factory.mktemp(f"digits-{topology}")
        (directory / "temporary").mkdir()
        env = {"TMPDIR": str(directory / "temporary"), "PYTHONDONTWRITEBYTECODE": ""}
        return train(topology, directory / "run", env=env)

    return trained


@pytest.fixture
def run(topology: str, run_of: Callable[[str], Run]) -> Run:
    return run_of(topology)


def test_no_temporary_file_and_without_xla_no_program_is_left(run: Run) -> None:
    assert list((run.model_dir.parent / "temporary").iterdir()) == []
    assert not (run.model_dir / "compiled").exists()


def test_default_config_reaches_its_accuracy(run: Run) -> None:
    result = run.result
    assert (result["exit_code"], result["why"]) == (0, "done")
    assert result["eval"]["accuracy"] >= 0.96
    assert result["step"] >= 1000
    assert result["examples"] == result["step"] * 64
    assert result["seconds"] > 0


def test_output_ends_with_the_result(run: Run) -> None:
    done, path, following = run.stdout.splitlines()[-3:]
    assert f"{run.result['eval']['accuracy']:.4f}" in done
    assert path == str(run.model_dir / "result.json")
    assert following.startswith(f"next: python -m trainer.evaluate {run.model_dir}")


def test_config_json_says_what_was_trained_and_where(run: Run, topology: Topology) -> None:
    assert run.config["strategy"] == topology.strategy
    assert run.config["config"]["train_steps"] == 1000
    assert run.config["config"]["data"]["window_batches"] == 32
    assert run.config["versions"]["tensorflow"] == tf.__version__
    assert (run.config["train_examples"], run.config["eval_examples"]) == (1437, 360)
    cluster = run.config["cluster"]
    jobs = cluster["cluster"] if cluster else {}
    named = [f"{job}-{index}" for job, known in jobs.items() for index in range(len(known))]
    assert named == list(topology.tasks)


def test_metrics_jsonl_reports_training_and_evaluation(run: Run, topology: Topology) -> None:
    reports = run.metrics("train")
    assert len(reports) == 10
    assert [report["step"] // 100 for report in reports] == list(range(1, 11))
    for report in reports:
        assert report["examples"] == report["step"] * 64
        assert report["learning_rate"] == pytest.approx(0.002)
        assert report["examples_per_sec"] == pytest.approx(report["steps_per_sec"] * 64)
        assert 0 <= report["accuracy"] <= 1
        assert ("worker_steps" in report) == (topology.strategy == "ps")
    assert reports[-1]["loss"] < 0.2 < reports[0]["loss"]
    assert reports[-1]["seconds"] > reports[0]["seconds"] > 0
    evaluations = run.metrics("eval")
    assert [report["step"] // 500 for report in evaluations] == [1, 2]
    assert {report["examples"] for report in evaluations} == {360}
    assert evaluations[-1]["accuracy"] == run.result["eval"]["accuracy"]


def test_checkpoints_are_the_steps_asked_for_and_the_best(run: Run) -> None:
    *best, first, last = run.checkpoints()
    assert first.startswith("step-000005")
    assert last == f"step-{run.result['step']:08d}"
    assert len(best) == 1
    assert best[0].startswith("best-")
    evaluations = run.metrics("eval")
    most = max(evaluations, key=lambda report: report["accuracy"])
    assert best[0] == f"best-{most['step']:08d}"
    for name in run.checkpoints():
        mark = run.mark(name)
        assert mark["step"] == mark["next_batch"] == int(name.partition("-")[2])
        assert all(np.isfinite(value).all() for value in run.weights(name).values())
    assert run.variables()["optimizer/_iterations/.ATTRIBUTES/VARIABLE_VALUE"] == run.result["step"]


def test_tensorboard_files_hold_the_scalars(run: Run) -> None:
    for split in ("train", "eval"):
        scalars: dict[str, list[float]] = {}
        for _, value in events(run.model_dir / "tensorboard" / split, "scalars"):
            scalars.setdefault(value.tag, []).append(float(tf.make_ndarray(value.tensor)))
        wanted = [report["accuracy"] for report in run.metrics(split)]
        assert scalars["accuracy"] == pytest.approx(wanted)
        assert len(scalars["loss"]) == len(wanted)


def examples_of(data_dir: Path) -> tuple[tf.Tensor, tf.Tensor]:
    """The examples that a run on `data_dir` evaluates."""
    paths = [shard.path for shard in open_split(str(data_dir), "test").shards]
    serialized = list(tf.data.TFRecordDataset(paths).as_numpy_iterator())
    return default_parse(read_features(str(data_dir)))(tf.constant(serialized))


def test_exported_models_have_the_accuracy_of_the_result(run: Run, digits: Path) -> None:
    images, labels = examples_of(digits)
    assert len(labels) == 360
    loaded = keras.models.load_model(run.model_dir / "export" / "model.keras")
    served = tf.saved_model.load(str(run.model_dir / "export" / "saved_model"))
    # The same under each strategy.
    serve = served.signatures["serving_default"]
    assert list(serve.structured_input_signature[1]) == ["keras_tensor"]
    assert list(serve.structured_outputs) == ["output_0"]
    names = {v.path.split("/")[-2] for v in loaded.variables}
    assert names == {"conv2d", "conv2d_1", "dense", "dense_1"}
    for logits in (loaded(images), served.serve(images)):
        hits = np.argmax(logits, axis=-1) == labels
        assert float(np.mean(hits)) == pytest.approx(run.result["eval"]["accuracy"], abs=1e-9)


def test_each_task_of_a_local_cluster_has_a_log(run: Run, topology: Topology) -> None:
    tasks = run.model_dir / "tasks"
    logs = {path.name for path in tasks.glob("*.log")} if tasks.exists() else set()
    assert logs == {f"{task}.log" for task in topology.tasks}
    if logs:
        start, _, output = (tasks / f"{topology.tasks[0]}.log").read_text().partition("\n")
        assert start.startswith(f"=== {topology.tasks[0].replace('-', ' ')}, start 1, process ")
        # The launcher prints the last line.
        assert output.splitlines() == run.stdout.splitlines()[:-1]


@pytest.mark.parametrize("topology", ONE_OF_EACH_STRATEGY[:2])
def test_finished_run_says_so_and_does_nothing(run: Run, topology: Topology) -> None:
    before = snapshot(run.model_dir)
    again = train(topology, run.model_dir)
    assert again.stdout.count("\n") == 1
    assert str(run.model_dir) in again.stdout
    assert f"{run.result['step']:,}" in again.stdout
    assert snapshot(run.model_dir) == before


# The process of mirrored refuses the directory itself; the same check precedes each local cluster.
@pytest.mark.parametrize(
    ("topology", "flags", "named"),
    [
        # The run in the directory is finished, or could continue.
        ("mirrored-2", (LINEAR, "--train_steps=1000"), ["variables"]),
        ("multiworker-2", ("--batch_size=32", "--train_steps=2000"), ["batch_size", "64", "32"]),
    ],
    ids=["model", "batch size"],
)
def test_directory_of_another_run_is_refused_and_stays_as_it_is(
    run: Run, topology: str, flags: tuple[str, ...], named: list[str]
) -> None:
    before = snapshot(run.model_dir)
    other = train(topology, run.model_dir, *flags, exit_code=2)
    assert_one_error(other, *named)
    assert snapshot(run.model_dir) == before


def test_digits_are_prepared_on_first_use(tmp_path: Path) -> None:
    argv = (f"--config={ROOT}/configs/digits.py", "--train_steps=1", "--config.export=False")
    where = f"--model_dir={tmp_path / 'run'}"
    run = run_trainer((*argv, where), tmp_path / "run", cwd=tmp_path)
    assert list((tmp_path / "datasets" / "digits").glob("digits-train.tfrecord-*"))
    assert run.config["train_examples"] == 1437


@pytest.fixture(scope="session")
def mnist(mnist_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from data.prepare.preparing import prepare

    directory = tmp_path_factory.mktemp("datasets") / "mnist"
    prepare("mnist", str(directory), source=str(mnist_source))
    return directory


@pytest.mark.parametrize("each", ONE_OF_EACH_STRATEGY)
def test_mnist_replica_reaches_its_accuracy(each: Topology, mnist: Path, tmp_path: Path) -> None:
    run = train(each, tmp_path / "run", "--config=configs/mnist_replica.py", f"--data_dir={mnist}")
    assert run.result["step"] >= 3000
    assert run.result["eval"]["accuracy"] >= 0.955
    assert run.metrics("eval")[-1]["examples"] == 10_000
    # The reported loss is the cross entropy, as in the original program.
    images, labels = examples_of(mnist)
    model = keras.models.load_model(run.model_dir / "export" / "model.keras")
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = float(crossentropy(labels, model(images)))
    assert run.result["eval"]["loss"] == pytest.approx(found, rel=1e-4)


def test_rows_of_an_embedding_are_summed_over_workers_with_unequal_parts(tmp_path: Path) -> None:
    config = f"{ROOT}/tests/cluster/configs/embedding.py"
    found = train("multiworker-3", tmp_path / "three", f"--config={config}").variables()
    wanted = train_here(config, tmp_path / "one").variables()
    assert any(value.shape == (17, 8) for value in wanted.values())
    assert largest_difference(found, wanted) < 1e-5
