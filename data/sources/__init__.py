"""Sources: one file a format, each turning what the user has into named splits of examples.

A format is a function that returns a `Source`; nothing is read from it but what a split's
`examples` yields, one serialized tf.train.Example at a time.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from data.records import DataError

Uint8s = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class SourceSplit:
    """One split. `examples()` yields exactly `num_examples` records, the same at every call.

    `num_bytes`: about how many bytes those are, from which the number of shards is chosen.
    """

    num_examples: int
    num_bytes: int
    examples: Callable[[], Iterator[bytes]]


@dataclasses.dataclass(frozen=True)
class Source:
    """What a data set is before it is written: its splits, and the metadata files beside them.

    `name`: how shards are named. `files`: file name -> text; features.json among them, where what
    an example holds is known.
    """

    name: str
    splits: Mapping[str, SourceSplit]
    files: Mapping[str, str]


def labelled_images(
    name: str, num_classes: int, splits: Mapping[str, tuple[Uint8s, npt.NDArray[np.integer]]]
) -> Source:
    """A source of (images uint8 [N, H, W, C], labels [N]) a split, held in memory.

    Images lie in the record as raw bytes: decoding is a copy.

    Raises:
        DataError: a label is outside [0, num_classes), or there is not one label for each image.
    """
    shapes = {images.shape[1:] for images, _ in splits.values()}
    if len(shapes) != 1:
        raise DataError(f"The splits of {name} have images of different shapes: {sorted(shapes)}")
    for split, (images, labels) in splits.items():
        if len(images) != len(labels):
            raise DataError(
                f"Split {split!r} of {name} has {len(images)} images and {len(labels)} labels: "
                "the two files do not belong together."
            )
        if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
            raise DataError(
                f"Split {split!r} of {name} has labels from {labels.min()} to {labels.max()}; "
                f"needed are 0 to {num_classes - 1}."
            )
    (shape,) = shapes
    features = {
        "image": {
            "pythonClassName": "tensorflow_datasets.core.features.tensor_feature.Tensor",
            "tensor": {
                "dtype": "uint8",
                "encoding": "bytes",
                "shape": {"dimensions": [str(size) for size in shape]},
            },
        },
        "label": {
            "classLabel": {"numClasses": str(num_classes)},
            "pythonClassName": "tensorflow_datasets.core.features.class_label_feature.ClassLabel",
        },
    }
    tree = {
        "featuresDict": {"features": features},
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
    }
    return Source(
        name,
        {split: _labelled_split(images, labels) for split, (images, labels) in splits.items()},
        {"features.json": json.dumps(tree, indent=4) + "\n"},
    )


def _labelled_split(images: Uint8s, labels: npt.NDArray[np.integer]) -> SourceSplit:
    def examples() -> Iterator[bytes]:
        import tensorflow as tf

        example = tf.train.Example()
        image = example.features.feature["image"].bytes_list.value
        label = example.features.feature["label"].int64_list.value
        image.append(b"")
        label.append(0)
        for i in range(len(images)):
            image[0] = images[i].tobytes()
            label[0] = int(labels[i])
            # Deterministic: the two fields lie in a map, whose order is otherwise anyone's.
            yield example.SerializeToString(deterministic=True)

    return SourceSplit(len(images), images.nbytes + 50 * len(images), examples)
