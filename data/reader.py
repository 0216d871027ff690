"""What a batch is: which examples, how they are parsed, and what comes with them. Reads no file.

    reader = Reader(split, order, parse)
    batch, = DiskReader(reader).batches(first_batch=1234, lanes=range(20), num_batches=1)

`data.order` alone decides what batch s holds: there is no shuffle buffer and no iterator to save.
A `Reader` is read in one of these ways:

| read by | records come from | examples in one call of `parse` |
| --- | --- | --- |
| `DiskReader` | local files, or URLs by way of TensorFlow | a batch, or more up to 1,024 |
| `CachedFeed` | memory, filled by a `DiskReader` before the first batch | up to 1,024 |
| `DiskTickets` | the pieces that a ticket names, read by a ps worker | the ticket or sub-batch |
| `CachedTickets` | the ps worker's memory, filled once in each run | up to 1,024 |
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from data.features import ExampleParse
from data.order import Order, Plan
from data.system.compat.autograph import autograph, no_autograph
from data.system.files import DataError
from data.tfrecord.split import Split

Nest = Any  # A tensor or a nest of tensors, or of their specs: TensorFlow has no type for it.
Examples = tuple[Nest, Nest]
Batch = tuple[Nest, ...]
Parse = Callable[..., Examples]  # Of records; and of seeds, if it has such a parameter.
Augment = Callable[[Nest, Nest, tf.Tensor], Examples]

_MAX_RUN_BYTES = 16 << 20  # Records that the reading of one window may hold at a time.
# A group is parsed at once: a call of `parse` costs about as much as 500 small examples. These are
# its limits; bytes are counted before or after parsing, whichever are more.
_GROUP_EXAMPLES = 1024
_GROUP_BYTES = 4 << 20


class Part(NamedTuple):
    """Some lanes of batches, one batch after another; without end if `num_batches` is None."""

    first_batch: int
    num_batches: int | None
    lanes: range


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """One split in one order, with its parse function. Holds no position.

    Attributes:
        parse: string [n] -> (inputs [n, ...], labels [n, ...]). It must treat examples
            independently, take any n, and not draw random numbers with a state. If it has a
            parameter `seeds`, with default None, it gets those of training examples, int32 [n, 2].
        num_threads: Threads of each dataset that parse, and read URLs; 0: usable CPUs, at most 8.
        augment: (inputs, labels, seeds int32 [n, 2]) -> (inputs, labels), for training batches
            only. It must treat examples independently, and draw random numbers from each example's
            seed alone (`Order.seeds`).
        cache_bytes: The training set, as before `widen`, is cached up to this size; never strings.
        prefetch_batches: Parsed batches kept ready, besides the batches that threads work on.
        gives_seeds: Training batches end with the seeds, whatever `augment` did with them.
    """

    split: Split
    order: Order
    parse: Parse
    num_threads: int = 0
    augment: Augment | None = None
    cache_bytes: int = 0
    prefetch_batches: int = 0
    gives_seeds: bool = False

    def __post_init__(self) -> None:
        if self.cache_bytes and takes_seeds(self.parse):
            raise DataError(
                "config.data.cache_bytes keeps what parse returns, but parse(serialized, seeds) "
                "returns something else in each epoch. Leave cache_bytes out; or let parse take "
                "`serialized` alone, and augment(inputs, labels, seeds) do what is random."
            )

    @property
    def num_evaluation_batches(self) -> int:
        """The number of batches that hold each record once; the last may be padded."""
        return -(-self.split.num_examples // self.order.batch_size)

    def batch_examples(self, lanes: range | None = None) -> int:
        """n, the examples of a batch in `lanes`; all lanes by default."""
        rows = self.order.batch_size // self.order.lanes
        return rows * (self.order.lanes if lanes is None else len(lanes))

    def extras(
        self, first_batch: int, num_batches: int, lanes: range | None, *, weights: bool = False
    ) -> Plan:
        """The arrays of batches in addition to their records.

        With `weights` (evaluation): "weights" float32 [num_batches, n], 1 for the first time that a
        record comes, else 0. Otherwise "seeds" int32 [num_batches, n, 2] if `augment` or
        `gives_seeds` is set, or `parse` takes them.
        """
        if weights:
            positions = self.order.positions(first_batch, num_batches, lanes)
            return {"weights": (positions < self.split.num_examples).astype(np.float32)}
        if self.augment is None and not self.gives_seeds and not takes_seeds(self.parse):
            return {}
        return {"seeds": self.order.seeds(first_batch, num_batches, lanes)}

    def row_plan(self, first_batch: int, num_batches: int, lanes: range | None = None) -> Plan:
        """The batches as record numbers, "gather" int64 [num_batches, n], with their `extras`."""
        gather = self.order.records(first_batch, num_batches, lanes)
        return {"gather": gather, **self.extras(first_batch, num_batches, lanes)}

    def row_spec(
        self, num_batches: int | None = None, lanes: range | None = None, *, weights: bool = False
    ) -> dict[str, tf.TensorSpec]:
        """The types of "gather" and of `extras`."""
        shape = [num_batches, self.batch_examples(lanes)]
        spec = {"gather": tf.TensorSpec(shape, tf.int64)}
        for name, value in self.extras(0, 1, range(1), weights=weights).items():
            spec[name] = tf.TensorSpec([*shape, *value.shape[2:]], value.dtype)
        return spec

    def runs(self, first_batch: int, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """`Order.windows` up to batch `stop`, (first, count), in parts that fit in memory."""
        batch_bytes = self.order.batch_size * self.split.mean_record_bytes
        most = max(1, _MAX_RUN_BYTES // batch_bytes)
        for first, count in self.order.windows(first_batch):
            end = first + count if stop is None else min(stop, first + count)
            for begin in range(first, end, most):
                yield begin, min(most, end - begin)
            if end == stop:
                return

    def group_examples(self, specs: Nest) -> int:
        """The number of examples to parse at once, if parsing returns `specs`."""
        parsed_bytes, record_bytes = _example_bytes(specs), self.split.mean_record_bytes
        largest = max(int(parsed_bytes), record_bytes) if parsed_bytes < math.inf else record_bytes
        return max(1, min(_GROUP_EXAMPLES, _GROUP_BYTES // largest))

    @property
    def caches_examples(self) -> bool:
        """True if all training examples fit in `cache_bytes`, so that they are cached."""
        num_examples, most = self.split.num_examples, self.cache_bytes
        return most > 0 and _example_bytes(self.narrow.parsed_specs) * num_examples <= most

    @functools.cached_property
    def parsed_specs(self) -> Nest:
        """The types of parsed (inputs, labels), each [n, ...]."""
        return _specs(self.parse)

    @property
    def seeded_specs(self) -> Nest:
        """As `parsed_specs`, of training examples, if `parse` takes seeds."""
        return _specs(self.parse, tf.TensorSpec([None, 2], tf.int32))

    @no_autograph
    def parse_records(self, serialized: tf.Tensor, extras: dict[str, tf.Tensor]) -> Batch:
        """Parses records, string [..., n], and finishes them with their `extras` (see `finish`)."""
        seeds = {}
        if "seeds" in extras and takes_seeds(self.parse):
            seeds = {"seeds": tf.reshape(extras["seeds"], [-1, 2])}
        parsed = autograph(self.parse)(tf.reshape(serialized, [-1]), **seeds)
        return self.finish(parsed, tf.shape(serialized), serialized.shape, extras)

    @no_autograph
    def gather_rows(
        self, rows_of: Callable[[tf.Tensor], Examples], plan: dict[str, tf.Tensor]
    ) -> Batch:
        """Batches of cached examples, widened and finished; `plan`: see `row_plan`.

        `rows_of`: record numbers, int64 [k] -> as `narrow.parsed_specs`, each [k, ...].
        """
        numbers = plan["gather"]
        parsed = self._widened(rows_of(tf.reshape(numbers, [-1])))
        return self.finish(parsed, tf.shape(numbers), numbers.shape, plan)

    @functools.cached_property
    def narrow(self) -> "Reader":
        """Gives batches as they are before `widen` and `augment`, for `finished` to complete.

        Its examples are those that are cached.
        """
        return dataclasses.replace(
            self,
            parse=self.parse.narrow if isinstance(self.parse, ExampleParse) else self.parse,
            augment=None,
            gives_seeds=self.gives_seeds or self.augment is not None,
        )

    @no_autograph
    def finished(self, batch: Batch) -> Batch:
        """The batch of this reader, made of the same batch, or of some rows, of `narrow`.

        Runs on the device of its caller: less is copied to it than complete batches have.
        """
        *parsed, seeds = batch if self.narrow.gives_seeds else (*batch, None)
        shape = tf.nest.flatten(parsed)[0].shape[:1]
        extras = {} if seeds is None else {"seeds": seeds}
        return self.finish(self._widened(tuple(parsed)), shape, shape, extras)

    @no_autograph
    def _widened(self, batch: Batch) -> Batch:
        if not isinstance(self.parse, ExampleParse):
            return batch
        return (*self.parse.widened(batch[:2]), *batch[2:])

    @no_autograph
    def finish(
        self,
        parsed: Examples,
        shape: tf.Tensor,
        static_shape: tf.TensorShape,
        extras: dict[str, tf.Tensor],
    ) -> Batch:
        """Parsed examples, each [k, ...] -> augmented batches, each [*shape, ...].

        "weights" in `extras` follow, or "seeds" if the reader `gives_seeds`.
        """
        if self.augment is not None and "seeds" in extras:
            seeds = tf.reshape(extras["seeds"], [-1, 2])
            augmented = as_tuples(autograph(self.augment)(*parsed[:2], seeds))
            parsed = (*augmented, *parsed[2:])

        def stacked(value: tf.Tensor) -> tf.Tensor:
            inner = value.shape[1:]
            if static_shape.rank != 1:
                value = tf.reshape(value, tf.concat([shape, tf.shape(value)[1:]], 0))
            return tf.ensure_shape(value, static_shape.concatenate(inner))

        outputs = tf.nest.map_structure(stacked, tuple(parsed))
        passed = ["weights", "seeds"] if self.gives_seeds else ["weights"]
        return (*outputs, *(extras[name] for name in passed if name in extras))


def takes_seeds(parse: Parse) -> bool:
    """Returns True if `parse` has a parameter `seeds`."""
    return "seeds" in inspect.signature(parse).parameters


def as_tuples(nest: Nest) -> Nest:
    """`nest` with tuples for lists: tf.data makes a single tensor of a list."""
    if isinstance(nest, dict):
        return {name: as_tuples(part) for name, part in nest.items()}
    return tuple(map(as_tuples, nest)) if type(nest) in (list, tuple) else nest


def _specs(parse: Parse, *seeds: tf.TensorSpec) -> Nest:
    signature = [tf.TensorSpec([None], tf.string), *seeds]
    function = tf.function(autograph(parse), input_signature=signature, autograph=False)
    outputs = function.get_concrete_function().structured_outputs
    return tf.nest.map_structure(
        lambda t: (
            tf.TensorSpec(t.shape, t.dtype) if isinstance(t, tf.Tensor | tf.TensorSpec) else t
        ),
        outputs,
    )


def _example_bytes(specs: Nest) -> float:
    specs = [tf.TensorSpec(spec.shape[1:], spec.dtype) for spec in tf.nest.flatten(specs)]
    if any(spec.dtype == tf.string or not spec.shape.is_fully_defined() for spec in specs):
        return math.inf
    return float(sum(spec.shape.num_elements() * spec.dtype.size for spec in specs))
