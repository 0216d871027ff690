"""A recipe's data: its two splits opened and put in order, and checked against its model.

inputs = open_inputs(recipe)
check_batches(inputs, learner, recipe)
inputs = with_seeds(inputs, learner)
with data_errors_explained(inputs):
train(...)
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from data.damage import open_split
from data.features import default_parse, read_features
from data.files import SKIP, DataError
from data.order import Order
from data.pipeline import Reader
from data.records import Split, changed_files, verify
from trainer.config import ConfigError, Recipe, data_dir, num_lanes
from trainer.exits import first_line
from trainer.learner import Learner, PerExample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """The two splits, each in its order."""

    train: Reader
    evaluation: Reader


def open_inputs(recipe: Recipe, num_threads: int = 0) -> Inputs:
    """Opens the data of `recipe`, preparing it first if that needs no more than this machine.

    `num_threads` of this process read and parse; 0 chooses.

    Raises:
        DataError: it is not there, not whole, or cannot be parsed without a `parse`.
    """
    config = recipe.config
    directory = data_dir(config)
    # Not where --data_dir says: a mistyped directory must not be made.
    if config.dataset == "digits" and not config.data_dir and not tf.io.gfile.exists(directory):
        from data.prepare import prepare  # It imports tensorflow_datasets.

        with _file_errors_explained(directory):
            prepare("digits", directory)
    train_split = open_split(directory, config.data.train_split, config.data.on_corrupt)
    eval_split = open_split(directory, config.data.eval_split, config.data.on_corrupt)
    for split in (train_split, eval_split):
        _warn_of_damage(split)
    parse = recipe.parse or default_parse(read_features(directory))
    eval_batch_size = config.eval_batch_size or config.batch_size
    train_order = Order(
        shard_lengths=train_split.shard_lengths,
        chunk_examples=train_split.chunk_examples,
        batch_size=config.batch_size,
        lanes=num_lanes(config),
        window_batches=config.data.window_batches,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    eval_order = Order(
        shard_lengths=eval_split.shard_lengths,
        chunk_examples=eval_split.chunk_examples,
        batch_size=eval_batch_size,
        lanes=eval_batch_size,
        window_batches=config.data.window_batches,
        seed=0,
        shuffle=False,
    )
    return Inputs(
        Reader(
            train_split,
            train_order,
            parse,
            num_threads,
            augment=recipe.augment,
            cache_bytes=config.data.cache_bytes,
            prefetch_batches=config.data.prefetch_batches,
        ),
        Reader(
            eval_split,
            eval_order,
            parse,
            num_threads,
            prefetch_batches=config.data.prefetch_batches,
        ),
    )


def records_skipped(inputs: Inputs, recipe: Recipe) -> dict[str, int] | None:
    """Records of each split that are left out; None where damage is not skipped but fatal."""
    if recipe.config.data.on_corrupt != SKIP:
        return None
    return {
        "train": inputs.train.split.num_skipped,
        "eval": inputs.evaluation.split.num_skipped,
    }


def prepare_inputs(recipe: Recipe) -> list[str]:
    """Prepares the data set that `recipe` names if it is not there; opens, indexes, describes it.

    Returns lines for people: where it is, and each split's examples, files and bytes.

    Raises:
        DataError: it cannot be prepared from what this machine has, or not be opened.
    """
    config = recipe.config
    directory = data_dir(config)
    # A directory that was named is the user's own: what is wrong with it, opening it says.
    if not config.data_dir and not tf.io.gfile.exists(directory):
        from data.prepare import prepare

        with _file_errors_explained(directory):
            prepare(config.dataset, directory)
    inputs = open_inputs(recipe)
    lines = [f"{directory} is ready:"]
    for split in (inputs.train.split, inputs.evaluation.split):
        num_bytes = sum(shard.record_bytes for shard in split.shards)
        lines.append(
            f"  {split.name}: {split.num_examples:,} examples in "
            f"{len({shard.path for shard in split.shards})} file(s), {num_bytes:,} bytes"
        )
    return lines


def check_batches(inputs: Inputs, learner: Learner, recipe: Recipe) -> None:
    """Returns if the first batch of each split goes through `learner`'s model, loss and metrics.

    Raises:
        DataError: it cannot be read or parsed, labels are out of range, or shapes do not fit.
        ConfigError: `augment` fails or returns another number of examples; the loss or a metric
            fails, or does not return one value an example.
    """
    _check_augment(inputs, recipe)
    for reader in (inputs.train, inputs.evaluation):
        where = f"The first batch of split {reader.split.name!r}"
        with data_errors_explained(inputs):
            batch = batch_at(reader, 0)
            try:
                examples, labels = batch
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{where}: parse() must return (inputs, labels), but returned "
                    f"{tf.nest.map_structure(lambda t: t.shape, batch)}."
                ) from error
        try:
            outputs = learner.model(examples, training=False)
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            taken = tf.nest.map_structure(lambda t: f"{t.dtype}{t.shape}", learner.model.inputs)
            shapes = tf.nest.map_structure(lambda t: f"{t.dtype.name}{t.shape}", examples)
            raise DataError(
                f"{where} does not fit the model of {recipe.path}: inputs are {shapes}, the model "
                f"takes {taken}. {first_line(error)}"
            ) from error
        if recipe.loss is None:
            _check_labels(where, labels.numpy(), outputs.shape[-1])
        num_examples = tf.nest.flatten(examples)[0].shape[0]
        for name, function in learner.functions.items():
            what = name if name == "loss" else f"metrics[{name!r}]"
            try:
                shape = _shape_of(function, labels, outputs)
            except Exception as error:  # A user's code, which may fail in any way.
                raise ConfigError(
                    f"{where}: {what}(labels, outputs) of {recipe.path} fails: "
                    f"{type(error).__name__}: {first_line(error)}"
                ) from error
            _check_shape(where, f"{what}(labels, outputs) of {recipe.path}", shape, num_examples)


def with_seeds(inputs: Inputs, learner: Learner) -> Inputs:
    """`inputs` whose training batches bring the seeds of their examples if `learner` needs them."""
    train = dataclasses.replace(inputs.train, gives_seeds=learner.needs_seeds)
    return dataclasses.replace(inputs, train=train)


def batch_at(reader: Reader, batch: int) -> Any:
    """Batch `batch` whole, read by this task alone."""
    lanes = range(reader.order.lanes)
    return next(iter(reader.batches(batch, lanes, num_batches=1)))


@contextlib.contextmanager
def data_errors_explained(inputs: Inputs) -> Iterator[None]:
    """Turns TensorFlow's errors about records into DataErrors that name file and offset.

    Raises:
        DataError: a record is corrupt or cannot be parsed.
    """
    try:
        yield
    except tf.errors.DataLossError as error:
        damages = [d for reader in (inputs.train, inputs.evaluation) for d in verify(reader.split)]
        listed = "\n  ".join(str(damage) for damage in damages[:10]) or first_line(error)
        raise DataError(
            f"Records are corrupt:\n  {listed}\nWrite these files anew, or leave "
            f"such records out, which is counted: --config.data.on_corrupt={SKIP} (if that is set, "
            "remove SPLIT.damage.json, which says that they were good)."
        ) from error
    except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError) as error:
        raise DataError(f"A file of the data cannot be read any more: {error.message}") from error
    except tf.errors.InvalidArgumentError as error:
        readers = (inputs.train, inputs.evaluation)
        if changed := [d for reader in readers for d in changed_files(reader.split)]:
            listed = "\n  ".join(map(str, changed[:10]))
            raise DataError(
                f"Files were changed while they were read:\n  {listed}\nPut them back as they were "
                "and start again; or, if they are as they should be, remove SPLIT.index.npz."
            ) from error
        # The first paragraphs are the trace of the graph.
        reason = error.message.strip().split("\n\n")[-1].splitlines()[0]
        raise DataError(f"The data does not suit the model or its features: {reason}") from error


@contextlib.contextmanager
def _file_errors_explained(directory: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"The data cannot be prepared in {directory}: {error}. Make room there, or give a "
            "directory that can be written with --data_dir, and prepare it with data.prepare."
        ) from error


def _warn_of_damage(split: Split) -> None:
    if split.damages:
        log.warning(
            "split %r: %s of %s records cannot be read and are left out; the first: %s",
            split.name,
            f"{split.num_skipped:,}",
            f"{split.num_skipped + split.num_examples:,}",
            split.damages[0],
        )


def _check_augment(inputs: Inputs, recipe: Recipe) -> None:
    reader = inputs.train
    if reader.augment is None:
        return
    plain = dataclasses.replace(reader, augment=None)
    with data_errors_explained(inputs):
        batch = batch_at(plain, 0)
    if len(batch) != 2:
        return  # `parse` is at fault, and is told so.
    seeds = tf.constant(reader.order.seeds(0, 1)[0])
    # As it is used: in a graph, for any number of examples.
    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), (*batch, seeds)
    )
    what = f"augment(inputs, labels, seeds) of {recipe.path}"
    try:
        returned = tf.function(reader.augment, input_signature=specs)(*batch, seeds)
    except Exception as error:  # A user's code, which may fail in any way.
        raise ConfigError(f"{what} fails: {type(error).__name__}: {first_line(error)}") from error
    num_examples = reader.order.batch_size
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    shapes = [getattr(value, "shape", None) for value in tf.nest.flatten(returned)]
    if not is_pair or any(not shape or shape[0] != num_examples for shape in shapes):
        raise ConfigError(
            f"{what} must return (inputs, labels) of as many examples as it gets, {num_examples} "
            f"here. Received: shapes {', '.join(map(str, shapes))}."
        )


def _shape_of(function: PerExample, labels: Any, outputs: Any) -> Any:
    """The tf.TensorShape of what `function` returns; None if that is no tensor.

    Traced, not run: ops that only workers can run are allowed.
    """
    specs = tf.nest.map_structure(tf.type_spec_from_value, (labels, outputs))
    returned = tf.function(function).get_concrete_function(*specs).structured_outputs
    return getattr(returned, "shape", None)


def _check_shape(where: str, what: str, shape: Any, num_examples: int) -> None:
    if shape is not None and shape.is_compatible_with([num_examples]):
        return
    if shape is None:
        remedy = "return a single tensor"
    elif shape.rank == 0:
        remedy = "drop tf.reduce_mean or tf.reduce_sum"
    elif shape.rank == 1:
        remedy = "reduce over every axis but the first"
    else:
        remedy = (
            "reduce over every axis but the first, as tf.reduce_mean(..., axis=-1) does; and give "
            "labels and outputs the same shape, as outputs[:, 0] does"
        )
    returned = "no tensor" if shape is None else f"shape {shape}"
    raise ConfigError(
        f"{where}: {what} returned {returned} for {num_examples} examples, but shape "
        f"({num_examples},) is needed. Return one value an example: {remedy}."
    )


def _check_labels(where: str, labels: Any, num_classes: int) -> None:
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise DataError(
            f"{where} has labels {labels.dtype}{list(labels.shape)}, but the loss needs one "
            "integer an example. Define `loss` in the config file for other labels."
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"{where} has labels from {labels.min()} to {labels.max()}, but the model has "
            f"{num_classes} outputs. Labels must be 0 to {num_classes - 1}."
        )
