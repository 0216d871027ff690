"""Predictions for files equal what the model itself returns, whatever the model is loaded from."""

import csv
import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

import trainer
from data.example_features import Feature, Features
from data.prepare.preparing import prepare
from data.prepare.sources import Options
from data.system.files import DataError
from data.tfrecord.split import batched_records, open_split
from tests.commands import run_python
from tests.damage import flip_bit
from trainer.hooks.export import _write
from trainer.predict import predicting
from trainer.predict.__main__ import _opened, _write_csv
from trainer.predict.models import open_model
from trainer.predict.predicting import _are_classes, predict
from trainer.predict.records import read_npz, records_of

NUM = 12


def build_model(config: trainer.Config) -> keras.Model:
    layers = keras.layers
    stack = [layers.Flatten(), layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1), name="image"), *stack])


DECLARING = """
import keras
from trainer import Config

def get_config():
    return Config(train_steps=1, batch_size=4)

def build_model(config):
    taken = {inputs}
    tensors = list(taken.values()) if isinstance(taken, dict) else [taken]
    flat = [keras.layers.Flatten()(keras.ops.cast(t, "float32") if t.dtype == "uint8"
            else keras.ops.cast(t % 7, "float32")) for t in tensors]
    both = keras.ops.concatenate([*flat, flat[0]], axis=-1)
    return keras.Model(taken, keras.layers.Dense(2)(both / 9))
"""

RECIPE = """
from trainer import Config

def get_config():
    return Config(train_steps=10, checkpoint_every_steps=5)

def build_model(config):
    from tests.unit.test_predict import build_model
    return build_model(config)
"""


TABLE_MODEL = """
def build_model(config):
    import keras
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
"""


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> trainer.Result:
    directory = tmp_path_factory.mktemp("run")
    (directory / "recipe.py").write_text(RECIPE)
    return trainer.train(directory / "recipe.py", data_dir=digits, model_dir=directory / "run")


@pytest.fixture(scope="module")
def pixels(digits: Path) -> npt.NDArray[np.uint8]:
    """The first images of the test split."""
    (records, *_) = batched_records(open_split(str(digits), "test"), NUM)
    examples = [tf.train.Example.FromString(record) for record in records]
    images = [e.features.feature["image"].bytes_list.value[0] for e in examples]
    return np.frombuffer(b"".join(images), np.uint8).reshape(NUM, 8, 8, 1)


def outputs(lines: Sequence[dict[str, Any]]) -> npt.NDArray[np.float32]:
    return np.array([line["output"] for line in lines], np.float32)


@pytest.mark.slow
def test_every_kind_of_model_predicts_as_the_model_itself(
    run: trainer.Result, pixels: npt.NDArray[np.uint8], tmp_path: Path
) -> None:
    np.savez(tmp_path / "images.npz", image=pixels)
    model = run.load_model()
    wanted = model(pixels / np.float32(255)).numpy()
    exported = run.paths["export"]
    newest = run.paths["checkpoints"] / "step-00000010"
    # Copies: without their run, its config file says nothing about them.
    alone = tmp_path / "alone"
    shutil.copytree(exported, alone)
    of_run = [Path(run.model_dir), newest, exported / "model.keras", exported / "saved_model"]
    for path in (*of_run, alone / "model.keras", alone / "saved_model"):
        lines = list(predict(str(path), str(tmp_path / "images.npz")))
        np.testing.assert_allclose(outputs(lines), wanted, rtol=0, atol=1e-6)
        assert "label" not in lines[0]
        if path in of_run:
            assert [line["predicted"] for line in lines] == wanted.argmax(axis=1).tolist()
    earlier = list(predict(run.model_dir, str(tmp_path / "images.npz"), "5"))
    assert np.abs(outputs(earlier) - wanted).max() > 1e-3
    by_method = run.predict(tmp_path / "images.npz", checkpoint="newest", num_examples=3)
    np.testing.assert_allclose(outputs(by_method), wanted[:3], rtol=0, atol=1e-6)


def test_records_and_folders_of_images_give_the_same_predictions(
    run: trainer.Result, pixels: npt.NDArray[np.uint8], digits: Path, tmp_path: Path
) -> None:
    for number, image in enumerate(pixels):
        (tmp_path / "photos" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        path = tmp_path / "photos" / str(number % 2) / f"{number:02}.png"
        path.write_bytes(tf.io.encode_png(image).numpy())
    wanted = run.load_model()(pixels / np.float32(255)).numpy()
    (shard,) = digits.glob("*-test.tfrecord*")
    from_split = list(predict(run.model_dir, num_examples=NUM))
    from_file = list(predict(run.model_dir, str(shard), num_examples=NUM))
    assert from_file == from_split
    assert all(isinstance(line["label"], int) for line in from_file)
    np.testing.assert_allclose(outputs(from_file), wanted, rtol=0, atol=1e-6)
    lines = list(predict(run.model_dir, str(tmp_path / "photos")))
    order = [int(Path(line["file"]).stem) for line in lines]
    assert order == [*range(0, NUM, 2), *range(1, NUM, 2)], "sorted by path"
    np.testing.assert_allclose(outputs(lines), wanted[order], rtol=0, atol=1e-6)


SEVERAL_LABELS = """
import tensorflow as tf
from trainer import Config

def get_config():
    return Config()

def build_model(config):
    import keras
    stack = [keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1), name="image"), *stack])

def parse(serialized):
    columns = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    found = tf.io.parse_example(serialized, columns)
    label = found["label"]
    pixels = tf.reshape(tf.io.decode_raw(found["image"], tf.uint8), [-1, 8, 8, 1])
    labels = tf.maximum(tf.one_hot(label, 10), tf.one_hot(label - label % 2, 10))
    return tf.cast(pixels, tf.float32) / 255, labels
"""


def test_all_lines_of_a_file_have_the_same_keys(
    run: trainer.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Even labels are one-hot, odd ones are not.
    copied = Path(shutil.copytree(run.model_dir, tmp_path / "run"))
    (tmp_path / "several.py").write_text(SEVERAL_LABELS)
    document = json.loads((copied / "config.json").read_text())
    document["recipe"] = str(tmp_path / "several.py")
    (copied / "config.json").write_text(json.dumps(document))
    monkeypatch.setattr(predicting, "_BATCH", 1)
    lines = list(predict(str(copied), num_examples=NUM))
    assert {sum(line["label"]) for line in lines} == {1, 2}
    assert len({tuple(line) for line in lines}) == 1


def test_damaged_records_are_left_out_if_the_run_leaves_them_out(
    run: trainer.Result, digits: Path, tmp_path: Path
) -> None:
    data = shutil.copytree(digits, tmp_path / "data")
    (shard,) = data.glob("*-test.tfrecord*")
    flip_bit(shard, 20)
    with pytest.raises(DataError, match=r"record 0"):
        list(predict(run.model_dir, data_dir=str(data), num_examples=2))
    skips = Path(shutil.copytree(run.model_dir, tmp_path / "run"))
    document = json.loads((skips / "config.json").read_text())
    document["config"]["data"]["on_corrupt"] = "skip"
    (skips / "config.json").write_text(json.dumps(document))
    without = list(predict(str(skips), data_dir=str(data), num_examples=2))
    complete = list(predict(run.model_dir, num_examples=3))
    assert [line["output"] for line in without] == [line["output"] for line in complete[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "inputs",
    [
        "keras.Input((8, 8, 1), dtype='uint8')",
        "{'id': keras.Input((1,), dtype='int64', name='id'),"
        "'image': keras.Input((8, 8, 1), name='image')}",
    ],
)
def test_saved_model_of_a_run_gets_the_inputs_that_the_model_declares(
    inputs: str, pixels: npt.NDArray[np.uint8], tmp_path: Path
) -> None:
    ids = np.arange(NUM) + 2**53
    for split in ("train", "test"):
        path = tmp_path / "source" / f"{split}.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez(path, image=pixels, id=ids, label=np.arange(NUM) % 2)
    prepare("npz:x", str(tmp_path / "data"), str(path.parent), Options(label="label"))
    (tmp_path / "mine.py").write_text(DECLARING.format(inputs=inputs))
    run = trainer.train(tmp_path / "mine.py", data_dir=tmp_path / "data", model_dir=tmp_path / "r")
    wanted = outputs(list(predict(run.model_dir)))
    assert np.ptp(wanted) > 0.1
    found = outputs(list(predict(str(run.paths["export"] / "saved_model"))))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_table_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    model.save(tmp_path / "model.keras")
    values = np.array([[1.5, -2.0, 0.1], [0.0, 1e-3, 7.0]], np.float32)
    with open(tmp_path / "table.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "label", "b", "c"])
        writer.writerows([[a, 1, b, c] for a, b, c in values.tolist()])
    lines = list(predict(str(tmp_path / "model.keras"), str(tmp_path / "table.csv")))
    np.testing.assert_allclose(outputs(lines), model(values).numpy(), rtol=0, atol=1e-6)
    assert [line["label"] for line in lines] == [1, 1]
    with open(tmp_path / "out.csv", "w", newline="") as out:
        _write_csv(lines, out)
    with open(tmp_path / "out.csv", newline="") as out:
        rows = list(csv.DictReader(out))
    assert [float(row["output_1"]) for row in rows] == [line["output"][1] for line in lines]
    assert json.loads(json.dumps(lines)) == lines


@pytest.mark.parametrize(
    ("labels", "are"),
    [
        ([1, 0], True),
        ([1.0, 0.0], False),
        ([b"a", b"b"], False),
        ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], True),
        ([[0, 1, 0], [1, 0, 0]], True),
        ([[False, True, False]] * 2, True),
        ([[0.0, 1.0], [1.0, 0.0]], False),  # There are 3 outputs.
        ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.5]], False),
        ([[0.0, 1.0, 1.0]] * 2, False),
        ([[0.0, 0.0, 0.0]] * 2, False),
        ([[b"a", b"b", b"c"]] * 2, False),
    ],
)
def test_labels_are_classes_if_they_are_integers_or_one_hot(labels: Any, are: bool) -> None:
    outputs = np.zeros((2, 3), np.float32)
    assert _are_classes(tf.constant(labels), outputs) == are
    for others in (outputs[:, :1], outputs[..., np.newaxis], {"a": outputs}):
        assert not _are_classes(tf.constant(labels), others)


def test_class_without_a_name_is_named_by_its_number(
    run: trainer.Result, digits: Path, tmp_path: Path
) -> None:
    data = shutil.copytree(digits, tmp_path / "data")
    (data / "label.labels.txt").write_text("a\nb\nc\n")
    lines = list(predict(run.model_dir, data_dir=str(data), num_examples=50))
    lines.sort(key=lambda line: -line["predicted"])  # The first one has no name.
    with open(tmp_path / "out.csv", "w", newline="") as out:
        _write_csv(lines, out)
    with open(tmp_path / "out.csv", newline="") as out:
        found = {int(row["predicted"]): row["class"] for row in csv.DictReader(out)}
    assert len(found.keys() & {0, 1, 2}) < len(found)
    assert found == {number: "abc3456789"[number] for number in found}


def test_outputs_that_are_no_numbers_are_null_in_json(tmp_path: Path) -> None:
    inputs = keras.Input((1,))
    keras.Model(inputs, keras.ops.log(inputs)).save(tmp_path / "model.keras")
    (tmp_path / "x.csv").write_text("x\n0\n1\n")
    words = (str(tmp_path / "model.keras"), f"--input={tmp_path / 'x.csv'}")
    done = run_python("-m", "trainer.predict", *words, check=True)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines()]
    assert [line["output"] for line in lines] == [[None], [0.0]]


def test_rows_of_a_csv_file_have_equal_columns(tmp_path: Path) -> None:
    lines = [{"example": 0, "output": [1.0]}, {"example": 1, "output": [1.0, 2.0]}]
    with (
        open(tmp_path / "out.csv", "w") as out,
        pytest.raises(DataError, match=r"example 1 has a column output_1.*--output=.*jsonl"),
    ):
        _write_csv(lines, out)


@pytest.mark.parametrize("error", [KeyboardInterrupt, DataError])
def test_output_is_replaced_only_when_it_is_complete(
    error: type[BaseException], tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("former")
    with pytest.raises(error), _opened(str(path)) as file:  # noqa: PT012  # It is the block that fails.
        print("a part", file=file, flush=True)
        raise error
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {path.name: "former"}
    with _opened(str(path)) as file:
        file.write("new")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {path.name: "new"}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("x.csv", "is the file of --input, which would be lost"),
        ("former.jsonl", "is no model"),
        ("missing/x.csv", "missing/x.csv cannot be written: No such file"),
        ("s3://bucket/x.csv", "must be a local file"),
    ],
)
def test_refused_command_leaves_all_files_as_they_are(
    output: str, message: str, tmp_path: Path
) -> None:
    before = {"x.csv": "a,b\n1,2\n", "former.jsonl": "{}\n"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    words = ("nowhere", "--input=x.csv", f"--output={output}")
    done = run_python("-m", "trainer.predict", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.csv", "word, number\n b , 7\n"),
        ("x.csv", "word;number\nb;7\n"),
        ("x.tsv", "word\tnumber\nb\t007\n"),
        ("x.csv.gz", "word,number\nb,7\n"),
    ],
)
def test_table_is_read_as_data_prepare_reads_it(name: str, content: str, tmp_path: Path) -> None:
    word = Feature("word", "text", "string", (), None, "none", "Text")
    number = Feature("number", "tensor", "int64", (), None, "none", "Tensor")
    features = Features([word, number], "")
    encoded = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(encoded) if name.endswith(".gz") else encoded)
    ((_, record),) = records_of(str(tmp_path / name), features, ["word", "number"], {})
    found = features.parse_example(tf.constant([record]))
    assert (found["word"].numpy().tolist(), found["number"].numpy().tolist()) == ([b"b"], [7])


@pytest.mark.parametrize(
    ("dtype", "typed", "read"),
    [
        ("int64", "9007199254740993", 2**53 + 1),
        ("float64", "1700000000.5", 1700000000.5),
        ("float32", ".5", 0.5),
        ("string", "007", b"007"),
        ("int64", "1.0", 1),
        ("int64", "007", 7),
        ("float32", "007", 7.0),
        ("int64", "1_000", "x.csv, line 2: 'x' must be of type int64. Received: '1_000'"),
        ("int64", "1.5", "must be of type int64. Received: '1.5'"),
        ("int64", "9223372036854775808", "must be of type int64. Received: '9223372036854775808'"),
        ("float32", "inf", "must be of type float64. Received: 'inf'"),
        ("float32", "1700000001", "Feature 'x' has a value that float32 does not hold"),
    ],
)
def test_numbers_of_a_csv_file_reach_the_model_unchanged(
    dtype: str, typed: str, read: object, tmp_path: Path
) -> None:
    taken = keras.Input((1,), dtype=dtype, name="x")
    if dtype == "string":
        output = keras.layers.StringLookup(vocabulary=["7", "007"])(taken)
    else:
        output = keras.layers.Rescaling(1.0, dtype=dtype)(taken) if dtype != "int64" else taken + 0
    keras.Model({"x": taken}, output).save(tmp_path / "model.keras")
    (tmp_path / "x.csv").write_text(f"x\n{typed}\n")
    lines = predict(str(tmp_path / "model.keras"), str(tmp_path / "x.csv"))
    if isinstance(read, str):
        with pytest.raises(DataError, match=read):
            list(lines)
    else:
        wanted = 2 if dtype == "string" else read
        assert np.ravel([line["output"] for line in lines]).tolist() == [wanted]


@pytest.mark.parametrize(
    ("dtype", "shape", "given", "read"),
    [
        ("float32", (), "20123456.5", 20123456.0),
        ("float32", (), "nan", np.nan),
        ("float32", (), "1e39", r"has 1e\+39 \(float64\).*float32, which does not hold it"),
        ("float32", (2,), np.array([20123456.5, -np.inf]), [20123456.0, -np.inf]),
        ("float32", (2,), np.array([1, 1e39]), r"has 1e\+39 \(float64\)"),
        ("int64", (2,), np.array([1.0, np.nan]), r"has nan \(float64\)"),
        ("string", (2,), np.array(["a", "ü"]), [b"a", "ü".encode()]),
        ("string", (2,), np.array([b"a", b""]), [b"a", b""]),
    ],
)
def test_values_of_files_are_stored_as_the_training_data_was(
    dtype: str, shape: tuple[int], given: Any, read: Any, tmp_path: Path
) -> None:
    features = Features([Feature("x", "tensor", dtype, shape, None, "none", "Tensor")], "")
    path = str(tmp_path / ("x.csv" if isinstance(given, str) else "x.npz"))
    if isinstance(given, str):
        Path(path).write_text(f"x,y\n{given},\n")
    else:
        np.savez(path, x=given[np.newaxis])
    records = records_of(path, features, ["x"], {})
    if isinstance(read, str):
        with pytest.raises(DataError, match=read):
            list(records)
    else:
        serialized = tf.constant([record for _, record in records])
        (stored,) = features.parse_example(serialized)["x"].numpy()
        np.testing.assert_array_equal(stored, np.array(read, stored.dtype))


@pytest.mark.slow
def test_table_that_a_run_was_prepared_from_is_predicted(tmp_path: Path) -> None:
    """Its label has names, also NA; an integer is written as 1.0, a float as 007."""
    rows = ["1.0,007,cat", "2,0.5,NA", "3,1e3,cat"] * 20
    (tmp_path / "x.csv").write_text("\n".join(["a,b,kind", *rows]))
    how = Options(label="kind", integer="a", float="b", test_fraction=0.4)
    prepare("csv:x", str(tmp_path / "data"), str(tmp_path / "x.csv"), how)
    recipe = tmp_path / "mine.py"
    recipe.write_text(RECIPE.partition("def build_model")[0] + TABLE_MODEL)
    run = trainer.train(recipe, data_dir=tmp_path / "data", model_dir=tmp_path / "run")
    lines = list(predict(run.model_dir, str(tmp_path / "x.csv"), num_examples=3))
    assert [line["label"] for line in lines] == [1, 0, 1], "NA comes before cat"
    assert {line["class"] for line in lines} <= {"NA", "cat"}


CLASSES = {"y": {"NA": 0, "cat": 1}}


@pytest.mark.parametrize(
    ("labels", "read"),
    [
        (["NA", "1", "1.0"], [0, 1, 1]),
        (np.array(["cat", "NA"]), [1, 0]),
        (np.array([b"cat", b"NA"]), [1, 0]),
        (
            ["NA", "dog"],
            r"x.csv, line 3: 'y' must be .* Received: 'dog'\. .*NA, cat\. .* leave 'y'",
        ),
        (["NA", ""], "x.csv, line 3: 'y' must be .* Received: ''.* leave 'y' out of the file"),
        (np.array(["NA", "dog"]), "x.npz, row 1: 'y' must be .* Received: 'dog'"),
        (np.array([b"NA", b"dog"]), "x.npz, row 1: 'y' must be .* Received: 'dog'"),
    ],
)
def test_labels_of_files_are_numbers_or_names_of_classes(
    labels: list[str] | npt.NDArray[Any], read: list[int] | str, tmp_path: Path
) -> None:
    features = Features([Feature("y", "label", "int64", (), 2, "none", "ClassLabel")], "")
    path = str(tmp_path / ("x.csv" if isinstance(labels, list) else "x.npz"))
    if isinstance(labels, list):
        Path(path).write_text("x,y\n" + "".join(f"1,{label}\n" for label in labels))
    else:
        np.savez(path, y=labels)
    records = records_of(path, features, ["y"], CLASSES)
    if isinstance(read, str):
        with pytest.raises(DataError, match=read):
            list(records)
    else:
        serialized = tf.constant([record for _, record in records])
        assert features.parse_example(serialized)["y"].numpy().tolist() == read


@pytest.mark.parametrize(
    ("dtype", "typed", "read"),
    [
        ("int64", "3|17", [3, 17, -1]),
        ("int64", " 3 17 5 ", [3, 17, 5]),
        ("int64", "", [-1, -1, -1]),
        ("int64", "4|x", r"x.csv, line 2: 'x' must be a list of type int64.* 'x' in '4\|x'"),
        ("int64", "1|2|3|4", "has 4 items, but the longest .* has 3"),
        ("float32", "1|.5|3", [1.0, 0.5, 3.0]),
        ("float32", "1|2", r"has shape \[2\].*\[3\]"),
        ("string", "007|sci fi", [b"007", b"sci fi", b""]),
        ("string", "sci fi|", [b"sci fi", b"", b""]),
        ("string", "drama", [b"drama", b"", b""]),
        ("string", "sci fi", r"one item or several.* such as 'sci\|fi' or 'sci fi\|'"),
    ],
)
def test_lists_of_a_csv_file_are_read_as_data_prepare_reads_them(
    dtype: str, typed: str, read: list[Any] | str, tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_text(f'x\n"{typed}"\n')
    encoding = "none" if dtype == "string" else "bytes"
    features = Features([Feature("x", "tensor", dtype, (3,), None, encoding, "Tensor")], "")
    records = records_of(str(tmp_path / "x.csv"), features, ["x"], {})
    if isinstance(read, str):
        with pytest.raises(DataError, match=read):
            list(records)
    else:
        serialized = tf.constant([record for _, record in records])
        assert features.parse_example(serialized)["x"].numpy().tolist() == [read]


@pytest.mark.parametrize(
    ("dtype", "encoding"),
    [("float32", "none"), ("float64", "bytes"), ("float32", "zlib"), ("int32", "bytes")],
)
@pytest.mark.parametrize("name", ["x.csv", "x.npz"])
def test_number_that_is_the_label_may_be_missing(
    dtype: str, encoding: str, name: str, tmp_path: Path
) -> None:
    """Of the only array, which is the only input, the name does not count."""
    path = tmp_path / name
    if name == "x.csv":
        path.write_text("x\n5\n")
    else:
        np.savez(path, photos=np.array([5]))
    x = Feature("x", "tensor", "int64", (), None, "none", "Scalar")
    features = Features([x, Feature("y", "tensor", dtype, (), None, encoding, "Tensor")], "")
    ((about, record),) = records_of(str(path), features, ["x", "y"], {"y": {}})
    assert about == {"label": None}
    found = features.parse_example(tf.constant([record]))
    assert (found["x"].numpy().tolist(), found["y"].numpy().tolist()) == ([5], [0])


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_files_of_images_are_refused_if_training_had_other_values(
    dtype: str, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(tf.io.encode_png(np.zeros([8, 8, 1], np.uint8)).numpy())
    features = Features([Feature("x", "tensor", dtype, (8, 8, 1), None, "bytes", "Tensor")], "")
    needed = rf"a.png: 'x' is {dtype} .*numpy\.savez\('images.npz', x=images\).*--input=images.npz"
    with pytest.raises(DataError, match=needed):
        list(records_of(str(tmp_path), features, ["x"], {}))


def test_data_that_a_model_without_a_run_cannot_choose_from_is_refused(
    digits: Path, tmp_path: Path
) -> None:
    data = shutil.copytree(digits, tmp_path / "data")
    tree = json.loads((data / "features.json").read_text())
    found = tree["featuresDict"]["features"]
    found["a"] = found["b"] = found.pop("label")
    (data / "features.json").write_text(json.dumps(tree))
    build_model(trainer.Config()).save(tmp_path / "model.keras")
    needed = "has 2 ClassLabels .* trainer.predict has no such flag: give it the run"
    with pytest.raises(DataError, match=needed):
        list(predict(str(tmp_path / "model.keras"), data_dir=str(data)))


@pytest.mark.parametrize(
    "part", ["", "checkpoints/step-00000010", "export/model.keras", "export/saved_model"]
)
def test_config_file_that_others_can_write_is_not_executed(
    part: str, run: trainer.Result, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(run.model_dir, tmp_path / "run"))
    recipe = tmp_path / "mine.py"
    recipe.write_text(f"print('executed')\n{RECIPE}")
    recipe.chmod(0o666)
    document = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**document, "recipe": str(recipe)}))
    done = run_python("-m", "trainer.predict", str(copied / part), "--num_examples=1")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"{recipe} can be written by every user" in done.stderr


def test_checkpoint_without_its_run_is_refused(run: trainer.Result, tmp_path: Path) -> None:
    checkpoint = run.paths["checkpoints"] / "step-00000010"
    shutil.copytree(checkpoint, tmp_path / "mine" / checkpoint.name)
    with pytest.raises(trainer.UsageError, match="is a checkpoint, but no run has it"):
        list(predict(str(tmp_path / "mine" / checkpoint.name)))


@pytest.mark.parametrize("name", ["x.tfrecord", "x.csv", "x.npz", "photos"])
def test_input_that_does_not_exist_is_named(name: str, run: trainer.Result, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"--input=.*{name} does not exist\. Give"):
        list(predict(run.model_dir, str(tmp_path / name)))


@pytest.mark.parametrize("content", ["", "an array", "cut"])
def test_file_that_is_no_npz_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with open(path, "wb") as file:
        if content == "an array":
            np.save(file, np.zeros(3))
        elif content:
            np.savez_compressed(file, x=np.arange(99))
    if content == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"x.npz cannot be read as NPZ: .+\. Write it again"):
        read_npz(str(path))


def test_model_with_named_inputs_and_outputs_predicts_all(tmp_path: Path) -> None:
    inputs = {name: keras.Input((2,), name=name) for name in ("left", "right")}
    joined = keras.layers.Concatenate()([inputs["left"], inputs["right"]])
    heads = {"sum": keras.layers.Dense(1)(joined), "kind": keras.layers.Dense(3)(joined)}
    model = keras.Model(inputs, heads)
    model.save(tmp_path / "model.keras")
    rows = np.random.default_rng(0).random((2, 4, 2), np.float32)
    np.savez(tmp_path / "rows.npz", left=rows[0], right=rows[1])
    lines = list(predict(str(tmp_path / "model.keras"), str(tmp_path / "rows.npz")))
    wanted = model({"left": rows[0], "right": rows[1]})
    for name in ("sum", "kind"):
        found = np.array([line["output"][name] for line in lines], np.float32)
        np.testing.assert_allclose(found, wanted[name].numpy(), rtol=0, atol=1e-6)


class Joined(keras.Model):
    """Takes any nest of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.last = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.last(keras.ops.concatenate(tf.nest.flatten(inputs)))


@pytest.mark.filterwarnings("ignore:.*Change the tensor name")
@pytest.mark.parametrize("declares", [True, False])
@pytest.mark.parametrize(
    "nest", [(2, 1), [1], {"b": [3, 1], "a": 2, "A": 5}, {"x": 1}, tuple(range(12))]
)
def test_saved_model_takes_inputs_in_the_nest_of_the_model(
    nest: Any, declares: bool, tmp_path: Path
) -> None:
    specs = tf.nest.map_structure(lambda _: tf.TensorSpec([None, 1]), nest)
    values = tf.nest.map_structure(lambda number: tf.constant([[float(number)]]), nest)
    model = Joined()
    if declares:
        inputs = tf.nest.map_structure(lambda _: keras.Input((1,)), nest)
        model = keras.Model(inputs, model(inputs))
    wanted = model(values)
    _write(model, str(tmp_path), specs, has_former=False)
    found = open_model(str(tmp_path / "saved_model"), None).call(values)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"image": np.full((2, 8, 8, 1), 0.5)},
            r"has 0\.5 \(float64\).*uint8, which does not hold",
        ),
        ({"image": np.zeros((2, 4, 4, 1), np.uint8)}, r"shape \[4, 4, 1\].*\[8, 8, 1\]"),
        ({"a": np.zeros((2, 1)), "b": np.zeros((2, 1))}, "has no 'image'.*a, b"),
        ({"a": np.zeros((2, 1)), "b": np.zeros((3, 1))}, "differ in their number of rows"),
    ],
)
def test_file_that_does_not_fit_is_named_with_what_is_needed(
    run: trainer.Result, content: dict[str, npt.NDArray[Any]], message: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "file.npz", **content)  # type: ignore[arg-type]  # Names of arrays.
    with pytest.raises(DataError, match=message):
        list(predict(run.model_dir, str(tmp_path / "file.npz")))
    with pytest.raises(trainer.UsageError, match="is no model"):
        list(predict(str(tmp_path / "file.npz")))
