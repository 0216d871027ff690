"""TFDS' `features.json`, read without tensorflow-datasets: what the examples of a data set hold.

    features = read_features("datasets/digits")
    features.parse_example(serialized, ["image"])     # {"image": uint8 [n, 8, 8, 1]}

Parsing is a graph without py_function, so it also runs on remote parameter-server workers.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from data.system import files
from data.system.files import DataError
from data.tfrecord.fixed_layout import Column

if TYPE_CHECKING:
    import tensorflow as tf

JSON = Mapping[str, Any]  # What json.loads returns has no type.
Kind = Literal["image", "label", "tensor", "text", "unsupported"]

PARSE_HINT = (
    "Define `def parse(serialized)` in your config file: it gets a string tensor [n] of "
    "tf.train.Example records and returns (inputs, labels)."
)
AS_INT64 = ("bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "int64")
_AS_FLOAT = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Feature:
    """One field of an example.

    Attributes:
        shape: None stands for a size that varies from example to example.
        encoding: How a record stores a tensor: "none" (a list of numbers), "bytes" or "zlib".
            Images are always PNG or JPEG.
        num_classes: Set for labels only.
        type_name: The TFDS class, for messages.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int | None, ...]
    num_classes: int | None
    encoding: str
    type_name: str

    @property
    def is_text(self) -> bool:
        """True for text, and for tensors of text."""
        return self.kind == "text" or self.dtype in ("string", "object")


class Features(dict[str, Feature]):
    """The fields of an example by name; nested fields are "outer/inner", as in the record.

    `source`: the file of the features, for messages.
    """

    def __init__(self, features: Iterable[Feature], source: str) -> None:
        super().__init__((feature.name, feature) for feature in features)
        self.source = source

    @property
    def labels(self) -> list[str]:
        """The names of the labels."""
        return [name for name, feature in self.items() if feature.kind == "label"]

    def parse_example(
        self, serialized: "tf.Tensor", names: Iterable[str] | None = None
    ) -> "dict[str, tf.Tensor]":
        """Decodes `names`, or all features: string [n] -> tensors [n, ...] of the feature's dtype.

        A label outside [0, num_classes), or a value of wrong size, is an InvalidArgumentError. A
        feature that has a type that is not decoded here, or varies in shape, is a DataError.
        """
        columns = self.columns(self if names is None else names)
        return self.decode(parse_columns(serialized, columns))

    def is_number(self, name: str) -> bool:
        """Returns True if the feature is a single number, no label."""
        feature = self[name]
        return feature.kind == "tensor" and not feature.shape and not feature.is_text

    def is_bytes(self, name: str) -> bool:
        """Returns True if the feature is an image or a tensor of uint8."""
        return self[name].dtype == "uint8" and bool(self[name].shape)

    def columns(self, names: Iterable[str]) -> dict[str, Column]:
        """How records store these features; see `parse_example` for errors."""
        return {name: _column(self[name], self.source) for name in names}

    def decode(self, raw: "Mapping[str, tf.Tensor]") -> "dict[str, tf.Tensor]":
        """Makes the tensors of `parse_example` from columns.

        Columns of bytes are string [n] or uint8 [n, num_bytes].
        """
        decoded = {}
        for name, value in raw.items():
            decoded[name] = _decode(self[name], value)
            decoded[name].set_shape([value.shape[0], *self[name].shape])
        return decoded


def parse_columns(serialized: "tf.Tensor", columns: Mapping[str, Column]) -> "dict[str, tf.Tensor]":
    """Takes `columns` out of records, string [n], as tf.io.parse_example does."""
    import tensorflow as tf

    spec = {name: column.on_disk() for name, column in columns.items()}
    parsed: dict[str, tf.Tensor] = tf.io.parse_example(serialized, spec)
    return parsed


def read_features(data_dir: str) -> Features:
    """The features that `features.json` in `data_dir` describes."""
    path = files.join(data_dir, "features.json")
    try:
        tree = json.loads(files.read_text(path))
        return Features(_flatten("", tree["featuresDict"]["features"]), path)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist, so what a record holds is not known. {PARSE_HINT} "
            "Or add the file: tensorflow_datasets.folder_dataset.write_metadata writes it."
        ) from None
    except DataError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is not a features.json of tensorflow-datasets "
            f"({type(error).__name__}: {error}). {PARSE_HINT}"
        ) from None


def class_names(data_dir: str, label: str) -> list[str]:
    """The names of the classes of a label, in the order of their numbers; empty if unknown."""
    path = files.join(data_dir, labels_file(label))
    return files.read_text(path).rstrip("\n").split("\n") if files.exists(path) else []


def labels_file(label: str) -> str:
    """The name of the file that has the names of the classes of a label, as of TFDS."""
    return f"{label.replace('/', '.')}.labels.txt"


def _flatten(prefix: str, tree: JSON) -> Iterator[Feature]:
    for key, node in tree.items():
        if "featuresDict" in node:
            yield from _flatten(f"{prefix}{key}/", node["featuresDict"]["features"])
        else:
            yield _feature(prefix + key, node)


def _feature(name: str, node: JSON) -> Feature:
    type_name = str(node["pythonClassName"]).rpartition(".")[2]
    body: JSON = collections.ChainMap(*(v for v in node.values() if isinstance(v, dict)))
    dimensions = body.get("shape", {}).get("dimensions", [])
    shape = tuple(None if int(size) < 0 else int(size) for size in dimensions)
    dtype, num_classes, encoding = str(body.get("dtype", "")), None, "none"
    kind: Kind = "unsupported"
    if "classLabel" in node:
        kind, dtype, shape, num_classes = "label", "int64", (), int(body["numClasses"])
    elif "image" in node and type_name == "Image":
        kind, dtype, encoding = "image", dtype or "uint8", str(body.get("encodingFormat", "image"))
    elif "text" in node and type_name == "Text":
        kind, dtype, shape = "text", "string", ()
    elif "tensor" in node and type_name in ("Tensor", "Scalar"):
        kind, encoding = "tensor", str(body.get("encoding", "none"))
    return Feature(name, kind, dtype, shape, num_classes, encoding, type_name)


def _column(feature: Feature, source: str) -> Column:
    import tensorflow as tf

    def refuse(problem: str) -> DataError:
        return DataError(f"Feature {feature.name!r} in {source} {problem}. {PARSE_HINT}")

    if feature.kind == "unsupported":
        raise refuse(f"is a {feature.type_name}, which is not decoded here")
    if None in feature.shape:
        shape = list(feature.shape)
        raise refuse(f"has shape {shape}: it varies, and a batch needs one shape. Resize or pad it")
    if feature.kind == "image" and feature.dtype not in ("uint8", "uint16"):
        raise refuse(f"is an image of {feature.dtype}; decoded here are uint8 and uint16")
    sizes = tuple(size for size in feature.shape if size is not None)
    is_stored_as_bytes = feature.kind == "tensor" and feature.encoding != "none"
    if is_stored_as_bytes and feature.dtype not in (*AS_INT64, *_AS_FLOAT):
        raise refuse(f"has dtype {feature.dtype!r} in bytes, which is not decoded here")
    if feature.kind in ("image", "text") or feature.encoding == "zlib":
        return Column("bytes")
    if feature.encoding == "bytes":
        num_bytes = tf.as_dtype(feature.dtype).size * math.prod(sizes)
        # Bytes, if they are sliced, are reinterpreted, which a bool cannot be.
        return Column("bytes", num_bytes=None if feature.dtype == "bool" else num_bytes)
    if feature.dtype in AS_INT64:
        return Column("int64", sizes)
    if feature.dtype in _AS_FLOAT:
        return Column("float", sizes)
    if feature.is_text:
        return Column("bytes", sizes)
    raise refuse(f"has dtype {feature.dtype!r}, which is not decoded here")


def _decode(feature: Feature, raw: "tf.Tensor") -> "tf.Tensor":
    """`raw`: the values in a record, [n, ...]; bytes as string [n], or uint8 [n, num_bytes]."""
    import tensorflow as tf

    if feature.kind == "label":
        # A label out of range makes the loss NaN or reads past a table, far from the cause.
        known = tf.reduce_all((raw >= 0) & (raw < feature.num_classes))
        allowed = f"[0, {feature.num_classes}), its range in features.json"
        message = f"A label in feature {feature.name!r} is outside {allowed}:"
        with tf.control_dependencies([tf.debugging.Assert(known, [message, raw], summarize=16)]):
            return tf.identity(raw)
    if feature.kind == "image":
        channels = feature.shape[-1] or 0
        dtype = tf.as_dtype(feature.dtype)

        def decode_one(image: tf.Tensor) -> tf.Tensor:
            if dtype == tf.uint16:
                pixels = tf.io.decode_png(image, channels=channels, dtype=dtype)
            else:
                pixels = tf.io.decode_image(image, channels=channels, expand_animations=False)
            return tf.ensure_shape(pixels, feature.shape)

        spec = tf.TensorSpec(feature.shape, dtype)
        return tf.map_fn(decode_one, raw, parallel_iterations=16, fn_output_signature=spec)
    if feature.is_text:
        return raw
    dtype = tf.as_dtype(feature.dtype)
    if feature.encoding == "none":
        return raw if raw.dtype == dtype else tf.cast(raw, dtype)
    if raw.dtype == tf.uint8:
        rows = raw if dtype.size == 1 else tf.reshape(raw, [tf.shape(raw)[0], -1, dtype.size])
        flat = tf.bitcast(rows, dtype)
    else:
        if feature.encoding == "zlib":
            raw = tf.io.decode_compressed(raw, compression_type="ZLIB")
        # `decode_raw` has no kernel for uint32.
        flat = tf.io.decode_raw(raw, tf.int32 if dtype == tf.uint32 else dtype)
        flat = tf.bitcast(flat, dtype) if dtype == tf.uint32 else flat
    # The number of examples is given, so that a record of double size is not taken for two.
    return tf.reshape(flat, tf.concat([tf.shape(raw)[:1], list(feature.shape)], 0))
