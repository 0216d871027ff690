"""What a worker computes in one step, with variables that live on other processes.

    (step,), values = read_together(learner.gradient_inputs, [step], learner.step.device)
    gradients, metrics = compute_gradients(values, step, learner, strategy, batch, "float32")
    sent = compression.compress_all(gradients)
    arrived = send_to_servers(learner.variables, gradients, sent)

    _, values = read_together(learner.evaluation_inputs, [], learner.step.device)
    metrics = compute_metrics(values, learner, strategy, batch)

Both kinds of parameter servers use these functions inside the graphs of their closures.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from data.system.compat.autograph import autograph, no_autograph
from data.system.errors import UsageError
from strategies.base import Batch, Learner, Tensor, num_bytes
from strategies.gradients.coalescing import buckets
from strategies.gradients.parts import Share, gradients_of_parts, totals_of_parts
from strategies.tables import tables_with

# Gradients, in the order of the learner's variables, and metric totals.
_Computed = tuple[Sequence[Tensor], Tensor]


@no_autograph
def compute_gradients(
    values: Sequence[Tensor],
    after: Tensor,
    learner: Learner,
    strategy: tf.distribute.Strategy,
    batch: Batch,
    read_dtype: str,
    share: Share | None = None,
) -> _Computed:
    """A worker's gradients and metric totals, at `values` of `learner.gradient_inputs`.

    Rows of tables are sent to the worker as the type named `read_dtype`. If `values` is empty, the
    learner reads its variables itself, after the op `after`. With a `share`, each of its parts of
    `batch` is computed alone, the changes of the layers' state follow the dense gradients, and the
    totals end with digests of the parts.
    """

    def in_parts(
        gradients: Callable[[Batch], _Computed], batch: Batch, values: Sequence[Tensor] = ()
    ) -> _Computed:
        if share is None:
            return gradients(batch)
        places = {id(variable): i for i, variable in enumerate(learner.gradient_inputs)}
        state = [places[id(variable)] for variable in learner.layer_state]

        def compute(part: Batch) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
            with learner.keeping_state() as new:
                computed, totals = gradients(part)
            if new.keys() - set(state):
                raise UsageError(
                    "config.virtual_replicas under --strategy=ps: a layer changes a variable that "
                    "is no moving statistic, and workers would change it one after the other. "
                    "Type --strategy=multiworker, or leave the option out."
                )
            changes = [new[i] - values[i] if i in new else tf.zeros_like(values[i]) for i in state]
            return computed, changes, totals

        num_dense = learner.num_dense
        computed, changes, totals = gradients_of_parts(compute, batch, share, num_dense)
        return [*computed[:num_dense], *changes, *computed[num_dense:]], totals

    def compute(batch: Batch, values: Sequence[Tensor], after: Tensor) -> _Computed:
        # The scopes are entered here: the strategy calls this function on another thread, where
        # scopes of the caller have no effect.
        with tables_with(read_dtype=read_dtype):
            if not values:
                with tf.control_dependencies([after]):
                    return in_parts(autograph(learner.gradients), batch)
            if learner.num_dense < len(learner.variables):
                # Rows of tables are gathered after the step counter was read, too.
                with tf.control_dependencies([after]):
                    batch = tf.nest.map_structure(tf.identity, batch)
            with _gather_rows_on_servers():
                return in_parts(lambda part: learner.gradients_at(part, values), batch, values)

    computed: _Computed = strategy.run(compute, args=(batch, values, after))
    return computed


@no_autograph
def compute_metrics(
    values: Sequence[Tensor], learner: Learner, strategy: tf.distribute.Strategy, batch: Batch
) -> Tensor:
    """A worker's metric totals, at `values` of `learner.evaluation_inputs`.

    If `values` is empty, the learner reads its variables itself.
    """
    num_parts = learner.virtual_replicas

    def evaluate(batch: Batch, values: Sequence[Tensor]) -> Tensor:
        if not values:
            return autograph(learner.evaluate)(batch)
        with _gather_rows_on_servers():
            return learner.evaluate_at(batch, values)

    def evaluate_parts(batch: Batch, values: Sequence[Tensor]) -> Tensor:
        return totals_of_parts(lambda part: evaluate(part, values), batch, num_parts)

    return strategy.run(evaluate_parts if num_parts else evaluate, args=(batch, values))


@no_autograph
def send_to_servers(
    variables: Sequence[Tensor], gradients: Sequence[Tensor], sent: Sequence[Tensor]
) -> list[Tensor]:
    """Sends each gradient to the device of its variable; returns the gradients as they arrive.

    `sent` are the compressed gradients; what arrives has the types of `gradients`.
    """
    arrived = list(gradients)
    for index, (variable, rows) in enumerate(zip(variables, sent, strict=True)):
        if isinstance(rows, tf.IndexedSlices):
            arrived[index] = rows_sent(rows, variable.device, gradients[index].dtype)
    for bucket in buckets(variables, sent):
        for index, gradient in bucket.gradients.items():
            with tf.device(bucket.device):
                arrived[index] = tf.cast(gradient, gradients[index].dtype)
    return arrived


def rows_sent(gradient: tf.IndexedSlices, device: str, dtype: tf.DType) -> tf.IndexedSlices:
    """Sends the rows of a sparse gradient, compressed, to `device`, where they get `dtype`."""
    with tf.device(device):
        values, indices = tf.identity(gradient.values), tf.identity(gradient.indices)
        values = tf.cast(values, dtype)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


@contextlib.contextmanager
def _gather_rows_on_servers() -> Iterator[None]:
    """Places each gather of rows on the device of its table, so that the table does not travel.

    If the rows have as many bytes as the table, the gather stays on the worker.
    """

    def device_of(op: tf.Operation) -> str:
        if op.type != "GatherV2":
            return str(op.device)
        rows, table = op.outputs[0], op.inputs[0]
        is_known = rows.shape.is_fully_defined() and table.shape.is_fully_defined()
        if is_known and num_bytes(rows) >= num_bytes(table):
            return str(op.device)
        return str(_outside_of_branches(table).device or op.device)

    with tf.zeros([]).graph.device(device_of):
        yield


def _outside_of_branches(tensor: Tensor) -> Tensor:
    """Follows the captures of `tf.cond` branches to the tensor that was computed outside."""
    while tensor.op.type == "Placeholder":
        outers = [outer for outer, inner in tensor.graph.captures if inner is tensor]
        if not outers or not hasattr(outers[0], "op"):
            break
        tensor = outers[0]
    return tensor
