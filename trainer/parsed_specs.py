"""The tensors that `parse` returns: which the model gets, and what is refused before training.

specs = input_specs(inputs, recipe)         # of the model's inputs
notes = length_notes(inputs, recipe.path)
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from data.reader import takes_seeds
from strategies.base import Batch
from trainer.config import ConfigError, Recipe
from trainer.config_file import errors_explained
from trainer.inputs import Inputs

_PARSE_HINT = (
    "\n  parse gets n records at once, string [n], and returns (inputs [n, ...], labels [n, ...]): "
    "use tf.io.parse_example, not tf.io.parse_single_example, and tf.map_fn where an op takes one "
    "record."
)

_PARTS = ("inputs", "labels", "weights")  # Of what parse returns.
# Not the length of the longest list: which examples `parse` gets at once depends on the strategy.
_MAKE_DENSE = {
    "SparseTensor": "tf.RaggedTensor.from_sparse(x).to_tensor(shape=[None, 20])",
    "RaggedTensor": "x.to_tensor(shape=[None, 20])",
}


def input_specs(inputs: Inputs, recipe: Recipe) -> Batch:
    """The tensor specs of the model's inputs, as `parse` returns them. No record is read.

    Raises ConfigError if `parse` fails for string [n], or does not return (inputs, labels).
    """
    what = f"parse(serialized) of {recipe.path}"
    with errors_explained(what, _PARSE_HINT):
        specs = inputs.train.parsed_specs
    if not isinstance(specs, tuple) or len(specs) not in (2, 3):
        shapes = tf.nest.map_structure(shape_text, specs)
        raise ConfigError(
            f"{what} must return (inputs, labels) or (inputs, labels, weights), but returned "
            f"{shapes}. If there are no labels, return zeros: "
            "return inputs, tf.zeros([tf.shape(serialized)[0]])."
        )
    check_dense(what, specs)
    for part, spec in zip(_PARTS, specs, strict=False):
        for each in tf.nest.flatten(spec):
            if each.shape.rank == 0:
                raise ConfigError(
                    f"{what} must return {part} of n examples, [n, ...], but returned "
                    f"{shape_text(each)}.{_PARSE_HINT}"
                )
    if inputs.train is not inputs.evaluation and takes_seeds(inputs.train.parse):
        with errors_explained(f"parse(serialized, seeds) of {recipe.path}", _PARSE_HINT):
            seeded = inputs.train.seeded_specs
        if tf.nest.map_structure(str, seeded) != tf.nest.map_structure(str, specs):
            shapes = [tf.nest.map_structure(shape_text, found) for found in (seeded, specs)]
            raise ConfigError(
                f"parse(serialized, seeds) of {recipe.path} must return the same types with seeds, "
                f"in training, as without: in evaluation seeds is None. It returned {shapes[0]} "
                f"and {shapes[1]}."
            )
    return specs[0]


def check_dense(what: str, returned: Batch) -> None:
    """Raises ConfigError if a part of (inputs, labels, ...) is sparse, ragged or no tensor."""
    for path, found in keras.tree.flatten_with_path(returned):
        if isinstance(found, (tf.Tensor, tf.TensorSpec)):
            continue
        name = _part_name(path)
        kind = type(found).__name__.removesuffix("Spec")
        shown = "None" if found is None else f"a {kind}"
        said = f"{what} must return dense tensors, but its {name} are {shown}."
        if kind in _MAKE_DENSE:
            said += (
                f" Pad it to one length, here 20, which cuts longer lists: {_MAKE_DENSE[kind]} "
                "(default_value=-1 tells padding from ids)."
            )
        raise ConfigError(said)


def length_notes(inputs: Inputs, path: str) -> list[str]:
    """Names the tensors of `parse`, of the config `path`, that have an axis of unknown size.

    If lists are padded to the longest one, their length depends on which examples `parse` gets at
    once, and this on the strategy. A loss that is a mean over the length then depends on it, too.
    """
    found = {
        _part_name(where): spec
        for where, spec in keras.tree.flatten_with_path(inputs.train.parsed_specs)
        if not spec.shape[1:].is_fully_defined()
    }
    if not found:
        return []
    named = ", ".join(f"{name} of {shape_text(spec)}" for name, spec in found.items())
    first = next(iter(found.values())).shape
    inner = [20] if first.rank is None else [size or 20 for size in first[1:]]
    shape = f"[{', '.join(map(str, [None, *inner]))}]"
    return [
        f"parse() of {path} returns {named}. If a size that is None depends on the examples in a "
        "batch, other strategies train otherwise: they parse other groups of examples. Pad lists "
        f"to one length, here 20: x.to_tensor(shape={shape}). If the size is always the same, "
        f"return tf.ensure_shape(x, {shape}) with that size."
    ]


def _part_name(path: Sequence[int | str]) -> str:
    """The name, for messages, of a tensor in (inputs, labels, ...)."""
    part, *keys = path
    return _PARTS[int(part)] + "".join(f"[{key!r}]" for key in keys)


def shape_text(spec: tf.TensorSpec | tf.Tensor) -> str:
    """The dtype and the shape of a tensor, for messages."""
    return f"{spec.dtype.name}{spec.shape}" if hasattr(spec, "dtype") else type(spec).__name__
