"""Parse functions: from records of tf.train.Example to the inputs and labels of a model.

    parse = default_parse(read_features("datasets/digits"))
    images, labels = parse(serialized)        # string [n] -> float32 [n, 8, 8, 1], int64 [n]

A config file may define another one; `ExampleParse`, `from_bytes` and `image_raw_parse` help.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from data.example_features import AS_INT64, PARSE_HINT, Features, parse_columns
from data.system.files import DataError
from data.tfrecord.fixed_layout import Column

if TYPE_CHECKING:
    import tensorflow as tf

# The dtype of the input of a model; or of each by name, if it takes a dict; None: not known.
Declared = str | Mapping[str, str] | None


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleParse:
    """A parse function in steps: string [n] -> (inputs [n, ...], labels [n, ...]).

        parse = ExampleParse({"x": Column("float", (4,)), "label": Column("int64")}, decode)

    The first step takes `columns` out of the records, as tf.io.parse_example does. If all records
    have one layout (`fixed_layout`), slices replace this step: then a column with `num_bytes` comes
    as uint8 [n, num_bytes] instead of string [n]. The second step, `decode`, makes examples.

    The third step, `widen`, is optional. It makes large values of small ones, for example
    `lambda images, labels: (from_bytes(images), labels)`. Cached examples are stored as `decode`
    returns them, and widened in the graph of the training step: use `from_bytes`, or the last bit
    depends on caching. Like `decode`, `widen` must treat examples independently and have no state.
    """

    columns: Mapping[str, Column]
    decode: "Callable[[Mapping[str, tf.Tensor]], tuple[tf.Tensor, tf.Tensor]]"
    widen: "Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]] | None" = None
    note: str = ""  # For users: which features are used.

    def __call__(self, serialized: "tf.Tensor") -> "tuple[tf.Tensor, tf.Tensor]":
        """All steps."""
        return self.finish(parse_columns(serialized, self.columns))

    def finish(self, raw: "Mapping[str, tf.Tensor]") -> "tuple[tf.Tensor, tf.Tensor]":
        """All steps but the first, for columns that were sliced."""
        from data.system.compat.autograph import autograph  # Imports TensorFlow.

        return self.widened(autograph(self.decode)(raw))

    def widened(self, examples: "tuple[tf.Tensor, tf.Tensor]") -> "tuple[tf.Tensor, tf.Tensor]":
        """The result of `decode`, widened."""
        from data.system.compat.autograph import autograph

        return autograph(self.widen)(*examples) if self.widen else examples

    @property
    def narrow(self) -> "ExampleParse":
        """The same without `widen`."""
        return dataclasses.replace(self, widen=None)


def labels_used(features: Features, parse: "Callable[..., Any]") -> list[str]:
    """The labels of `features` that `parse` reads; all of them if it does not say what it reads."""
    labels = features.labels
    return [n for n in labels if not isinstance(parse, ExampleParse) or n in parse.columns]


def default_parse(
    features: Features,
    inputs: Sequence[str] = (),
    label: str = "",
    declared: Declared = None,
    *,
    all_if_unclear: bool = False,
) -> ExampleParse:
    """A parse function made of the features: string [n] -> (inputs [n, ...], labels [n]).

    Without `label`, the label is the only ClassLabel, or the ClassLabel with the name "label". A
    ClassLabel or an integer becomes int64, another number float32. Without `inputs`, the inputs are
    the names in `declared`, if it is a dict; or the only image or tensor; or all single numbers.
    With `all_if_unclear` they are all features otherwise, as long as the model is not known.

    One input is a tensor, and so are several single numbers, [n, k], in the order of `inputs` or of
    the file. Other inputs, and all of a model that takes a dict, are a dict of tensors by name.

    Inputs have the dtypes that the model declares; without them a tensor is float32, and in a dict
    integers are int64. Text is string. Images and tensors of uint8 are scaled from 0..255 to [0, 1]
    where floats are declared; other inputs are only cast. An integer that the declared dtype does
    not hold, or a number above 2**24 that float32 would change, is an InvalidArgumentError. `note`
    of the result says what is used and left out.
    """
    import tensorflow as tf

    if unknown := [name for name in (*inputs, *filter(None, [label])) if name not in features]:
        raise DataError(
            f"{features.source} has no feature {unknown[0]!r}. It has: {', '.join(features)}."
        )
    label = label or _only_label(features)
    if features[label].kind not in ("label", "tensor") or features[label].shape:
        raise DataError(
            f"Feature {label!r} in {features.source} is no number, so that it cannot be the label. "
            "Choose another with --config.data.label=NAME."
        )
    as_dict = isinstance(declared, Mapping)
    names = list(inputs or (declared if isinstance(declared, Mapping) else ()))
    names = names or _only_input(features, label, all_if_unclear)
    are_numbers = all(map(features.is_number, names)) and not as_dict
    is_tensor = are_numbers or (len(names) == 1 and not as_dict)
    dtypes = {name: _input_dtype(features, name, declared, is_tensor) for name in names}
    images = [name for name in names if features.is_bytes(name) and dtypes[name].is_floating]
    widens = is_tensor and not are_numbers and bool(images)

    def decode(raw: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        example = features.decode(raw)
        # Losses compute in float32, so that a number as label is rounded in any case.
        label_dtype = tf.float32 if example[label].dtype.is_floating else tf.int64
        labels = tf.cast(example[label], label_dtype)
        if widens:
            return example[names[0]], labels
        scaled = {name: from_bytes(example[name]) for name in images}
        values = _cast({name: scaled.get(name, example[name]) for name in names}, dtypes)
        if are_numbers:
            return tf.stack([values[name] for name in names], axis=1), labels
        return (values[names[0]] if is_tensor else values), labels

    left_out = [
        f"{name} ({'number' if features.is_number(name) else feature.type_name})"
        for name, feature in features.items()
        if name not in (*names, label)
    ]
    note = f"inputs: {', '.join(names)}; label: {label}"
    if left_out:
        note += f"; left out: {', '.join(left_out)} (--config.data.inputs chooses)"
    columns = features.columns((*names, label))
    return ExampleParse(columns, decode, _bytes_to_floats if widens else None, note)


def _input_dtype(features: Features, name: str, declared: Declared, is_tensor: bool) -> "tf.DType":
    """The dtype of an input: as declared, or the default of a tensor or of a dict."""
    import tensorflow as tf

    feature = features[name]
    is_text = feature.is_text
    found = declared.get(name) if isinstance(declared, Mapping) else declared
    if found is None:
        is_integer = feature.dtype in AS_INT64 and not features.is_bytes(name)
        default = tf.int64 if is_integer and not is_tensor else tf.float32
        return tf.string if is_text else default
    dtype = tf.as_dtype(found)
    if is_text != (dtype == tf.string):
        raise DataError(
            f"Feature {name!r} in {features.source} is {'text' if is_text else feature.dtype}, but "
            f"the model takes {found}. Declare keras.Input(..., dtype="
            f"{'string' if is_text else 'int64' if feature.dtype in AS_INT64 else 'float32'!r}) "
            f"for it. Or: {PARSE_HINT}"
        )
    # Keras rounds to shorter floats.
    return tf.float32 if dtype.is_floating and dtype != tf.float64 else dtype


def _cast(
    values: "Mapping[str, tf.Tensor]", dtypes: "Mapping[str, tf.DType]"
) -> "dict[str, tf.Tensor]":
    """`values` in these dtypes, [n, ...] each. A value that changes is an error of the graph."""
    import tensorflow as tf

    cast = {name: tf.cast(value, dtypes[name]) for name, value in values.items()}
    changes = {name: _changed(value, cast[name]) for name, value in values.items()}
    changed = {name: found for name, found in changes.items() if found is not None}
    if not changed:
        return cast

    def fail() -> tf.Operation:
        checks = []
        for name, found in changed.items():
            message = (
                f"Feature {name!r} has a value that {dtypes[name].name} does not hold. "
                f"{_declare(name, values[name].dtype, dtypes[name])}"
                "Define a `parse` in the config file, which converts it. The value:"
            )
            value = tf.boolean_mask(values[name], found)[:1]
            checks.append(tf.debugging.Assert(~tf.reduce_any(found), [message, value]))
        return tf.group(checks)

    # One condition for all columns; the messages are made only if it is true.
    is_any = tf.reduce_any([tf.reduce_any(found) for found in changed.values()])
    with tf.control_dependencies([tf.cond(is_any, fail, tf.group)]):
        return {name: tf.identity(value) for name, value in cast.items()}


def _declare(name: str, source: "tf.DType", target: "tf.DType") -> str:
    """What to type, so that the model takes numbers of `source`."""
    if not target.is_floating:
        dtype = "float32" if source.is_floating else "int64"
        return f"Declare keras.Input(..., dtype={dtype!r}) for it. Or: "
    ids = f"Of ids, make a dict of inputs: {{{name!r}: keras.Input((1,), dtype='int64'), ...}}. "
    amounts = "Declare keras.Input(..., dtype='float64') for other numbers: layers round them. Or: "
    return f"{ids if source.is_integer else ''}{amounts}"


def _changed(value: "tf.Tensor", cast: "tf.Tensor") -> "tf.Tensor | None":
    """A mask, bool [n, ...]: true where `cast` is not the number in `value`. None: nowhere.

    A float64 may be rounded up to 2**24, where float32 holds each integer.
    """
    import tensorflow as tf

    source, target = value.dtype, cast.dtype
    if source.is_integer and target.is_floating and source.size >= 4:
        # From 2**63 on, the result of a cast depends on the processor.
        return (tf.cast(cast, tf.int64) != tf.cast(value, tf.int64)) | (cast >= 2.0**63)
    if source == tf.string or np.can_cast(source.as_numpy_dtype, target.as_numpy_dtype):
        return None
    if source.is_integer:
        return tf.cast(cast, source) != value
    value, back = tf.cast(value, tf.float64), tf.cast(cast, tf.float64)
    if target.is_floating:
        return (back != value) & (tf.abs(value) > 2**24)
    return (back != value) | (tf.abs(value) > 2**53)  # As above.


def _only_label(features: Features) -> str:
    labels = features.labels
    if "label" in labels:
        return "label"
    if len(labels) != 1:
        raise DataError(
            f"{features.source} has {len(labels)} ClassLabels ({', '.join(labels) or 'none'}); the "
            f"default needs exactly one. Choose one, or a number, with --config.data.label=NAME. "
            f"Or: {PARSE_HINT}"
        )
    return labels[0]


def _only_input(features: Features, label: str, all_if_unclear: bool) -> list[str]:
    """The only image or tensor, or else all single numbers."""
    others = {name: feature for name, feature in features.items() if name != label}
    numbers = [name for name in others if features.is_number(name)]
    tensors = [
        name
        for name, feature in others.items()
        if feature.kind in ("image", "tensor") and (feature.kind == "image" or feature.shape)
    ]
    if len(tensors) > 1 or not (tensors or numbers):
        if all_if_unclear and others:
            return list(others)
        raise DataError(
            f"{features.source} has {len(tensors)} images or tensors "
            f"({', '.join(tensors) or 'none'}); the default needs exactly one, or numbers. Choose "
            f"inputs with --config.data.inputs=\"('NAME', ...)\". Or: {PARSE_HINT}"
        )
    return tensors or numbers


def from_bytes(values: "tf.Tensor") -> "tf.Tensor":
    """uint8 0..255 -> float32 in [0, 1], equal to the last bit in every graph.

    A single op that TensorFlow does not rewrite: it multiplies by 1/255. A cast and a division pass
    over the floats twice, and their results depend on the graph: a training graph's optimizer makes
    a multiplication of the division, and merges its factor with the next one, while the graph of a
    dataset divides. The op has kernels for the CPU and for XLA. On a GPU it would travel to the CPU
    and back, so there it is a cast and another op that is not rewritten either, with equal results.

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
    values = tf.identity(values)  # Its device is the device of the scope.
    if "GPU" in values.device:
        return tf.math.multiply_no_nan(tf.cast(values, tf.float32), np.float32(1 / 255))
    return tf.quantization.dequantize(tf.bitcast(values, tf.quint8), 0.0, 1.0)


def _bytes_to_floats(inputs: "tf.Tensor", labels: "tf.Tensor") -> "tuple[tf.Tensor, tf.Tensor]":
    return from_bytes(inputs), labels


def image_raw_parse(shape: tuple[int, int, int]) -> ExampleParse:
    """A parse function for records of TensorFlow 1's MNIST programs (convert_to_records.py).

        parse = image_raw_parse((28, 28, 1))    # a line of a config file

    They hold `image_raw`, the bytes of the pixels, and `label`. string [n] -> (float32 [n, *shape]
    in [0, 1], int64 [n]). An image whose number of bytes does not fit `shape` is an error of the
    graph (InvalidArgumentError).
    """
    num_pixels = math.prod(shape)
    columns = {"image_raw": Column("bytes", num_bytes=num_pixels), "label": Column("int64")}

    def decode(raw: "Mapping[str, tf.Tensor]") -> "tuple[tf.Tensor, tf.Tensor]":
        import tensorflow as tf

        pixels, labels = raw["image_raw"], raw["label"]
        if pixels.dtype == tf.string:
            num_bytes = tf.strings.length(pixels)
            fits = tf.reduce_all(num_bytes == num_pixels)
            message = f"The bytes of an image_raw are not {num_pixels}, as shape {shape} needs:"
            check = tf.debugging.Assert(fits, [message, num_bytes], summarize=16)
            with tf.control_dependencies([check]):
                pixels = tf.io.decode_raw(pixels, tf.uint8, fixed_length=num_pixels)
        return tf.ensure_shape(tf.reshape(pixels, [-1, *shape]), [labels.shape[0], *shape]), labels

    return ExampleParse(columns, decode, _bytes_to_floats)
