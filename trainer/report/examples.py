"""A classifier on its evaluation split: the confusion matrix, and the worst examples.

    found = classified("runs/a")        # restores the newest checkpoint, and runs the model

The worst examples are those whose label got the least probability. Outputs that are not
probabilities are taken as logits. The weights are those of the evaluation: averages, if the run has
them.
"""

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from data.example_features import class_names, read_features
from data.features import labels_used
from data.system.errors import TrainerError
from data.system.files import exists, join
from trainer.config import ConfigError, data_dir
from trainer.exit_codes import first_line
from trainer.run_record.tools import prepare_tensorflow

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trainer.session import Restored

_NUM_WORST = 12
_MOST_CLASSES = 1000
_ROUNDING = 0.02
_MOST_PIXELS = 96  # Of a side of an image.


@dataclass(frozen=True)
class Example:
    """An example: its number in the split, and its image as a data URL; "" for other data."""

    number: int
    label: int
    predicted: int
    probability: float  # Of the label.
    image: str


@dataclass(frozen=True)
class Classified:
    """A classifier's results; `confusion[label][predicted]` counts examples.

    `class_names` are empty if the data has none; then a class is shown by its number.
    """

    checkpoint: str
    split: str
    confusion: list[list[int]]
    worst: list[Example] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)

    @property
    def num_examples(self) -> int:
        """The number of examples in the split."""
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        """The share of the examples whose class was predicted."""
        return sum(row[i] for i, row in enumerate(self.confusion)) / max(1, self.num_examples)


def classified_or_reason(model_dir: str) -> Classified | str:
    """Returns `classified`, or the reason why the model has no results. Imports TensorFlow."""
    try:
        prepare_tensorflow()
        return classified(model_dir)
    except TrainerError as error:
        return first_line(error)
    except Exception as error:  # A user's code, which may fail in any way.
        return f"{type(error).__name__}: {first_line(error)}"


def classified(model_dir: str) -> Classified:
    """Runs the newest checkpoint of a run on its evaluation split.

    Raises:
        ConfigError, DataError, ModelDirError: the model is no classifier with one output, the data
            or the checkpoint is missing, or the config file now defines another model.
    """
    from trainer.inputs import Inputs, data_errors_explained
    from trainer.learner.variables import set_values
    from trainer.session import restore

    found = restore(model_dir, "newest_complete")
    set_values(found.learner.model, found.learner)
    with data_errors_explained(Inputs(found.reader, found.reader)):
        return _classified(found)


def _classified(found: "Restored") -> Classified:
    import numpy as np
    import tensorflow as tf

    from data.disk_reader import DiskReader

    model = found.learner.model
    confusion: npt.NDArray[np.int64] | None = None
    is_probability = False
    worst: list[Example] = []
    order = found.reader.order
    batches = DiskReader(found.reader).evaluation_batches(range(order.lanes))
    for number, (inputs, labels, *_, counts) in enumerate(batches):
        outputs = model(inputs, training=False)
        if not isinstance(outputs, tf.Tensor) or outputs.shape.rank != 2 or outputs.shape[1] < 2:
            raise ConfigError("the model has not one output with a number for each class")
        classes = _classes(labels, outputs)
        values = outputs.numpy().astype(np.float64)
        if confusion is None:
            confusion = np.zeros([outputs.shape[1]] * 2, np.int64)
            is_probability = _are_probabilities(values)  # The same for a small last batch.
        probabilities = values if is_probability else tf.nn.softmax(values).numpy()
        is_real = counts.numpy() > 0
        predicted = probabilities.argmax(axis=1)
        np.add.at(confusion, (classes[is_real], predicted[is_real]), 1)
        of_label = probabilities[np.arange(len(classes)), classes]
        numbers = order.records(number, 1, range(order.lanes)).reshape(-1)
        wrong = np.flatnonzero(is_real & (predicted != classes))
        for row in wrong[np.argsort(of_label[wrong])][:_NUM_WORST]:
            if len(worst) < _NUM_WORST or of_label[row] < worst[-1].probability:
                label, guess = int(classes[row]), int(predicted[row])
                image = _image(inputs, int(row))
                example = Example(int(numbers[row]), label, guess, float(of_label[row]), image)
                worst = sorted([*worst, example], key=lambda e: e.probability)[:_NUM_WORST]
    if confusion is None:
        raise ConfigError("the evaluation split has no example")
    names = _class_names(found, len(confusion))
    return Classified(found.name, found.reader.split.name, confusion.tolist(), worst, names)


def _are_probabilities(values: "npt.NDArray[np.float64]") -> bool:
    """Returns True if each row has the sum of probabilities, which 16 bits change by up to 0.6%."""
    return bool((values >= 0).all() and (abs(values.sum(axis=1) - 1) < _ROUNDING).all())


def _class_names(found: "Restored", num_classes: int) -> list[str]:
    """The names of the classes of the label; empty unless each class has a name."""
    directory = data_dir(found.recipe.config)
    if not exists(join(directory, "features.json")):
        return []
    used = labels_used(read_features(directory), found.reader.parse)
    names = class_names(directory, used[0]) if len(used) == 1 else []
    return names if len(names) == num_classes else []


def _classes(labels: Any, outputs: Any) -> "npt.NDArray[np.int64]":  # Any: nests of tensors.
    """Returns the class of each example. Raises ConfigError if `labels` are no classes."""
    import numpy as np
    import tensorflow as tf

    num_classes = int(outputs.shape[1])
    if num_classes > _MOST_CLASSES:
        raise ConfigError(
            f"the model has {num_classes:,} outputs; classes are shown up to {_MOST_CLASSES:,}"
        )
    if isinstance(labels, tf.Tensor):
        values = labels.numpy()
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim == 2 and values.shape[1] == num_classes and (values.sum(axis=1) == 1).all():
            return np.asarray(values.argmax(axis=1), np.int64)
        is_class = values.ndim == 1 and (values == np.floor(values)).all()
        if is_class and values.min() >= 0 and values.max() < num_classes:
            return np.asarray(values, np.int64)
    raise ConfigError(f"the labels are not numbers of {num_classes:,} classes")


def _image(inputs: Any, row: int) -> str:  # Any: a nest of tensors.
    """Returns an example as the data URL of an image, scaled to all greys; "" if it is none."""
    import numpy as np
    import tensorflow as tf

    if not isinstance(inputs, tf.Tensor):
        return ""
    values = inputs[row].numpy().astype(np.float32)
    if values.ndim == 2:
        values = values[:, :, np.newaxis]
    if values.ndim != 3 or values.shape[2] not in (1, 3) or min(values.shape[:2]) < 4:
        return ""
    low, high = values.min(), values.max()
    values = (values - low) / max(float(high - low), 1e-9) * 255
    if max(values.shape[:2]) > _MOST_PIXELS:
        size = [_MOST_PIXELS, _MOST_PIXELS]
        values = tf.image.resize(values, size, preserve_aspect_ratio=True).numpy()
    png = tf.io.encode_png(np.round(values).astype(np.uint8)).numpy()
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
