"""The change of the variables by summed gradients, and the count of the step.

    count = learner.apply(summed)       # in replica context
    learner.state                       # averages, loss scale: for a checkpoint

The order is fixed: finite check (float16); clipping; learning rate; then for each variable weight
decay, the optimizer's update, the constraint, the moving average.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from data.system.compat.autograph import autograph, no_autograph
from data.system.compat.keras_optimizers import given_rate
from strategies.base import Tensor, read_now
from trainer.learner.differentiation import Differentiation
from trainer.step.fused_updates import Update as FusedUpdate
from trainer.step.fused_updates import fused_update, supports
from trainer.step.loss_scale import LossScale, all_finite
from trainer.step.optimizers import supported_optimizers
from trainer.step.options import ClipConfig, matching
from trainer.step.schedules import RateFactor


class _Now(NamedTuple):
    """What the changes of all variables in one step share."""

    step: tf.Tensor  # The number of steps done.
    is_first: tf.Tensor  # True if none of them has changed the variables.
    rate: tf.Tensor
    factor: tf.Tensor | None  # That of the schedule, which `rate` contains.
    fused: FusedUpdate | None  # None if `change_variable` is to be called.
    is_finite: tf.Tensor | None


class Update(Differentiation):
    """The part of a Learner that changes the variables."""

    optimizer: keras.Optimizer
    step: tf.Variable
    # Exponential moving averages (EMA) of the variables, in their order; empty without options.ema.
    _ema_averages: list[tf.Variable]

    def _start_update(self, rate_factor: RateFactor | None) -> None:
        """Creates the averages and the loss scale; called after the optimizer was built.

        Raises ConfigError if `options.weight_decay.exclude` matches no variable.
        """
        options, self._schedule_factor = self._step_options, rate_factor
        self._is_decayed = [options.weight_decay.rate > 0] * len(self.dense_variables)
        if exclude := options.weight_decay.exclude:
            paths = [variable.path for variable in self.dense_variables]
            found = matching("weight_decay.exclude", exclude, paths)
            self._is_decayed = [not is_excluded for is_excluded in found]
        self._ema_averages = []
        if options.ema.decay:
            self._ema_averages = [_average_of(variable) for variable in self.variables]
        self.loss_scale = LossScale(options.loss_scale) if self._is_float16 else None

    @property
    def state(self) -> Mapping[str, Sequence[tf.Variable]]:
        """Variables, in named lists, that belong to neither the model nor the optimizer.

        Those of "table_slots" are SplitVariables.
        """
        slots = [s for layer in self.tables if not layer.is_dynamic for s in layer.table.slots]
        return {
            **({"averages": self._ema_averages} if self._ema_averages else {}),
            **({"loss_scale": self.loss_scale.variables} if self.loss_scale else {}),
            **({"table_slots": slots} if slots else {}),
        }

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._rate_after(tf.convert_to_tensor(self.step)).numpy())

    @property
    def optimizer_rate(self) -> float | None:
        """The optimizer's learning rate, without a factor; None if it follows a schedule."""
        rate = given_rate(self.optimizer)
        return float(rate.numpy()) if isinstance(rate, keras.Variable) else None

    def _rate_after(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate after `step` steps."""
        rate = given_rate(self.optimizer)
        if isinstance(rate, keras.Variable):
            rate = read_now(rate.value)
        elif isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = tf.cast(rate(step), keras.config.floatx())  # It may be a float of Python.
        else:  # A function without arguments.
            rate = tf.cast(self.optimizer.learning_rate, keras.config.floatx())
        return rate if self._schedule_factor is None else rate * self._schedule_factor(step)

    @no_autograph
    def apply(self, gradients: Sequence[Tensor]) -> tf.Tensor:
        """Changes the variables by `gradients`, summed over replicas, and counts the step.

        A variable whose gradient is None stays as it is. Returns the new count; under asynchronous
        ps other workers may have counted too. Called in replica context. Random numbers must not
        come from tf.random here: its stateless ops give others in a program of XLA.

        Keras' `optimizer.apply` is not used: it would sum over replicas again, clip before that
        sum, and lose counts under ps. `update_step` is Keras' public extension point for the
        formula alone; fused_updates.py has some of them as one op.
        """
        # On the device of the counter, so that a ps task needs no tensor of the worker.
        with tf.device(self.step.device):
            step = read_now(self.step)
            rate = self._rate_after(step)
            factor = None if self._schedule_factor is None else self._schedule_factor(step)
            is_overridden = type(self).change_variable is not Update.change_variable
            fused = None if is_overridden else fused_update(self.optimizer, step)
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        changing = [self.variables[index] for index in present]
        summed: Sequence[Tensor] = [gradients[index] for index in present]
        is_finite = all_finite(summed) if self.loss_scale else None
        skipped = read_now(self.loss_scale.skipped) if self.loss_scale else 0
        now = _Now(step, tf.equal(step, skipped), rate, factor, fused, is_finite)
        compiles = self.compiles and bool(summed) and self._can_compile
        if not compiles:
            summed = _clipped(summed, changing, self._step_options.clip)

        def change_all(strategy: tf.distribute.Strategy, *changes: Tensor) -> list[tf.Tensor]:
            if compiles:  # Then there are no tables.
                change = functools.partial(self._change_compiled, now, present)
                arguments = changing, list(changes)
                changed = [strategy.extended.update(changing[0], change, arguments, group=False)]
            else:
                changed = [
                    self._change_copies(now, strategy, index, change)
                    for index, change in zip(present, changes, strict=True)
                ]
            if self.loss_scale:
                changed += self.loss_scale.adjust(strategy, is_finite)
            return changed

        context = tf.distribute.get_replica_context()
        changed = context.merge_call(change_all, args=tuple(summed))
        # Counted last: a task that reads the new count also reads the new variables.
        with tf.control_dependencies(tf.nest.flatten(changed)), tf.device(self.step.device):
            # keras.Variable.assign_add reads, then writes: two workers would lose counts.
            return self.step.assign_add(1)

    @property
    def _can_compile(self) -> bool:
        """False if the changes may have ops that XLA lacks, or if there are other processes.

        A missing op would be found when the forward pass has changed its variables already. XLA may
        compile other programs for other processors, but the variables of all workers must stay
        equal to the last bit.
        """
        is_one_process = isinstance(tf.distribute.get_strategy(), tf.distribute.MirroredStrategy)
        is_known = type(self.optimizer) in supported_optimizers().values()
        has_constraint = any(v.constraint is not None for v in self.dense_variables)
        return is_one_process and is_known and not has_constraint

    def _change_copies(
        self, now: _Now, strategy: tf.distribute.Strategy, index: int, gradient: Tensor
    ) -> Sequence[tf.Tensor]:
        """Changes all copies of a variable; returns tensors that are computed after that."""
        place = index - self.num_dense
        if place >= 0:  # A table, which all replicas of this process share.
            part = self.table_parts[place]
            first, *_ = strategy.experimental_local_results(gradient)
            return [part.change(first, now.rate, now.step, factor=now.factor)]
        variable = self.variables[index]
        change = functools.partial(self._change_if_finite, now)
        changed: Sequence[tf.Tensor]
        changed = strategy.extended.update(variable, change, (gradient, index), group=False)
        return changed

    def _change_compiled(
        self,
        now: _Now,
        present: Sequence[int],
        _: tf.Variable,
        copies: Sequence[tf.Variable],
        changes: Sequence[Tensor],
    ) -> list[tf.Tensor]:
        """Changes the copies of all variables on one device, in one program of XLA."""

        def change_each(changes: Sequence[Tensor]) -> list[tf.Tensor]:
            clipped = _clipped(changes, copies, self._step_options.clip)
            return list(
                map(functools.partial(self._change_if_finite, now), copies, clipped, present)
            )

        return list(tf.function(change_each, jit_compile=True, autograph=False)(changes))

    def _change_if_finite(
        self, now: _Now, variable: tf.Variable, gradient: Tensor, index: int
    ) -> tf.Tensor:
        """Changes one copy of a dense variable, if all gradients are finite; returns its value."""
        change = functools.partial(self._change_finite, now, variable, gradient, index)
        if now.is_finite is not None:
            return tf.cond(now.is_finite, change, lambda: read_now(variable))
        # Nothing changes before the gradient is there: a step whose sums fail, or whose worker
        # dies, must leave no weight decay either.
        with tf.control_dependencies(tf.nest.flatten(gradient, expand_composites=True)):
            return change()

    def _change_finite(
        self, now: _Now, variable: tf.Variable, gradient: Tensor, index: int
    ) -> tf.Tensor:
        if self._is_decayed[index]:
            decay = tf.cast(now.rate * self._step_options.weight_decay.rate, variable.dtype)
            variable.assign_sub(decay * read_now(variable))
        gradient = _to_dense(gradient, variable)
        if now.fused is not None and supports(variable, gradient):
            now.fused(variable, gradient, now.rate)
        else:
            autograph(self.change_variable)(index, variable, gradient, now.rate)
        if (constraint := self.dense_variables[index].constraint) is not None:
            variable.assign(constraint(read_now(variable)))
        if self._ema_averages:
            self._update_average(index, variable, now)
        return read_now(variable)

    def change_variable(
        self, index: int, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor
    ) -> None:
        """Applies the optimizer to one copy of `self.variables[index]`. `gradient` is dense.

        If no class overrides it, SGD and Adam use one fused op in its place (fused_updates.py).
        """
        self.optimizer.update_step(gradient, variable, rate)

    def _update_average(self, index: int, variable: tf.Variable, now: _Now) -> None:
        """Sets average <- decay * average + (1 - decay) * variable, after a change of the variable.

        It is one addition, so concurrent updates by asynchronous workers are all counted. With
        warm-up the decay is that of TensorFlow 1's ExponentialMovingAverage(decay, num_updates=t).
        """
        ema = self._step_options.ema
        decay = tf.constant(ema.decay, tf.float32)
        if ema.warmup:
            done = tf.cast(now.step, tf.float32)
            decay = tf.minimum(decay, (1 + done) / (10 + done))
        if ema.from_first_step:
            decay = tf.where(now.is_first, 0.0, decay)
        average = self._ema_averages[index]
        difference = tf.convert_to_tensor(average) - read_now(variable)
        average.assign_sub(tf.cast(1 - decay, variable.dtype) * difference)


def _average_of(variable: tf.Variable) -> tf.Variable:
    """A variable for the average of `variable`: on its device, with its value."""
    with tf.distribute.get_strategy().extended.colocate_vars_with(variable):
        return tf.Variable(variable.read_value(), trainable=False, name="average")


def _to_dense(gradient: Tensor, variable: tf.Variable) -> tf.Tensor:
    """Returns `gradient` with the shape of `variable`: rows with the same index are summed."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = gradient.values
    with tf.device(rows.device):
        return tf.math.unsorted_segment_sum(rows, gradient.indices, variable.shape[0])


def _clipped(
    gradients: Sequence[Tensor], variables: Sequence[tf.Variable], clip: ClipConfig
) -> Sequence[Tensor]:
    """Clips the `gradients` of `variables`, none of which is None, as ClipConfig says."""
    if not (clip.value or clip.norm or clip.global_norm):
        return gradients
    # Dense first: rows with the same index are one row, which has their sum.
    dense = [_to_dense(g, v) for g, v in zip(gradients, variables, strict=True)]
    if clip.global_norm:
        # Types that differ cannot be added, and the norm would be rounded to 16 bits.
        is_double = any(gradient.dtype == tf.float64 for gradient in dense)
        exact = [_cast(gradient, tf.float64 if is_double else tf.float32) for gradient in dense]
        clipped, _ = tf.clip_by_global_norm(exact, clip.global_norm)
        return [_cast(new, old.dtype) for new, old in zip(clipped, dense, strict=True)]
    clipped = []
    for gradient in dense:
        with tf.device(gradient.device):  # It may be on another task.
            if clip.value:
                gradient = tf.clip_by_value(gradient, -clip.value, clip.value)
            else:
                gradient = tf.clip_by_norm(gradient, clip.norm)
        clipped.append(gradient)
    return clipped


def _cast(gradient: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    with tf.device(gradient.device):  # It may be on another task.
        return tf.cast(gradient, dtype)
