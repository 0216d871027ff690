"""Files as records, so that a run's `parse` reads them as it read its training data.

    features = read_features("datasets/pets")
    for about, record in records_of("photos/", features, ["image"], labels={"label": {}}):
        ...         # about: {"file": "photos/a.png"}; record: a serialized tf.train.Example

| input | a record is made of |
| --- | --- |
| a file of TFRecord | each record as it is |
| a folder | each PNG or JPEG file below it, in the order of the names |
| FILE.csv | each row; columns have the names of features |
| FILE.npz | each row of its arrays, which have the names of features |

A label may be missing: then it is 0 in the record, and the prediction has no label. It is a number
or the name of a class.
"""

import os
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from data.example_features import Feature, Features
from data.numerals import CODE, NUMBERS, kind_of
from data.system.extras import of_satellite
from data.system.files import DataError, files_below, is_dir, is_url, num_bytes_of, parent
from data.tfrecord.examples import PADDING, Value, example_bytes
from data.tfrecord.framing import compression_of, read_records, refuse_compressed

TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
_IMAGES = (".png", ".jpg", ".jpeg")
_KINDS = "a TFRecord, CSV or NPZ file, or a folder of PNG or JPEG files"
_CSV_FILES = "data.prepare.sources.csv_files"
_COLUMNS = "data.prepare.sources.columns"
_MOST_NAMES = 5  # Of classes, in a message.
Array = npt.NDArray[Any]  # Of any type: what a user's file holds.
About = dict[str, object]


def is_records(path: str) -> bool:
    """Returns True if `path` is a file of TFRecord, by its name or its first bytes."""
    if ".tfrec" in os.path.basename(path):
        return True
    is_other = path.endswith((*TABLES, ".npz")) or is_dir(path)
    return not is_other and compression_of(path) is not None


def records_of(
    path: str,
    features: Features | None,
    needed: Collection[str],
    labels: Mapping[str, Mapping[str, int]],
) -> Iterator[tuple[About, bytes]]:
    """Yields what is known about each example, such as its file, and its record.

    `needed` are the features that `parse` reads. Those in `labels` may be missing; it has the
    number of each class by its name. Raises DataError for a file that cannot be read, or lacks a
    feature.
    """
    if is_records(path):
        refuse_compressed(path, parent(path))
        for record in read_records(path, 0, num_bytes_of(path), 0):
            yield {}, record
        return
    if features is None:
        raise DataError(
            f"{path} cannot be made into records, because the data of the run has no features.json "
            "that says what a record holds. Give a TFRecord file of such records."
        )
    for where, about, row in rows_of(path, features, needed, labels):
        values: dict[str, Value] = {}
        has_labels = True
        for name in needed:
            if name in row and name in labels:
                values[name] = _label(features[name], row[name], labels[name], where)
            elif name in row:
                values[name] = _encoded(features[name], row[name], where)
            elif name in labels:
                zeros = np.zeros([size or 0 for size in features[name].shape])
                values[name], has_labels = _encoded(features[name], zeros, where), False
            else:
                raise DataError(
                    f"{path} has no {name!r}, which the model reads. It has: {', '.join(row)}. "
                    f"Needed: {', '.join(name for name in needed if name not in labels)}."
                )
        if not has_labels:
            about["label"] = None
        yield about, example_bytes(values)


def rows_of(
    path: str,
    features: Mapping[str, Feature],
    needed: Collection[str],
    labels: Collection[str] = (),
) -> Iterator[tuple[str, About, Mapping[str, Any]]]:  # Any: a number, text, bytes or an array.
    """Yields the place of each example for messages, what is known about it, and its values."""
    if is_dir(path) and not is_url(path):
        yield from _images(path, features, needed)
    elif path.endswith(TABLES):
        lines = of_satellite(_CSV_FILES, "lines")
        has_lists = any(len(features[name].shape) == 1 for name in needed)
        # As `data.prepare csv` reads them.
        for line, row in lines(path, _layout(path, has_lists=has_lists)):
            yield f"{path}, line {line}", {}, row
    elif path.endswith(".npz"):
        arrays = read_npz(path)
        wanted = [name for name in needed if name not in labels]
        others = [name for name in arrays if name not in features]
        if len(wanted) == 1 and wanted[0] not in arrays and len(others) == 1:
            arrays[wanted[0]] = arrays.pop(others[0])  # The only array is the only input.
        for index in range(len(next(iter(arrays.values())))):
            row = {name: array[index] for name, array in arrays.items()}
            yield f"{path}, row {index}", {}, row
    else:
        raise DataError(f"--input={path} is not {_KINDS}.")


def read_npz(path: str) -> dict[str, Array]:
    """Returns the arrays of an NPZ file. Raises DataError if their numbers of rows differ."""
    try:
        with open(path, "rb") as opened:
            file = np.load(opened)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array, of np.save; np.savez writes NPZ")
            arrays = {name: file[name] for name in file.files}
    except (EOFError, OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read as NPZ: {error}. Write it again.") from None
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(f"The arrays of {path} differ in their number of rows: {lengths}.")
    return arrays


def csv_columns(path: str) -> list[str]:
    """The names in the first line of a CSV file."""
    return list(_layout(path).columns)


def _images(
    folder: str, features: Mapping[str, Feature], needed: Collection[str]
) -> Iterator[tuple[str, About, Mapping[str, Any]]]:
    names = [n for n in needed if features[n].kind == "image" or len(features[n].shape) == 3]
    if len(names) != 1:
        raise DataError(
            f"{folder} is a folder of images, but the model reads {', '.join(needed)}, of which "
            f"{len(names)} are images. Give a TFRecord, CSV or NPZ file with these."
        )
    paths = [
        path
        for path in files_below(folder, lambda _: False)
        if path.lower().endswith(_IMAGES) and not os.path.basename(path).startswith(".")
    ]
    if not paths:
        raise DataError(f"{folder} has no PNG or JPEG file. --input must be {_KINDS}.")
    for path in paths:
        with open(path, "rb") as file:
            yield path, {"file": path}, {names[0]: file.read()}


def _layout(path: str, *, has_lists: bool = False) -> Any:  # data.prepare.sources.csv_files.Layout
    lists = "" if has_lists else None
    options = of_satellite("data.prepare.sources", "Options")(header=True, lists=lists)
    try:
        return of_satellite(_CSV_FILES, "layout_of")(path, options)
    except DataError as error:
        if "--" not in str(error):
            raise
        raise DataError(
            f"{error} trainer.predict has no such option: save the file as UTF-8, with commas."
        ) from None


def _label(feature: Feature, value: Any, numbers: Mapping[str, int], where: str) -> Value:
    """Returns a label, by the name of its class or as it is, as a record stores it."""
    name = value.decode(errors="replace") if isinstance(value, bytes) else value
    number = numbers.get(name) if isinstance(name, str) else None
    try:
        return _encoded(feature, name if number is None else number, where)
    except DataError as error:
        known = ", ".join([*numbers][:_MOST_NAMES]) + ", ..." * (len(numbers) > _MOST_NAMES)
        raise DataError(
            f"{error} {f'Its classes are {known}. ' if known else ''}Correct it, or leave "
            f"{feature.name!r} out of the file: predictions do not need it."
        ) from None


def _encoded(feature: Feature, value: Any, where: str) -> Value:
    """Returns `value`, which is at the place `where`, as a record stores this feature."""
    where = f"{where}: {feature.name!r}"
    is_scalar = feature.kind == "label" or (feature.kind == "tensor" and not feature.shape)
    if feature.kind == "text" or (is_scalar and feature.dtype in ("string", "object")):
        return _text(value)
    if feature.kind == "image":
        if isinstance(value, bytes):
            return value
        return _png(_exact(np.asarray(value), feature, where))
    if feature.kind not in ("label", "tensor"):
        raise DataError(f"{where} is a {feature.type_name}, which cannot be made of a file.")
    if is_scalar and isinstance(value, str):
        number = _number(value, is_float=feature.dtype.startswith(("float", "bfloat")))
        if number is None:
            raise DataError(f"{where} must be of type {feature.dtype}. Received: {str(value)!r}.")
        value = number
    elif isinstance(value, str) and len(feature.shape) == 1:
        value = _listed(value, feature, where)
    if isinstance(value, bytes) and feature.dtype != "uint8":
        raise DataError(
            f"{where} is {feature.dtype} in the training data. How that was made of pixels from 0 "
            "to 255 is not known, so a file of an image cannot be taken. Write the images as they "
            f"were in training to an NPZ file, numpy.savez('images.npz', {feature.name}=images), "
            "and type --input=images.npz."
        )
    array = _decoded(value, feature, where) if isinstance(value, bytes) else np.asarray(value)
    if tuple(array.shape) != tuple(feature.shape):
        raise DataError(
            f"{where} has shape {list(array.shape)}, but the model was trained on "
            f"{list(feature.shape)}. Resize or reshape it."
        )
    if feature.dtype in ("string", "object"):
        return list(map(_text, array.flat))
    stored = _exact(array, feature, where)
    if feature.encoding == "none":
        listed: list[int] | list[float] = stored.ravel().tolist()
        return listed
    content = stored.tobytes()
    return zlib.compress(content) if feature.encoding == "zlib" else content


def _listed(text: str, feature: Feature, where: str) -> list[Any]:  # Numbers, or texts.
    """The items of a list in a CSV file, filled up as `data.prepare csv --lists` does."""
    separator = "|" if "|" in text else None
    items: list[Any] = [item.strip() for item in text.split(separator) if item.strip()]
    if not feature.is_text:
        is_float = feature.dtype.startswith(("float", "bfloat"))
        numbers = [_number(item, is_float=is_float) for item in items]
        if None in numbers:
            wrong = items[numbers.index(None)]
            raise DataError(
                f"{where} must be a list of type {feature.dtype}, such as 3|17|5. Received: "
                f"{wrong!r} in {text!r}."
            )
        items = numbers
    elif separator is None and len(items) > 1:  # Training data may have had either.
        raise DataError(
            f"{where} has {text!r}, which may be one item or several. Write a | after each item, "
            f"such as {'|'.join(items)!r} or {text.strip() + '|'!r}."
        )
    length = feature.shape[0] or 0
    if len(items) > length:
        raise DataError(
            f"{where} has {len(items)} items, but the longest list of the training data has "
            f"{length}. Shorten it."
        )
    if feature.is_text or feature.dtype == "int64":  # Other lists have one length.
        items += ["" if feature.is_text else PADDING] * (length - len(items))
    return items


def _number(text: str, *, is_float: bool) -> float | None:
    """The number that `text` is in a CSV file, also 007, and 1.0 as an integer; None if none."""
    if is_float and text.lower() == "nan":
        return float(text)
    if kind_of(text) not in (*NUMBERS, CODE):
        return None
    return float(text) if is_float else of_satellite(_COLUMNS, "whole")(text)


def _text(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _exact(array: Array, feature: Feature, where: str) -> Array:
    """Returns `array` in the dtype of the feature; floats are rounded, as the training data was.

    Raises DataError if an integer would change, or a number would become infinite.
    """
    try:
        with np.errstate(invalid="ignore", over="ignore"):
            stored = array.astype(feature.dtype)
            if stored.dtype.kind in "iub":
                changed = stored.astype(array.dtype) != array
            else:
                changed = np.isinf(stored) & np.isfinite(array)
    except (TypeError, ValueError):
        raise DataError(
            f"{where} must be of type {feature.dtype}. Received: {array.dtype}."
        ) from None
    if np.any(changed):
        raise DataError(
            f"{where} has {array[changed].flat[0]} ({array.dtype}), but the model was trained on "
            f"{feature.dtype}, which does not hold it. Convert it."
        )
    return stored


def _decoded(content: bytes, feature: Feature, where: str) -> Array:
    import tensorflow as tf

    try:
        image = tf.io.decode_image(content, channels=feature.shape[-1], expand_animations=False)
    except tf.errors.InvalidArgumentError as error:
        raise DataError(f"{where}: an image cannot be decoded: {error.message}") from None
    return np.asarray(image.numpy())


def _png(image: Array) -> bytes:
    import tensorflow as tf

    return bytes(tf.io.encode_png(image).numpy())
