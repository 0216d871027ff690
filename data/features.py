"""What an example holds: TFDS' `features.json` read without tensorflow-datasets.

    features = read_features("datasets/digits")
    parse = default_parse(features)
    images, labels = parse(serialized)        # string [n] -> float32 [n, 8, 8, 1], int64 [n]

Works in graphs without py_function, so also on remote parameter-server workers.
"""

import collections
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from data import files
from data.files import DataError
from data.layout import Column

if TYPE_CHECKING:
    import tensorflow as tf

Kind = Literal["image", "label", "tensor", "text", "unsupported"]

_PARSE_HINT = (
    "Define `def parse(serialized)` in your config file: it gets a string tensor [n] of "
    "tf.train.Example records and returns (inputs, labels)."
)


@dataclasses.dataclass(frozen=True)
class Feature:
    """One named field of an example.

    `shape`: None where it varies from example to example. `encoding`: how a tensor lies in the
    record, "none" (a list of numbers), "bytes" or "zlib"; images are always PNG or JPEG.
    `num_classes`: of labels only. `type_name`: the TFDS class, for messages.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int | None, ...]
    num_classes: int | None
    encoding: str
    type_name: str

    @property
    def is_input(self) -> bool:
        """Whether a model can take it as it is: an image, or a tensor of numbers."""
        return self.kind == "image" or (self.kind == "tensor" and len(self.shape) > 0)

    @property
    def is_number(self) -> bool:
        """Whether it is a single number."""
        return self.kind == "tensor" and self.shape == () and self.dtype not in ("string", "object")


class Features(Mapping[str, Feature]):
    """The fields of an example, by name; nested ones as "outer/inner", as in the record."""

    def __init__(self, features: Iterable[Feature], source: str) -> None:
        """`source`: where they were read, for messages."""
        self._features = {feature.name: feature for feature in features}
        self.source = source

    def __getitem__(self, name: str) -> Feature:
        """The field of that name."""
        return self._features[name]

    def __iter__(self) -> Iterator[str]:
        """Names, in the file's order."""
        return iter(self._features)

    def __len__(self) -> int:
        """How many fields."""
        return len(self._features)

    def parse_example(
        self, serialized: "tf.Tensor", names: Iterable[str] | None = None
    ) -> "dict[str, tf.Tensor]":
        """Decode a batch: string [n] -> one tensor [n, ...] a name, of the feature's dtype.

        `names`: only these; all by default. A label outside [0, num_classes), or a value of the
        wrong size, is an error of the graph (InvalidArgumentError) that names the feature.

        Raises:
            DataError: a feature is of a type that this does not decode, or varies in shape.
        """
        import tensorflow as tf

        columns = self.columns(self if names is None else names)
        spec = {name: column.on_disk() for name, column in columns.items()}
        return self.decode(tf.io.parse_example(serialized, spec))

    def columns(self, names: Iterable[str]) -> dict[str, Column]:
        """How those features lie in a record.

        Raises:
            DataError: one is of a type that this does not decode, or varies in shape.
        """
        return {name: _column(self._features[name], self.source) for name in names}

    def decode(self, raw: "Mapping[str, tf.Tensor]") -> "dict[str, tf.Tensor]":
        """Features as they lie in records -> one tensor [n, ...] each, of the feature's dtype.

        Bytes are string [n], or uint8 [n, number of bytes].
        """
        decoded = {}
        for name, value in raw.items():
            decoded[name] = _decode(self._features[name], value)
            decoded[name].set_shape([value.shape[0], *self._features[name].shape])
        return decoded


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleParse:
    """A parse function in steps: string [n] -> (inputs [n, ...], labels [n, ...]).

        parse = ExampleParse({"x": Column("float", (4,)), "label": Column("int64")}, decode)

    The first takes `columns` out of the records; the second, `decode`, makes examples of them. It
    gets a tensor for each column, as tf.io.parse_example returns it. Where the records are of one
    layout (`data.layout`), slices can take the first step's place: then a column whose `num_bytes`
    is given comes as uint8 [n, num_bytes], and not as string [n].

    What makes large values of small ones, floats of bytes, belongs into `widen`, (inputs, labels)
    -> (inputs, labels): examples that are kept in memory are kept as `decode` returns them, and
    widened in each step.

        widen=lambda images, labels: (from_bytes(images), labels)

    So it runs in the graph of the step, where TensorFlow may make a product of a quotient, and one
    factor of two: use `from_bytes`, or the last bit depends on whether examples are kept. As
    `decode`, it treats examples independently, and has no state.
    """

    columns: Mapping[str, Column]
    decode: "Callable[[Mapping[str, tf.Tensor]], tuple[tf.Tensor, tf.Tensor]]"
    widen: "Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]] | None" = None

    def __call__(self, serialized: "tf.Tensor") -> "tuple[tf.Tensor, tf.Tensor]":
        """All steps."""
        import tensorflow as tf

        spec = {name: column.on_disk() for name, column in self.columns.items()}
        return self.finish(tf.io.parse_example(serialized, spec))

    def finish(self, raw: "Mapping[str, tf.Tensor]") -> "tuple[tf.Tensor, tf.Tensor]":
        """All steps but the first."""
        from data.graphs import converted

        return self.widened(converted(self.decode)(raw))

    def widened(self, examples: "tuple[tf.Tensor, tf.Tensor]") -> "tuple[tf.Tensor, tf.Tensor]":
        """What `decode` returned, as `parse` returns it."""
        from data.graphs import converted

        return converted(self.widen)(*examples) if self.widen else examples

    @property
    def narrow(self) -> "ExampleParse":
        """The same without `widen`."""
        return dataclasses.replace(self, widen=None)


def read_features(data_dir: str) -> Features:
    """The features that `features.json` in `data_dir` describes.

    Raises:
        DataError: there is no such file, or it is not TFDS' format. Records without it can still be
            trained on, by a config that has its own `parse`.
    """
    path = f"{os.fspath(data_dir).rstrip('/')}/features.json"
    try:
        text = files.read_text(path)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist, so what a record holds is not known. {_PARSE_HINT} "
            "Or add the file: tensorflow_datasets.folder_dataset.write_metadata writes it."
        ) from None
    try:
        tree = json.loads(text)
        return Features(_flatten("", tree["featuresDict"]["features"]), path)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is not a features.json of tensorflow-datasets "
            f"({type(error).__name__}: {error}). {_PARSE_HINT}"
        ) from None


def default_parse(features: Features) -> ExampleParse:
    """A parse function for classification: string [n] -> (float32 [n, ...], int64 [n]).

    The label is the one ClassLabel, or that called "label". The input is the one image or tensor;
    where there is none, all numbers side by side, [n, k] in the file's order. Inputs of unsigned
    bytes are scaled from 0..255 to [0, 1]; others are cast alone.

    Raises:
        DataError: there is not exactly one label and one input of fixed shape.
    """
    import tensorflow as tf

    labels = [name for name in features if features[name].kind == "label"]
    if len(labels) > 1 and "label" in labels:
        labels = ["label"]
    inputs = [name for name in features if features[name].is_input]
    numbers = [name for name in features if features[name].is_number]
    if len(labels) != 1 or len(inputs) > 1 or not (inputs or numbers):
        raise DataError(
            f"{features.source} has {len(labels)} ClassLabels ({', '.join(labels) or 'none'}) and "
            f"{len(inputs)} images or tensors ({', '.join(inputs) or 'none'}); the default needs "
            f"exactly one of each. {_PARSE_HINT}"
        )
    (label_name,) = labels
    names = inputs or numbers

    are_bytes = bool(inputs) and features[inputs[0]].dtype == "uint8"

    def decode(raw: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        example = features.decode(raw)
        columns = [example[name] for name in names]
        if not are_bytes:
            columns = [tf.cast(column, tf.float32) for column in columns]
        values = columns[0] if inputs else tf.stack(columns, axis=1)
        return values, tf.cast(example[label_name], tf.int64)

    columns = features.columns((*names, label_name))
    return ExampleParse(columns, decode, _bytes_to_floats if are_bytes else None)


def from_bytes(values: "tf.Tensor") -> "tf.Tensor":
    """uint8 0..255 -> float32 in [0, 1], alike to the last bit wherever it is computed.

    One op that TensorFlow does not take apart: it multiplies by 1/255. Of a cast and a quotient,
    graphs that TensorFlow optimizes make a product, and of its factor and one that comes next a
    single one, while those of datasets divide; and a worker may read by the one or the other. They
    also go over the floats twice. It has kernels for the CPU and for XLA.

    Raises:
        TypeError: `values` are not uint8.
    """
    import tensorflow as tf

    values = tf.convert_to_tensor(values)
    if values.dtype != tf.uint8:
        raise TypeError(
            f"from_bytes takes uint8, not {values.dtype.name}. If they are bytes: "
            "from_bytes(tf.cast(values, tf.uint8))"
        )
    return tf.quantization.dequantize(tf.bitcast(values, tf.quint8), 0.0, 1.0)


def _bytes_to_floats(inputs: "tf.Tensor", labels: "tf.Tensor") -> "tuple[tf.Tensor, tf.Tensor]":
    return from_bytes(inputs), labels


def image_raw_parse(shape: tuple[int, int, int]) -> ExampleParse:
    """A parse function for records of TensorFlow 1's MNIST programs (convert_to_records.py).

        parse = image_raw_parse((28, 28, 1))    # a line of a config file

    They hold `image_raw` (the bytes of the pixels), `label` and often `pixels` (how many bytes),
    `height`, `width` and `depth`. string [n] -> (float32 [n, *shape] in [0, 1], int64 [n]). An
    image whose bytes or `pixels` are not as many as `shape` says is an error of the graph
    (InvalidArgumentError). Nothing is imported or computed before records come.
    """
    num_pixels = math.prod(shape)
    columns = {
        "image_raw": Column("bytes", num_bytes=num_pixels),
        "pixels": Column("int64", default=num_pixels),
        "label": Column("int64"),
    }

    def decode(raw: "Mapping[str, tf.Tensor]") -> "tuple[tf.Tensor, tf.Tensor]":
        import tensorflow as tf

        pixels, num_bytes = raw["image_raw"], tf.constant([num_pixels])
        if pixels.dtype == tf.string:
            num_bytes = tf.strings.length(pixels)
        fits = (num_bytes == num_pixels) & (raw["pixels"] == num_pixels)
        message = f"An image_raw or its pixels is not {num_pixels}, the bytes of shape {shape}:"
        check = tf.debugging.Assert(
            tf.reduce_all(fits), [message, num_bytes, raw["pixels"]], summarize=16
        )
        with tf.control_dependencies([check]):
            if pixels.dtype == tf.string:
                pixels = tf.io.decode_raw(pixels, tf.uint8, fixed_length=num_pixels)
            images = tf.reshape(pixels, tf.concat([tf.shape(raw["label"]), shape], 0))
        images.set_shape([raw["label"].shape[0], *shape])
        return images, raw["label"]

    return ExampleParse(columns, decode, _bytes_to_floats)


# What follows reads JSON, which has no type: `Any` stays within these functions.


def _flatten(prefix: str, tree: Mapping[str, Any]) -> Iterator[Feature]:
    for key, node in tree.items():
        if "featuresDict" in node:
            yield from _flatten(f"{prefix}{key}/", node["featuresDict"]["features"])
        else:
            yield _feature(prefix + key, node)


def _feature(name: str, node: Mapping[str, Any]) -> Feature:
    type_name = str(node["pythonClassName"]).rpartition(".")[2]
    body: Mapping[str, Any] = collections.ChainMap(
        *(value for key, value in node.items() if isinstance(value, dict))
    )
    dimensions = body.get("shape", {}).get("dimensions", [])
    shape = tuple(None if int(size) < 0 else int(size) for size in dimensions)
    dtype = str(body.get("dtype", ""))
    if "classLabel" in node:
        return Feature(name, "label", "int64", (), int(body["numClasses"]), "none", type_name)
    if "image" in node and type_name == "Image":
        encoding = str(body.get("encodingFormat", "image"))
        return Feature(name, "image", dtype or "uint8", shape, None, encoding, type_name)
    if "text" in node and type_name == "Text":
        return Feature(name, "text", "string", (), None, "none", type_name)
    if "tensor" in node and type_name in ("Tensor", "Scalar"):
        encoding = str(body.get("encoding", "none"))
        return Feature(name, "tensor", dtype, shape, None, encoding, type_name)
    return Feature(name, "unsupported", dtype, shape, None, "none", type_name)


_AS_INT64 = ("bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "int64")
_AS_FLOAT = ("float16", "bfloat16", "float32", "float64")
# Of those whose bytes are their value, which a bool's are not.
_ITEM_BYTES = {
    **dict.fromkeys(("uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}


def _column(feature: Feature, source: str) -> Column:
    """How the feature lies in a tf.train.Example.

    Raises:
        DataError: in no way this module decodes.
    """
    if feature.kind == "unsupported":
        raise DataError(
            f"Feature {feature.name!r} in {source} is a {feature.type_name}, which is not decoded "
            f"here. {_PARSE_HINT}"
        )
    if None in feature.shape:
        raise DataError(
            f"Feature {feature.name!r} in {source} has shape {list(feature.shape)}: it varies, and "
            f"a batch needs one shape. {_PARSE_HINT} Resize or pad there."
        )
    if feature.kind == "image" and feature.dtype not in ("uint8", "uint16"):
        raise DataError(
            f"Feature {feature.name!r} in {source} is an image of {feature.dtype}; decoded here "
            f"are uint8 and uint16. {_PARSE_HINT}"
        )
    shape = tuple(size for size in feature.shape if size is not None)
    if feature.kind in ("image", "text") or feature.encoding == "zlib":
        return Column("bytes")
    if feature.encoding == "bytes":
        item_bytes = _ITEM_BYTES.get(feature.dtype)
        return Column("bytes", num_bytes=item_bytes and item_bytes * math.prod(shape))
    if feature.dtype in _AS_INT64:
        return Column("int64", shape)
    if feature.dtype in _AS_FLOAT:
        return Column("float", shape)
    if feature.dtype in ("string", "object"):
        return Column("bytes", shape)
    raise DataError(
        f"Feature {feature.name!r} in {source} has dtype {feature.dtype!r}, which is not decoded "
        f"here. {_PARSE_HINT}"
    )


def _decode(feature: Feature, raw: "tf.Tensor") -> "tf.Tensor":
    """`raw`: the values in a record, [n, ...]; bytes as string [n], or uint8 [n, num_bytes]."""
    import tensorflow as tf

    if feature.kind == "label":
        # A label out of range makes the loss nan or reads past a table, far from its cause.
        known = tf.reduce_all((raw >= 0) & (raw < feature.num_classes))
        message = (
            f"A label in feature {feature.name!r} is outside [0, {feature.num_classes}), the range "
            "that features.json gives it:"
        )
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

        return tf.map_fn(
            decode_one,
            raw,
            fn_output_signature=tf.TensorSpec(feature.shape, dtype),
            parallel_iterations=16,
        )
    if feature.kind == "text" or feature.dtype in ("string", "object"):
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
        flat = tf.io.decode_raw(raw, dtype)
    # With the number of examples given, a record of another size cannot be taken for two.
    return tf.reshape(flat, tf.concat([tf.shape(raw)[:1], list(feature.shape)], 0))
