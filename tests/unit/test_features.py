"""features.json of tensorflow-datasets is understood, and examples that TFDS wrote are decoded."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data.example_features import Features, read_features
from data.features import default_parse, from_bytes, image_raw_parse
from data.system.files import DataError
from data.tfrecord.examples import example_bytes


def written(
    directory: Path, spec: dict[str, object], examples: list[dict[str, object]]
) -> tuple[Features, tf.Tensor]:
    """What TFDS itself writes for such features and examples."""
    connectors = tfds.features.FeaturesDict(spec)
    connectors.save_config(str(directory))
    serialized = [connectors.serialize_example(e) for e in examples]
    return read_features(str(directory)), tf.constant(serialized)


def test_every_supported_feature_is_decoded_as_it_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)  # `test_inputs_have_the_dtype_...` has other features.
    spec = {
        "zlib": tfds.features.Tensor(shape=(3,), dtype=np.float32, encoding="zlib"),
        "wide": tfds.features.Tensor(shape=(2,), dtype=np.uint32, encoding="zlib"),
        "bytes": tfds.features.Tensor(shape=(2,), dtype=np.uint32, encoding="bytes"),
        "numbers": tfds.features.Tensor(shape=(2, 2), dtype=np.float32),
        "small": tfds.features.Tensor(shape=(3,), dtype=np.uint8),
        "png": tfds.features.Image(shape=(4, 5, 3)),
        "text": tfds.features.Text(),
        "nested": {"label": tfds.features.ClassLabel(num_classes=3)},
    }
    examples = [
        {
            "zlib": rng.random(3, np.float32),
            "wide": np.array([2**32 - 1, 7], np.uint32),
            "bytes": np.array([2**32 - 1, 7], np.uint32),
            "numbers": rng.random((2, 2), np.float32),
            "small": rng.integers(0, 256, 3, np.uint8),
            "png": rng.integers(0, 256, (4, 5, 3), np.uint8),
            "text": f"héllo {i}",
            "nested": {"label": i % 3},
        }
        for i in range(7)
    ]
    features, serialized = written(tmp_path, spec, examples)
    assert set(features) == {*spec, "nested/label"} - {"nested"}
    assert features["nested/label"].num_classes == 3
    parsed = tf.function(features.parse_example)(serialized)
    for name in ("zlib", "wide", "bytes", "numbers", "small", "png"):
        expected = np.array([example[name] for example in examples])
        assert parsed[name].dtype.name == features[name].dtype
        assert np.array_equal(parsed[name], expected), name
    assert [text.decode() for text in parsed["text"].numpy()] == [e["text"] for e in examples]
    assert parsed["nested/label"].numpy().tolist() == [0, 1, 2, 0, 1, 2, 0]


AS_IDS = "{'x': keras.Input((1,), dtype='int64')"
IMAGE = tfds.features.Tensor(shape=(2, 2, 1), dtype=np.uint8, encoding="bytes")
LABEL = tfds.features.ClassLabel(num_classes=10)


@pytest.mark.parametrize(
    "image",
    [IMAGE, tfds.features.Image(shape=(2, 2, 1), encoding_format="jpeg")],
    ids=["bytes", "JPEG"],
)
def test_default_parse_scales_images_and_has_static_shapes(image: object, tmp_path: Path) -> None:
    example = {"image": np.full((2, 2, 1), 200, np.uint8), "label": 9}
    features, serialized = written(tmp_path, {"image": image, "label": LABEL}, [example] * 4)
    parse = tf.function(default_parse(features)).get_concrete_function(
        tf.TensorSpec([4], tf.string)
    )
    assert [tensor.shape for tensor in parse.outputs] == [[4, 2, 2, 1], [4]]
    inputs, labels = parse(serialized)
    assert np.allclose(inputs, 200 / 255, atol=0.02)
    assert (inputs.dtype, labels.dtype) == (tf.float32, tf.int64)
    assert labels.numpy().tolist() == [9] * 4


@pytest.mark.parametrize("device", ["CPU:0", "GPU:0"])
def test_what_follows_is_not_made_one_with_the_scale_of_bytes(device: str) -> None:
    values = np.arange(256, dtype=np.uint8)

    def followed(values: tf.Tensor) -> tf.Tensor:
        with tf.device(device):  # Without a GPU, TensorFlow runs its ops on the CPU.
            scaled = from_bytes(values)
        assert (scaled.op.type == "Dequantize") is (device == "CPU:0")
        return scaled * 0.3

    wanted = from_bytes(tf.constant(values)).numpy() * np.float32(0.3)
    in_graph = tf.function(followed, input_signature=[tf.TensorSpec([None], tf.uint8)])(values)
    (in_dataset,) = tf.data.Dataset.from_tensors(values).map(followed)
    assert np.array_equal(in_graph, wanted)
    assert np.array_equal(in_dataset, wanted)
    assert not np.array_equal(wanted, values.astype(np.float32) * np.float32(0.3 / 255))


def test_from_bytes_takes_bytes_alone() -> None:
    with pytest.raises(TypeError, match="from_bytes takes uint8, not int32"):
        from_bytes(tf.constant([1, 2]))


def test_number_as_label_is_rounded_to_float32_and_is_no_input(tmp_path: Path) -> None:
    price = tfds.features.Tensor(shape=(), dtype=np.float64, encoding="bytes")
    spec = {"x": tfds.features.Scalar(np.float32), "price": price, "word": tfds.features.Text()}
    features, serialized = written(tmp_path, spec, [{"x": 1.0, "price": 20123456.5, "word": "a"}])
    inputs, labels = tf.function(default_parse(features, label="price"))(serialized)
    assert inputs.numpy().tolist() == [[1.0]]
    assert (labels.dtype, labels.numpy().tolist()) == (tf.float32, [20123456.0])
    with pytest.raises(DataError, match="is no number, so that it cannot be the label"):
        default_parse(features, label="word")


def tensor(dtype: type[np.generic]) -> tfds.features.Tensor:
    return tfds.features.Tensor(shape=(2,), dtype=dtype, encoding="bytes")


@pytest.mark.parametrize(
    ("feature", "value", "declared", "wanted"),
    [
        (tfds.features.Scalar(np.int64), 2**53 + 1, "int64", 2**53 + 1),
        (tfds.features.Scalar(np.int64), 100_000_000, "float32", 100_000_000),
        (tfds.features.Scalar(np.int64), -(2**63), "float32", -(2**63)),
        (tfds.features.Scalar(np.uint32), 2**32 - 256, "float32", 2**32 - 256),
        (tfds.features.Scalar(np.int64), 2**24 + 1, "float64", 2**24 + 1),
        (tfds.features.Scalar(np.int64), 7, "int32", 7),
        (tfds.features.Scalar(np.uint32), 2**32 - 1, "int64", 2**32 - 1),
        (tfds.features.Scalar(np.float32), 3.0, "int64", 3),
        (tfds.features.Scalar(np.float32), 0.1, "bfloat16", np.float32(0.1)),
        (tfds.features.Scalar(np.bool_), True, "float32", 1),
        (tfds.features.Text(), "007", "string", b"007"),
        (tensor(np.float64), [1 / 3, np.inf], "float32", [np.float32(1 / 3), np.inf]),
        (tensor(np.float64), [-3.0, 700.0], None, [-3, 700]),
        (tensor(np.float64), [1700000000.123, 1e300], "float64", [1700000000.123, 1e300]),
        (tensor(np.int64), [2**40, -1], "int64", [2**40, -1]),
        (tensor(np.uint8), [200, 51], "int32", [200, 51]),
        (tensor(np.uint8), [255, 51], "float32", [1, np.float32(51) * np.float32(1 / 255)]),
    ],
)
def test_inputs_have_the_dtype_that_the_model_declares(
    feature: object, value: object, declared: Any, wanted: Any, tmp_path: Path
) -> None:
    spec, example = {"x": feature, "label": LABEL}, {"x": value, "label": 1}
    features, serialized = written(tmp_path, spec, [example] * 2)
    alone = tf.function(default_parse(features, ("x",), "", declared))(serialized)[0]
    in_dict = tf.function(default_parse(features, ("x",), "", {"x": declared}))(serialized)[0]
    for read in (alone, in_dict["x"]):
        assert read.dtype == {"bfloat16": "float32", None: "float32"}.get(declared, declared)
        assert np.array_equal(read.numpy().reshape(2, -1)[1], np.ravel(wanted))


@pytest.mark.parametrize(
    ("feature", "value", "declared", "said"),
    [
        (tfds.features.Scalar(np.int64), 2**24 + 1, "float32", AS_IDS),
        (tfds.features.Scalar(np.int64), 2**53 + 1, "float64", AS_IDS),
        (tfds.features.Scalar(np.int64), 2**63 - 1, "float32", AS_IDS),
        (tfds.features.Scalar(np.int64), 2**31, "int32", "keras.Input(..., dtype='int64')"),
        (tfds.features.Scalar(np.int64), -1, "uint8", "keras.Input(..., dtype='int64')"),
        (tfds.features.Scalar(np.float32), 1.5, "int64", "keras.Input(..., dtype='float32')"),
        (tfds.features.Scalar(np.float32), np.nan, "int64", "keras.Input(..., dtype='float32')"),
        (tensor(np.float64), [0.5, 1700000000.5], "float32", "keras.Input(..., dtype='float64')"),
        (tensor(np.float64), [0.5, 1e39], "float32", "keras.Input(..., dtype='float64')"),
    ],
)
def test_value_that_the_dtype_of_the_input_would_change_is_an_error_with_advice(
    feature: object, value: Any, declared: str, said: str, tmp_path: Path
) -> None:
    spec = {"x": feature, "label": LABEL}
    small = [0, 0] if isinstance(value, list) else 0
    examples: list[dict[str, object]] = [{"x": each, "label": 1} for each in (small, value)]
    features, serialized = written(tmp_path, spec, examples)
    for each in (declared, {"x": declared}):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            tf.function(default_parse(features, ("x",), "", each))(serialized)
        message = str(caught.value).replace("\\'", "'")
        assert f"Feature 'x' has a value that {declared} does not hold" in message
        assert said in message


@pytest.mark.parametrize(
    ("feature", "declared", "said"),
    [
        (tfds.features.Text(), "float32", "is text, but the model takes float32.*dtype='string'"),
        (tfds.features.Scalar(np.int64), "string", "is int64, but the model .*dtype='int64'"),
    ],
)
def test_text_for_numbers_fails(feature: object, declared: str, said: str, tmp_path: Path) -> None:
    features, _ = written(tmp_path, {"x": feature, "label": LABEL}, [])
    for each in (declared, {"x": declared}):
        with pytest.raises(DataError, match=said):
            default_parse(features, ("x",), "", each)


@pytest.mark.parametrize("label", [-1, 10])
def test_label_out_of_range_stops_with_the_features_name(tmp_path: Path, label: int) -> None:
    features, _ = written(tmp_path, {"image": IMAGE, "label": LABEL}, [])
    example = example_bytes({"image": bytes(4), "label": label})
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)'label' is outside \[0, 10\)"):
        default_parse(features)(tf.constant([example]))


def test_raw_bytes_of_the_wrong_size_are_not_taken_for_two_examples(tmp_path: Path) -> None:
    features, _ = written(tmp_path, {"image": IMAGE, "label": LABEL}, [])
    example = example_bytes({"image": bytes(8)})
    with pytest.raises(tf.errors.InvalidArgumentError):
        features.parse_example(tf.constant([example]), ["image"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"image": IMAGE}, "0 ClassLabels (none)"),
        ({"a": LABEL, "b": LABEL, "image": IMAGE}, "2 ClassLabels (a, b)"),
        ({"label": LABEL, "a": IMAGE, "b": IMAGE}, "2 images or tensors (a, b)"),
        ({"label": LABEL, "image": tfds.features.Image()}, "shape [None, None, 3]: it varies"),
        ({"label": LABEL, "x": tensor(np.uint64)}, "has dtype 'uint64' in bytes, which"),
    ],
)
def test_what_the_default_cannot_parse_is_told_to_define_parse(
    tmp_path: Path, spec: dict[str, object], message: str
) -> None:
    features, _ = written(tmp_path, spec, [])
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        default_parse(features)
    assert "def parse(serialized)" in str(caught.value)


def test_model_that_is_not_built_yet_may_take_several_tensors_by_name(tmp_path: Path) -> None:
    images = {"a": np.full((2, 2, 1), 1, np.uint8), "b": np.full((2, 2, 1), 2, np.uint8)}
    spec = {"label": LABEL, "a": IMAGE, "b": IMAGE}
    features, serialized = written(tmp_path, spec, [{"label": 4, **images}])
    inputs, labels = default_parse(features, all_if_unclear=True)(serialized)
    assert sorted(inputs) == ["a", "b"]
    assert labels.numpy().tolist() == [4]
    with pytest.raises(DataError, match="2 images or tensors"):
        default_parse(features, declared="float32")
    built, _ = default_parse(features, declared={"b": "float32"})(serialized)
    assert sorted(built) == ["b"]


def test_unsupported_feature_is_an_error_only_where_it_is_asked_for(tmp_path: Path) -> None:
    boxes = tfds.features.Sequence(tfds.features.BBoxFeature())
    spec = {"image": IMAGE, "label": LABEL, "boxes": boxes}
    example = {"image": np.zeros((2, 2, 1), np.uint8), "label": 4, "boxes": []}
    features, serialized = written(tmp_path, spec, [example])
    assert default_parse(features)(serialized)[1].numpy().tolist() == [4]
    with pytest.raises(DataError, match=r"'boxes'.*Sequence"):
        features.parse_example(serialized)


def test_missing_or_foreign_metadata_tells_to_define_parse(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist.*def parse\(serialized\)"):
        read_features(str(tmp_path))
    for text in ("not json", "[]", json.dumps({"featuresDict": {"features": {"a": {}}}})):
        (tmp_path / "features.json").write_text(text)
        with pytest.raises(DataError, match=r"is not a features\.json.*def parse"):
            read_features(str(tmp_path))


def classic_record(image: np.ndarray, label: int, sizes: dict[str, int]) -> bytes:
    """As convert_to_records.py wrote it."""
    return example_bytes({"image_raw": image.tobytes(), "label": label, **sizes})


@pytest.mark.parametrize(
    "sizes", [{"pixels": 12}, {"height": 3, "width": 4, "depth": 1}], ids=["pixels", "height"]
)
def test_records_of_tensorflow_1_programs_are_parsed_in_a_graph(sizes: dict[str, int]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 1), np.uint8)
    serialized = tf.constant([classic_record(images[i], i, sizes) for i in range(5)])
    parse = tf.function(image_raw_parse((3, 4, 1)))
    graph = parse.get_concrete_function(tf.TensorSpec([5], tf.string))
    assert [output.shape for output in graph.outputs] == [[5, 3, 4, 1], [5]]
    inputs, labels = parse(serialized)
    assert np.array_equal(np.round(inputs * 255), images)
    assert inputs.numpy().max() <= 1
    assert labels.numpy().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [11, 24])
def test_image_raw_of_another_size_is_refused(size: int) -> None:
    good = classic_record(np.zeros(12, np.uint8), 0, {"pixels": 12})
    bad = classic_record(np.zeros(size, np.uint8), 0, {"pixels": size})
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"not 12, as shape"):
        image_raw_parse((3, 4, 1))(tf.constant([good, bad]))
