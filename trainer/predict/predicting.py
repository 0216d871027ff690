"""Predictions for examples of a data set, or of files: one dict for each example.

    for line in predict("runs/a", "photos/", checkpoint="best"):
        line["file"], line["predicted"], line["output"]

The examples are parsed as in training. A model without its run gets what the default `parse` of a
run would give it: bytes of images and arrays scaled to [0, 1], and the columns of a table as one
tensor, or by name if the model takes a dict.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.example_features import Feature, Features, class_names, read_features
from data.features import Declared, ExampleParse, default_parse, labels_used
from data.reader import Parse
from data.system.errors import UsageError
from data.system.files import DataError, exists, is_dir, join
from data.tfrecord.split import batched_records, open_split
from strategies.base import Batch
from trainer.config import recipe_of_run
from trainer.exit_codes import first_line
from trainer.inputs import parse_of, split_of
from trainer.predict.models import Loaded, open_model
from trainer.predict.records import TABLES, About, csv_columns, is_records, read_npz, records_of
from trainer.run_files import RunFiles

_BATCH = 256
_LABEL = "label"
_MOST_CLASSES = 2**31


@dataclass(frozen=True)
class _Source:
    """The records to predict, and how they are parsed."""

    records: Iterator[tuple[About, bytes]]
    parse: Parse
    class_names: Sequence[str]
    has_classes: bool  # True if the label is one of several classes.


def predict(
    model: str,
    path: str | None = None,
    checkpoint: str | None = None,
    split: str | None = None,
    data_dir: str | None = None,
    *,
    num_examples: int = 0,
) -> Iterator[dict[str, Any]]:  # Any: JSON values.
    """Yields a dict for each example: example, file, label, predicted, class, output.

    `model` is a run, a checkpoint, a .keras file or a SavedModel. The examples are those of the
    files at `path`; without it, of `split` in the data of the run or in `data_dir`, by default the
    evaluation split. Keys without a value are left out; `predicted` is the class with the largest
    output, where labels are classes, and `class` its name, or its number if others have names.

    Raises:
        ConfigError, DataError: the model or the data is missing, or they do not fit.
        RunFileError: config.json is missing or damaged.
    """
    if path is not None and not exists(path):
        raise DataError(f"--input={path} does not exist. Give a file, or a folder of images.")
    loaded = open_model(model, checkpoint)
    source = _source(loaded, model, path, split, data_dir)
    records = itertools.islice(source.records, num_examples or None)
    example = 0
    while chunk := list(itertools.islice(records, _BATCH)):
        about, serialized = zip(*chunk, strict=True)
        labels, outputs = _computed(loaded, source.parse, list(serialized), model)
        if not example:  # All lines have the same keys: the first examples decide.
            has_classes = source.has_classes and _are_classes(labels, outputs)
        for row, known in enumerate(about):
            line: dict[str, Any] = {"example": example, **known}
            if line.pop(_LABEL, labels) is not None and isinstance(labels, tf.Tensor):
                line[_LABEL] = labels[row].numpy().tolist()
                if isinstance(line[_LABEL], bytes):
                    line[_LABEL] = line[_LABEL].decode(errors="replace")
            output = tf.nest.map_structure(lambda t, row=row: t[row], outputs)
            if has_classes:
                number = line["predicted"] = int(output.argmax())
                if names := source.class_names:
                    line["class"] = names[number] if number < len(names) else str(number)
            line["output"] = tf.nest.map_structure(_listed, output)
            yield line
            example += 1


def _are_classes(labels: Batch, outputs: Batch) -> bool:
    """Returns True if labels are classes, integer or one-hot, and outputs a value for each."""
    is_one = isinstance(labels, tf.Tensor) and isinstance(outputs, np.ndarray)
    if not is_one or outputs.ndim != 2 or outputs.shape[1] < 2:
        return False
    if labels.shape.rank != 2:
        return bool(labels.shape.rank == 1 and labels.dtype.is_integer)
    if labels.shape != outputs.shape or labels.dtype == tf.string:
        return False
    # Several numbers of an example are labels of this shape, too.
    values = labels.numpy()
    is_one_hot = (np.count_nonzero(values, axis=1) == 1) & (values.max(axis=1) == 1)
    return bool(np.all(is_one_hot))


def _computed(
    loaded: Loaded, parse: Parse, serialized: list[bytes], model: str
) -> tuple[Batch, Batch]:
    """The labels and outputs of records; outputs are NumPy arrays."""
    try:
        inputs, labels, *_ = parse(tf.constant(serialized))
        outputs = loaded.call(inputs)
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        if isinstance(error, UsageError):
            raise
        shapes = [list(shape) for shape in loaded.input_shapes]
        takes = f" It takes inputs of shape {shapes}." if shapes else ""
        raise DataError(
            f"The examples do not fit the model of {model}: {first_line(error)}{takes}"
        ) from error
    return labels, tf.nest.map_structure(lambda t: np.asarray(t.numpy()), outputs)


def _listed(values: npt.NDArray[Any]) -> Any:  # Nested lists of numbers.
    """Returns lists of the shortest numbers that equal the values in their own precision."""
    if values.ndim:
        return [_listed(np.asarray(value)) for value in values]
    return float(str(values)) if values.dtype.kind == "f" else values.item()


def _source(
    loaded: Loaded, model: str, path: str | None, split: str | None, data_dir: str | None
) -> _Source:
    if path is not None and (given := [v for v in (split, data_dir) if v is not None]):
        raise DataError(
            f"--input={path} and --split or --data_dir={given[0]} both say what is read. Leave one."
        )
    if not loaded.run and path is None and data_dir is None:
        raise DataError(
            f"{model} belongs to no run, so the examples must be given: --input=FILE_OR_FOLDER, or "
            "--data_dir=DIR with --split."
        )
    features: Features | None
    labels: list[str] = []
    describes_classes, recipe = True, None
    if loaded.run:
        document = RunFiles(loaded.run).read_config()
        recipe = recipe_of_run(document)
        directory, split = data_dir or document["data_dir"], split or recipe.config.data.eval_split
        parse = parse_of(recipe, directory, loaded.declared)
        features = read_features(directory) if exists(join(directory, "features.json")) else None
        labels = list(filter(None, [recipe.config.data.label]))
    else:
        directory, split = data_dir or (path or "").rpartition("/")[0] or ".", split or "test"
        if path is None or is_records(path):
            features = read_features(directory)
        else:
            features, describes_classes = _features_of_file(path, loaded), False
        try:
            parse = default_parse(features, declared=loaded.declared)
        except DataError as error:
            if "--config." not in str(error):
                raise
            raise DataError(
                f"{error} trainer.predict has no such flag: give it the run that was trained so."
            ) from None
    if path is None:
        opened = split_of(recipe, directory, split) if recipe else open_split(directory, split)
        batches = batched_records(opened, _BATCH)
        records: Iterator[tuple[About, bytes]] = (({}, r) for batch in batches for r in batch)
    else:  # Without features, `records_of` refuses other files than those of records.
        needed = list(parse.columns) if isinstance(parse, ExampleParse) else list(features or ())
        labels += [name for name in (features.labels if features else ()) if name in needed]
        classes = {n: class_names(directory, n) if describes_classes else [] for n in labels}
        numbers = {n: {text: i for i, text in enumerate(names)} for n, names in classes.items()}
        records = records_of(path, features, needed, numbers)
    used = labels_used(features, parse) if features and describes_classes else []
    names = class_names(directory, used[0]) if len(used) == 1 else []
    return _Source(records, parse, names, has_classes=features is None or bool(used))


def _features_of_file(path: str, loaded: Loaded) -> Features:
    """Features for a file whose model belongs to no run, which would describe the data."""
    if is_dir(path):
        shapes = [shape for shape in loaded.input_shapes if len(shape) == 3]
        if len(shapes) != 1:
            raise DataError(f"{path} is a folder of images, but the model takes {shapes} images.")
        name = next(iter(loaded.declared)) if isinstance(loaded.declared, Mapping) else "image"
        found = [Feature(name, "image", "uint8", tuple(shapes[0]), None, "", "Image")]
    elif path.endswith(".npz"):
        arrays = read_npz(path)
        found = [_tensor(name, str(array.dtype), array.shape[1:]) for name, array in arrays.items()]
    elif path.endswith(TABLES):
        found = [_tensor(name, _column_dtype(loaded.declared, name)) for name in csv_columns(path)]
    else:
        found = []
    label = Feature(_LABEL, "label", "int64", (), _MOST_CLASSES, "none", "ClassLabel")
    return Features([*found, label], path)  # The last one of a name counts.


def _tensor(name: str, dtype: str, shape: tuple[int, ...] = ()) -> Feature:
    """A tensor of a file. A list in a record would round float64 to float32."""
    encoding = "bytes" if shape or dtype == "float64" else "none"
    return Feature(name, "tensor", dtype, shape, None, encoding, "Tensor")


def _column_dtype(declared: Declared, name: str) -> str:
    """The dtype in which a column of a CSV file reaches a model that declares its inputs."""
    taken = declared.get(name) if isinstance(declared, Mapping) else declared
    if taken == "string":
        return "string"
    return "int64" if np.dtype(taken or "float32").kind in "iu" else "float64"
