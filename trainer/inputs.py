"""Opens the two splits of a recipe's data, and fits them and its model to each other.

    inputs = open_inputs(recipe)
    build_metrics(inputs, learner, recipe)
    with data_errors_explained(inputs):
        batch = batch_at(inputs.train, 0)

All code that reads batches does so within `data_errors_explained`.
"""

import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from data.disk_reader import DiskReader
from data.example_features import read_features
from data.features import Declared, ExampleParse, default_parse
from data.order import Order
from data.reader import Parse, Reader, as_tuples, takes_seeds
from data.system.compat.autograph import autograph, no_autograph
from data.system.extras import of_satellite
from data.system.files import SKIP, DataError, exists, is_s3, names_in, parent
from data.tfrecord.damage import open_good, verify
from data.tfrecord.shard_names import prepare_again
from data.tfrecord.split import Split, changed_files, check_record_bytes, open_split
from strategies.base import Batch
from strategies.step_errors import DataFaultError, reason_of_xla
from trainer.config import Config, ConfigError, Recipe, data_dir, num_lanes
from trainer.exit_codes import first_line
from trainer.learner import Learner
from trainer.models import declared_inputs, declared_outputs, keras_tensors
from trainer.run_files import TAKEN_NAMES
from trainer.step.keras_losses import is_keras
from trainer.unparsed_records import message_of, unparsed

log = logging.getLogger(__name__)

# They need no files; a run prepares them when they are missing.
_WITHOUT_DOWNLOAD = ("digits", "diabetes", "clicks")


@dataclass(frozen=True)
class Inputs:
    """The readers of the two splits. Without training, `train` is the same reader."""

    train: Reader
    evaluation: Reader
    records_skipped: Mapping[str, int] | None = None  # By split; None if damage is fatal.

    @property
    def note(self) -> str:
        """Which features the default `parse` uses; empty with another `parse`."""
        parse = self.train.parse
        return parse.note if isinstance(parse, ExampleParse) else ""

    @property
    def readers(self) -> Sequence[Reader]:
        """Each reader once."""
        return [self.train] if self.train is self.evaluation else [self.train, self.evaluation]


def open_inputs(recipe: Recipe, num_threads: int = 0, *, copies_all: bool = False) -> Inputs:
    """Opens the data of `recipe`. Prepares missing data that needs no download.

    `num_threads` threads of this process read and parse; 0 chooses a number. With `copies_all`, all
    data at s3:// is copied to this machine first.

    Raises DataError if the data is missing, incomplete, or cannot be parsed without a `parse`.
    """
    config, data = recipe.config, recipe.config.data
    _prepare_if_missing(config)
    opened = open_evaluation(recipe, data.train_split, num_threads, copies_all=copies_all)
    order = dataclasses.replace(
        opened.order,
        batch_size=config.batch_size,
        lanes=num_lanes(config),
        seed=config.seed,
        shuffle=data.shuffle,
    )
    train = dataclasses.replace(
        opened, order=order, augment=recipe.augment, cache_bytes=data.cache_bytes
    )
    evaluation = open_evaluation(recipe, data.eval_split, num_threads, copies_all=copies_all)
    skipped = {"train": train.split.num_skipped, "eval": evaluation.split.num_skipped}
    return Inputs(train, evaluation, skipped if data.on_corrupt == SKIP else None)


def open_evaluation(
    recipe: Recipe, name: str, num_threads: int = 0, *, copies_all: bool = False
) -> Reader:
    """Opens split `name` as it is evaluated; other arguments and errors as of `open_inputs`."""
    config = recipe.config
    split = _open_split(recipe, name, copies_all=copies_all)
    batch_size = config.eval_batch_size or config.batch_size
    order = Order(
        shard_lengths=split.shard_lengths,
        chunk_examples=split.chunk_examples,
        batch_size=batch_size,
        lanes=batch_size,
        window_batches=config.data.window_batches,
        seed=0,
        shuffle=False,
    )
    parse = parse_of(recipe, data_dir(config), all_if_unclear=True)
    prefetch_batches = config.data.prefetch_batches
    return Reader(split, order, parse, num_threads, prefetch_batches=prefetch_batches)


def _open_split(recipe: Recipe, name: str, *, copies_all: bool = False) -> Split:
    config = recipe.config
    split = split_of(recipe, data_dir(config), name)
    if is_s3(data_dir(config)):
        with_copies = of_satellite("data.tfrecord.shard_copies", "with_copies")
        split = with_copies(split, config.data_cache_dir, config.data_cache_bytes)
    if copies_all and split.copies is not None:
        split.copies.complete(split)
    return split


def split_of(recipe: Recipe, directory: str, name: str) -> Split:
    """Split `name` in `directory`, without damaged records if `recipe` skips them."""
    open_any = open_good if recipe.config.data.on_corrupt == SKIP else open_split
    split = open_any(directory, name)
    check_record_bytes(split, recipe.config.data.max_record_bytes)
    if split.damages:
        log.warning(
            "split %r: %s of %s records cannot be read and are left out; the first: %s",
            split.name,
            f"{split.num_skipped:,}",
            f"{split.num_skipped + split.num_examples:,}",
            split.damages[0],
        )
    return split


def num_steps_of(recipe: Recipe, num_epochs: float) -> int:
    """The least number of steps that cover the training examples `num_epochs` times.

    Errors as of `open_inputs`.
    """
    _prepare_if_missing(recipe.config)
    split = _open_split(recipe, recipe.config.data.train_split)
    # Less a little: a whole number of steps must not become one more by rounding.
    return max(1, math.ceil(num_epochs * split.num_examples / recipe.config.batch_size - 1e-9))


def parse_of(
    recipe: Recipe, directory: str, declared: Declared = None, *, all_if_unclear: bool = False
) -> Parse:
    """The `parse` of the config file, or the default for the features of `directory`.

    The default gives a model the inputs that it declares: their dtypes, and their names in a dict.
    With `all_if_unclear` the model is not built yet, and the inputs may depend on it.
    """
    data = recipe.config.data
    if recipe.parse is None:
        features = read_features(directory)
        return default_parse(
            features, data.inputs, data.label, declared, all_if_unclear=all_if_unclear
        )
    for name in ("inputs", "label"):
        if chosen := getattr(data, name):
            raise ConfigError(
                f"config.data.{name}={chosen!r} is for the default parse, but {recipe.path} "
                f"defines another. Leave one of them out."
            )
    return _returns_tuples(recipe.parse)


def fitted_to_model(inputs: Inputs, recipe: Recipe, model: keras.Model) -> Inputs:
    """`inputs` as `model` declares its inputs, if there is no own `parse`."""
    if recipe.parse is not None:
        return inputs
    parse = parse_of(recipe, data_dir(recipe.config), declared_dtypes(model))
    train = dataclasses.replace(inputs.train, parse=parse)
    evaluation = dataclasses.replace(inputs.evaluation, parse=parse)
    return dataclasses.replace(inputs, train=train, evaluation=evaluation)


def declared_dtypes(model: keras.Model) -> Declared:
    """The dtype of the input of `model`, or dtypes by name; None if the inputs are others."""
    taken = declared_inputs(model)
    if isinstance(taken, dict):
        return {name: tensor.dtype for name, tensor in taken.items()}
    tensors = [] if taken is None else tf.nest.flatten(taken)
    return str(tensors[0].dtype) if len(tensors) == 1 else None


def _returns_tuples(parse: Parse) -> Parse:
    """`parse`, with tuples for lists."""
    if isinstance(parse, ExampleParse):
        return parse

    def parse_to_tuples(serialized: tf.Tensor) -> Batch:
        return as_tuples(autograph(parse)(serialized))

    def parse_with_seeds(serialized: tf.Tensor, seeds: tf.Tensor | None = None) -> Batch:
        return as_tuples(autograph(parse)(serialized, seeds=seeds))

    return no_autograph(parse_with_seeds if takes_seeds(parse) else parse_to_tuples)


def prepare_inputs(recipe: Recipe) -> None:
    """Prepares the data set of `recipe` if it is missing; opens, indexes and describes it."""
    _prepare_if_missing(recipe.config, may_download=True)
    inputs = open_inputs(recipe, copies_all=is_s3(data_dir(recipe.config)))
    print(f"{data_dir(recipe.config)} is ready:")
    for split in (inputs.train.split, inputs.evaluation.split):
        num_bytes = sum(shard.record_bytes for shard in split.shards)
        num_files = len({shard.path for shard in split.shards})
        examples = f"{split.num_examples:,} examples in {num_files} file(s)"
        print(f"  {split.name}: {examples}, {num_bytes:,} bytes")


def _prepare_if_missing(config: Config, *, may_download: bool = False) -> None:
    """Prepares a data set that is missing.

    Raises DataError if this fails, or if only a data set with a similar name is known.
    """
    directory = data_dir(config)
    # Not if the user named the directory: a typo must not create one.
    if config.data_dir or exists(directory):
        return
    if config.dataset in _WITHOUT_DOWNLOAD or may_download:
        prepare = of_satellite("data.prepare.preparing", "prepare")
        try:
            prepare(config.dataset, directory)
        except OSError as error:
            raise DataError(
                f"The data cannot be prepared in {directory}: {error}. Make room there, or give a "
                "directory that can be written with --data_dir, and prepare it with data.prepare."
            ) from error
        return
    nearest = of_satellite("data.prepare.catalog", "nearest")
    prepared: list[str] = []
    with contextlib.suppress(OSError):
        prepared = names_in(parent(directory))
    if near := nearest(config.dataset, prepared):
        raise DataError(
            f"There is no directory {directory}. Did you mean --config.dataset={near}? Otherwise "
            f"write the data there: {prepare_again(directory)}"
        )


def build_metrics(inputs: Inputs, learner: Learner, recipe: Recipe) -> None:
    """Prepares the loss and the metrics of `learner` for the labels that `parse` returns.

    Raises ConfigError if they do not fit, or if config.best_metric names none of the metrics.
    """
    objective = learner.objective
    specs, labels, *weights = inputs.train.parsed_specs
    needs_rank = is_keras(recipe.loss) or objective.keras_metrics or recipe.config.class_weight
    if needs_rank and any(label.shape.rank is None for label in tf.nest.flatten(labels)):
        raise ConfigError(
            "The number of axes of the labels is not known, but the loss or the metrics of "
            f"{recipe.path} need it. Let parse() return tf.ensure_shape(labels, [None]), for "
            "example."
        )
    is_function = "loss" in objective.functions and not is_keras(recipe.loss)
    if is_function and any(map(tf.nest.is_nested, weights)):
        raise ConfigError(
            f"parse() of {recipe.path} returns several weights, but the loss is a function, which "
            "takes one for each example. Return one tensor; or give a loss by output, "
            "loss = {'NAME': function, ...}."
        )
    if recipe.config.class_weight:
        has_several = tf.nest.is_nested(labels) or labels.shape.rank not in (1, 2)
        if not has_several and labels.shape.rank == 2:
            (output, *_) = tf.nest.flatten(declared_outputs(learner.model, specs))
            # As of a token: the label is of a position. None: the outputs are not known.
            has_several = output is not None and len(output.shape) > 2
        if weights or has_several:
            other = "weights of examples too" if weights else "several labels"
            raise ConfigError(
                f"config.class_weight is for one label an example, but parse() of {recipe.path} "
                f"returns {other}. Multiply the weights in parse()."
            )
    has_default_accuracy = recipe.metrics is None and (
        recipe.loss is not None or "loss" not in objective.functions
    )
    if has_default_accuracy or is_keras(recipe.loss) or objective.keras_metrics:
        outputs = learner.model.compute_output_spec(keras_tensors(specs))
        if has_default_accuracy and not _are_classes(labels, outputs):
            objective.leave_out_accuracy()
        objective.build_metrics(labels, outputs)
    if recipe.config.best_mode != "auto":
        is_lowest = recipe.config.best_mode == "min"
        objective.directions[recipe.config.best_metric] = is_lowest
    names = objective.metric_names
    for name in names:
        if name in TAKEN_NAMES or names.count(name) > 1:
            other = "another value" if name in TAKEN_NAMES else "another metric"
            raise ConfigError(
                f"A metric of {recipe.path} has the name {name!r}, which {other} has in reports. "
                f"Rename it: a key of the dict of metrics, or name='my_{name}' of a Keras metric."
            )
    if recipe.config.best_metric not in names:
        raise ConfigError(
            f"config.best_metric={recipe.config.best_metric!r} is none of the metrics: "
            f"{', '.join(names)}."
        )


def _are_classes(labels: Batch, outputs: Batch) -> bool:
    """Returns True if labels are classes, integer or one-hot, and outputs a value for each."""
    if tf.nest.is_nested(labels) or tf.nest.is_nested(outputs):
        return False
    num_classes = outputs.shape[-1] if len(outputs.shape) == 2 else 1
    if labels.shape.rank == 1:
        return bool(labels.dtype.is_integer and num_classes != 1)
    return bool(labels.shape.rank == 2 and labels.shape[-1] == num_classes != 1)


def batch_at(reader: Reader, batch: int) -> Batch:
    """The complete batch number `batch`, read by this task."""
    lanes = range(reader.order.lanes)
    return next(iter(DiskReader(reader).batches(batch, lanes, num_batches=1)))


@contextlib.contextmanager
def data_errors_explained(inputs: Inputs) -> Iterator[None]:
    """Turns TensorFlow's errors about records into DataErrors that name file and offset."""
    splits = [reader.split for reader in inputs.readers]
    try:
        try:
            yield
        except DataFaultError as error:  # Of an executor: its cause is TensorFlow's error.
            raise error.__cause__ or error from None
    except tf.errors.DataLossError as error:
        damages = [damage for split in splits for damage in verify(split)]
        listed = "\n  ".join(str(damage) for damage in damages[:10]) or first_line(error)
        raise DataError(
            f"Records are corrupt:\n  {listed}\nWrite these files anew; or copy the other records, "
            "python -m data.inspect --data_dir=DIR --repair=NEW_DIR, and give --data_dir=NEW_DIR; "
            f"or train with --config.data.on_corrupt={SKIP}, which leaves them out and counts them "
            "(if that is set, remove .SPLIT.damage.json, which lists them as undamaged)."
        ) from error
    except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError) as error:
        raise DataError(f"A file of the data cannot be read any more: {error.message}") from error
    except (tf.errors.InvalidArgumentError, UnicodeDecodeError) as error:
        message = message_of(error)
        if reason := reason_of_xla(error):
            raise ConfigError(
                f"XLA cannot compile a function of the step: {reason} Type "
                "--config.jit_compile=False, if no function of the config file is compiled."
            ) from error
        if changed := [change for split in splits for change in changed_files(split)]:
            listed = "\n  ".join(map(str, changed[:10]))
            raise DataError(
                f"Files were changed while they were read:\n  {listed}\nPut them back as they were "
                "and start again; or, if they are as they should be, remove the index, "
                ".SPLIT.index.npz or SPLIT.index.npz."
            ) from error
        reason = first_line(Exception(message))
        reason = re.sub(r"^Error in user-defined function .*? iterator: \S+: ", "", reason)
        reason = reason.rpartition("assertion failed: ")[2].replace("\\'", "'")
        raise DataError(
            f"The data does not suit the model or its features: {reason}"
            f"{unparsed(message, inputs.readers)}"
        ) from error
