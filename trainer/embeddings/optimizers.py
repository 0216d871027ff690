"""Optimizers of tables: an update changes only the rows that the batch used.

    optimizer = Adagrad(learning_rate=0.05)
    slots = {name: variable, ...}                   # as `initial_slots` says
    op = optimizer.update(TableUpdate(table, slots, ids, gradients, rate, step))

The formulas are those of Keras, except of RowWiseAdagrad, which Keras does not have, and of
LazyAdam: Adam would change all rows in each step. `ids` are unique.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import tensorflow as tf
from typing_extensions import override

from trainer.step.options import ABOVE_0, AT_LEAST_0, BELOW_1, ConfigError, option

# The name of a slot: its first value, and True if it has one value for each row.
Slots: TypeAlias = Mapping[str, tuple[float, bool]]


class TableUpdate(NamedTuple):
    """The argument of `TableOptimizer.update`."""

    table: tf.Variable
    slots: Mapping[str, tf.Variable]
    ids: tf.Tensor  # Of the rows to change, [n].
    gradients: tf.Tensor  # Of these rows, [n, width].
    rate: tf.Tensor
    step: tf.Tensor  # The number of steps done.


@dataclass(frozen=True)
class TableOptimizer:
    """The base class of the optimizers of tables.

    Attributes:
        learning_rate: The rate of this table; None is the rate of the config. `config.schedule`
            multiplies both.
    """

    learning_rate: float | None = None
    # The names of the slots: True if a slot has one value for each row.
    _slots: ClassVar[Mapping[str, bool]] = {}

    def __post_init__(self) -> None:
        """Raises ConfigError if a setting is not a number, or out of range."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            needed, is_valid = field.metadata.get("bound", ABOVE_0)
            is_default = value is None and field.default is None
            if not is_default and not (isinstance(value, int | float) and is_valid(value)):
                raise ConfigError(
                    f"{type(self).__name__}: {field.name} must be a number: {needed}. "
                    f"Received: {value!r}."
                )

    @property
    def initial_slots(self) -> Slots:
        """The slots with their first values: `initial_NAME` if there is such a setting, or 0."""
        names = self._slots.items()
        return {name: (getattr(self, f"initial_{name}", 0.0), of_row) for name, of_row in names}

    def update(self, given: TableUpdate) -> tf.Operation | None:
        """Changes the table. Returns the op that is done last; None if eager."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(TableOptimizer):
    """row <- row - rate * gradient."""

    @override
    def update(self, given: TableUpdate) -> tf.Operation | None:
        return _subtract(given.table, given.ids, given.gradients, given.rate)


@dataclass(frozen=True)
class Adagrad(TableOptimizer):
    """a <- a + gradient ** 2;  row <- row - rate * gradient / (sqrt(a) + epsilon).

    Duchi et al., "Adaptive Subgradient Methods for Online Learning", 2011.
    """

    initial_accumulator: float = option(0.1, bound=AT_LEAST_0)
    epsilon: float = 1e-7
    _slots: ClassVar = {"accumulator": False}

    @override
    def update(self, given: TableUpdate) -> tf.Operation | None:
        return tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=given.table.handle,
            accum=given.slots["accumulator"].handle,
            lr=given.rate,
            epsilon=tf.constant(self.epsilon, given.gradients.dtype),
            grad=given.gradients,
            indices=given.ids,
            use_locking=True,
        )


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator a row: a <- a + mean(gradient ** 2).

    Its slot has 1/width of the memory of Adagrad's (Naumov et al., "Deep Learning Recommendation
    Model for Personalization and Recommendation Systems", 2019).
    """

    _slots: ClassVar = {"accumulator": True}

    @override
    def update(self, given: TableUpdate) -> tf.Operation | None:
        table, slots, ids, gradients, rate, _ = given
        accumulator = slots["accumulator"]
        squares = tf.reduce_mean(tf.square(gradients), axis=1)
        added = tf.raw_ops.ResourceScatterAdd(
            resource=accumulator.handle, indices=ids, updates=squares
        )
        with tf.control_dependencies([added]):
            total = gather_rows(accumulator, ids)
        scale = 1 / (tf.sqrt(total) + self.epsilon)
        return _subtract(table, ids, gradients * scale[:, tf.newaxis], rate)


@dataclass(frozen=True)
class FTRL(TableOptimizer):
    """FTRL-Proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013).

    Attributes:
        learning_rate_power: The accumulator's exponent is the negative of this.
        l1: L1 regularisation: rows whose gradients are small become exactly 0.
        l2: L2 regularisation, as part of the formula.
    """

    initial_accumulator: float = option(0.1, bound=AT_LEAST_0)
    learning_rate_power: float = 0.5
    l1: float = option(0.0, bound=AT_LEAST_0)
    l2: float = option(0.0, bound=AT_LEAST_0)
    _slots: ClassVar = {"accumulator": False, "linear": False}

    @override
    def update(self, given: TableUpdate) -> tf.Operation | None:
        dtype = given.gradients.dtype
        return tf.raw_ops.ResourceSparseApplyFtrl(
            var=given.table.handle,
            accum=given.slots["accumulator"].handle,
            linear=given.slots["linear"].handle,
            grad=given.gradients,
            indices=given.ids,
            lr=given.rate,
            l1=tf.constant(self.l1, dtype),
            l2=tf.constant(self.l2, dtype),
            lr_power=tf.constant(-self.learning_rate_power, dtype),
            use_locking=True,
        )


@dataclass(frozen=True)
class LazyAdam(TableOptimizer):
    """Adam's formula on the rows of the batch; the moments of other rows do not decay.

    So it is not Adam. The bias correction uses the step of the run. Several ops make an update:
    under asynchronous ps two updates of one row at the same time may lose one of them.
    """

    beta_1: float = option(0.9, bound=BELOW_1)
    beta_2: float = option(0.999, bound=BELOW_1)
    epsilon: float = 1e-7
    _slots: ClassVar = {"momentum": False, "velocity": False}

    @override
    def update(self, given: TableUpdate) -> tf.Operation | None:
        table, slots, ids, gradients, rate, step = given
        number = tf.cast(step + 1, gradients.dtype)
        corrected = rate * tf.sqrt(1 - self.beta_2**number) / (1 - self.beta_1**number)
        m = gather_rows(slots["momentum"], ids)
        v = gather_rows(slots["velocity"], ids)
        m += (1 - self.beta_1) * (gradients - m)
        v += (1 - self.beta_2) * (tf.square(gradients) - v)
        written = [scatter_rows(slots["momentum"], ids, m), scatter_rows(slots["velocity"], ids, v)]
        with tf.control_dependencies(written):
            return _subtract(table, ids, m / (tf.sqrt(v) + self.epsilon), corrected)


OPTIMIZERS: Mapping[str, type[TableOptimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "ftrl": FTRL,
    "lazy_adam": LazyAdam,
}


def table_optimizer(given: object) -> TableOptimizer:
    """The optimizer that a layer was `given`: an object, a name, or the result of `to_config`.

    Raises ConfigError if there is no such optimizer.
    """
    if isinstance(given, TableOptimizer):
        return given
    if isinstance(given, str) and given in OPTIMIZERS:
        return OPTIMIZERS[given]()
    if isinstance(given, Mapping):
        settings = dict(given)
        return OPTIMIZERS[settings.pop("name")](**settings)
    raise ConfigError(
        f"ShardedEmbedding: optimizer={given!r} is none of {', '.join(OPTIMIZERS)}, and no object "
        'of trainer.embeddings, such as Adagrad(learning_rate=0.05). Type optimizer="adagrad", for '
        "example. Optimizers of Keras would change the whole table in each step."
    )


def to_config(optimizer: TableOptimizer) -> dict[str, object]:
    """`optimizer` as JSON values."""
    (name,) = (name for name, kind in OPTIMIZERS.items() if kind is type(optimizer))
    return {"name": name, **dataclasses.asdict(optimizer)}


def gather_rows(variable: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    """The rows `ids` of `variable`, on its device; no other row is copied.

    A tf.gather of a value that was read before would copy the table: TensorFlow copies each read
    of a variable that sparse updates change.
    """
    return tf.raw_ops.ResourceGather(resource=variable.handle, indices=ids, dtype=variable.dtype)


def scatter_rows(variable: tf.Variable, ids: tf.Tensor, rows: tf.Tensor) -> tf.Operation | None:
    """Sets the rows `ids` of `variable`, which are different; no other row is copied."""
    return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=ids, updates=rows)


def capacity(variable: tf.Variable) -> tf.Tensor:
    """The number of rows for which `variable` has memory now, int64."""
    return tf.raw_ops.VariableShape(input=variable.handle, out_type=tf.int64)[0]


def _subtract(
    table: tf.Variable, ids: tf.Tensor, rows: tf.Tensor, rate: tf.Tensor
) -> tf.Operation | None:
    """Subtracts rate * rows. The op holds the lock of the table: no update is lost."""
    zero = tf.constant(0, rows.dtype)
    return tf.raw_ops.ResourceSparseApplyProximalGradientDescent(
        var=table.handle, alpha=rate, l1=zero, l2=zero, grad=rows, indices=ids, use_locking=True
    )
