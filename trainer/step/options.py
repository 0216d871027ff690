"""Options of a training step: groups of config fields, each with its checks.

    config.clip.global_norm = 1.0           # or --config.clip.global_norm=1.0

Patterns are Python regular expressions. A pattern matches if it is found anywhere in the path of a
variable, for example "conv2d/kernel", or of a layer, for example "conv2d".
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from data.system.errors import UsageError

# A check of a number: the requirement in words, and the test.
_Bound: TypeAlias = tuple[str, Callable[[float], bool]]
AT_LEAST_0: _Bound = ("0 or more", lambda x: 0 <= x < math.inf)
_FRACTION: _Bound = ("from 0 to 1", lambda x: 0 <= x <= 1)
BELOW_1: _Bound = ("at least 0 and below 1", lambda x: 0 <= x < 1)
ABOVE_0: _Bound = ("a finite number above 0", lambda x: 0 < x < math.inf)
_AT_LEAST_1: _Bound = ("1 or more", lambda x: 1 <= x < math.inf)

_Group = TypeVar("_Group")

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")


# Any: a field of several types.
def option(default: Any, **checks: Any) -> Any:
    """Declares a field of a config, with what trainer/config_checks.py checks.

    | check | the value is |
    | --- | --- |
    | `at_least` | a whole number of this or more |
    | `bound` | a number for which the test of the bound is true |
    | `one_of` | one of these |
    | `is_pattern` | a regular expression |
    | `needs` | set only with one of the fields of the first entry; the second is an example |
    | `with_tables` | the default if the model has a ShardedEmbedding; says what to use instead |
    """
    return field(default=default, metadata=checks)


def group(kind: Callable[[], _Group], **checks: Any) -> _Group:
    """Declares a field that is a group of fields, with the default values of `kind`."""
    return field(default_factory=kind, metadata=checks)


class ConfigError(UsageError):
    """A user's mistake in a config; the message says what to type. Exit code 2."""


def must_be(needed: str, name: str, value: object, example: object) -> ConfigError:
    """The error for a `value` of config field `name` that is not as `needed`."""
    return ConfigError(
        f"config.{name} must be {needed}. Received: {value!r}. Type --config.{name}={example}, "
        "for example."
    )


# The kinds of schedules, and the fields that only some of them use.
_FIELDS_OF_KIND = {
    "constant": (),
    "cosine": ("decay_steps", "end_fraction"),
    "exponential": ("decay_steps", "decay_rate", "staircase"),
    "polynomial": ("decay_steps", "end_fraction", "power"),
    "step": ("boundaries", "decay_rate"),
}


@dataclass
class ScheduleConfig:
    """The learning rate as a function of the number of steps done, `t`.

    Each kind gives a factor of `config.learning_rate`; warm-up and linear scaling multiply it.

    | kind | factor | fields |
    | --- | --- | --- |
    | constant | 1 | |
    | cosine | from 1 to end_fraction in decay_steps, as half a cosine | decay_steps, end_fraction |
    | exponential | decay_rate ** (t / decay_steps) | decay_steps, decay_rate, staircase |
    | polynomial | as cosine, by (1 - t / decay_steps) ** power | decay_steps, end_fraction, power |
    | step | decay_rate ** (number of boundaries <= t) | boundaries, decay_rate |

    Attributes:
        kind: One of the kinds above.
        warmup_steps: The rate rises linearly in this number of steps; the last has the full rate.
        warmup_start: The fraction of the rate at which the warm-up starts.
        decay_steps: The length of the decay; 0 is train_steps, but exponential needs a value.
        decay_rate: The factor of the rate at each decay.
        staircase: exponential: t / decay_steps is rounded down.
        boundaries: step: the numbers of steps done at which the rate changes, in rising order.
        end_fraction: The fraction of the rate that is left after decay_steps.
        power: The exponent of the polynomial.
        base_batch_size: If not 0, learning_rate is for this batch_size, and is multiplied by
            batch_size / base_batch_size (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
    """

    kind: str = option("constant", one_of=(*_FIELDS_OF_KIND,))
    warmup_steps: int = option(0, at_least=0)
    warmup_start: float = option(
        0.0, bound=_FRACTION, needs=(("schedule.warmup_steps",), "schedule.warmup_steps=100")
    )
    decay_steps: int = option(0, at_least=0)
    decay_rate: float = option(0.1, bound=ABOVE_0)
    staircase: bool = False
    boundaries: tuple[int, ...] = ()
    end_fraction: float = option(0.0, bound=_FRACTION)
    power: float = option(1.0, bound=ABOVE_0)
    base_batch_size: int = option(0, at_least=0)

    def check(self) -> None:
        """Raises ConfigError if a field does not fit the kind."""
        used = _FIELDS_OF_KIND[self.kind]
        for kind, names in _FIELDS_OF_KIND.items():
            for name in names:
                value = getattr(self, name)
                if name not in used and value != getattr(ScheduleConfig(), name):
                    raise ConfigError(
                        f"config.schedule.{name}={value} means nothing to kind={self.kind}. Leave "
                        f"it out, or type --config.schedule.kind={kind}."
                    )
        if self.kind == "exponential" and self.decay_steps < 1:
            raise ConfigError(
                "config.schedule.kind=exponential needs to know in how many steps the rate is "
                "multiplied by decay_rate. Type --config.schedule.decay_steps=1000, for example."
            )
        if self.kind == "step":
            bounds = self.boundaries
            are_positive_ints = all(type(b) is int and b > 0 for b in bounds)  # Not bool.
            if not bounds or not are_positive_ints or list(bounds) != sorted(set(bounds)):
                needed = "whole numbers above 0 that rise, at least one"
                raise must_be(needed, "schedule.boundaries", bounds, "'(32000, 48000)'")


@dataclass
class ClipConfig:
    """Clips the gradients of a step after their sum over the replicas; 0 does not clip.

    At most one of the three may be set. Under asynchronous ps a step has one worker's gradient.

    Attributes:
        value: Each element is clipped to [-value, value].
        norm: Each variable's gradient is scaled down to this Euclidean norm.
        global_norm: All gradients together are scaled down to this norm (Pascanu et al.,
            "On the difficulty of training recurrent neural networks", 2013).
    """

    value: float = option(0.0, bound=AT_LEAST_0)
    norm: float = option(0.0, bound=AT_LEAST_0)
    global_norm: float = option(0.0, bound=AT_LEAST_0)

    def check(self) -> None:
        """Raises ConfigError if more than one field is set."""
        chosen = [name for name, value in vars(self).items() if value]
        if len(chosen) > 1:
            raise ConfigError(
                f"config.clip takes one of value, norm and global_norm. Received: {self}. Type "
                f"--config.clip.{chosen[0]}=0, for example."
            )


@dataclass
class PenaltyConfig:
    """Adds l1 * sum(|w|) + l2 * sum(w ** 2) to the loss of a step, once for all replicas.

    These are the formulas of Keras' regularizers; TensorFlow 1's tf.nn.l2_loss is half of this L2.

    Attributes:
        l1: The factor of the absolute values.
        l2: The factor of the squares.
        variables: Pattern of the trainable variables that are penalised.
    """

    l1: float = option(0.0, bound=AT_LEAST_0)
    l2: float = option(0.0, bound=AT_LEAST_0)
    variables: str = option(
        "kernel|embeddings",
        is_pattern=True,
        needs=(("penalty.l1", "penalty.l2"), "penalty.l2=0.0001"),
    )


@dataclass
class WeightDecayConfig:
    """w <- w - learning_rate * rate * w, before the optimizer's update of w.

    It is decoupled from the gradient, and so from the optimizer's scaling of it (Loshchilov and
    Hutter, "Decoupled Weight Decay Regularization", 2019). The learning rate follows the schedule.

    Attributes:
        rate: 0 is the default of the optimizer: 0.004 for adamw and muon, as in Keras, and no
            decay for others.
        exclude: Pattern of variables without decay, for example "bias|gamma|beta". Empty: none.
    """

    rate: float = option(0.0, bound=AT_LEAST_0)
    exclude: str = option("", is_pattern=True)


@dataclass
class EmaConfig:
    """An exponential moving average of the trained weights; see trainer/learner/update.py.

    Evaluation and export use the averages instead of the weights; checkpoints have both.

    Attributes:
        decay: Below 1; 0 keeps no average.
        warmup: Uses min(decay, (1 + t) / (10 + t)) as the decay after t steps.
        from_first_step: The average starts with the weights after the first step, as with Keras'
            use_ema; otherwise with the initial weights.
    """

    decay: float = option(0.0, bound=BELOW_1)
    warmup: bool = option(False, needs=(("ema.decay",), "ema.decay=0.999"))
    from_first_step: bool = option(False, needs=(("ema.decay",), "ema.decay=0.999"))


@dataclass
class LossScaleConfig:
    """Loss scaling of a model that computes in float16; see trainer/step/loss_scale.py.

    Attributes:
        initial: The scale of the first step.
        growth_steps: The scale is doubled after this number of steps without overflow.
    """

    initial: float = option(2.0**15, bound=_AT_LEAST_1)
    growth_steps: int = option(2000, at_least=1)


# What the other fields of LocalStepsConfig need.
_LOCAL_STEPS = (("local_steps.every", "local_steps.every_secs"), "local_steps.every=100")


@dataclass
class LocalStepsConfig:
    """Replicas train alone for some steps, then average; for slow networks.

    See strategies/local_steps.py for the formula (Douillard et al., "DiLoCo: Distributed
    Low-Communication Training of Language Models", 2023). The defaults are the plain mean. DiLoCo
    has 0.7 and 0.9 for 500 steps; docs/measured.md says what they do with few.

    Attributes:
        every: The number of steps from one average to the next; 0 sums the gradients of each step.
        every_secs: In its place, about the time from one average to the next, for workers of
            unequal speed: each makes as many of the steps as it can, and the mean is weighted by
            their numbers.
        outer_learning_rate: The factor of the mean change of the weights.
        outer_momentum: That of Nesterov's momentum of the mean change; 0 has none.
        overlap: Sums the changes while the next steps compute; each average comes so late.
    """

    every: int = option(0, at_least=0)
    every_secs: float = option(0.0, bound=AT_LEAST_0)
    outer_learning_rate: float = option(1.0, bound=ABOVE_0, needs=_LOCAL_STEPS)
    outer_momentum: float = option(0.0, bound=BELOW_1, needs=_LOCAL_STEPS)
    overlap: bool = option(False, needs=_LOCAL_STEPS)

    @property
    def chosen(self) -> str:
        """The field that switches local steps on, with its value; empty if they are off."""
        names = [name for name in ("every", "every_secs") if getattr(self, name)]
        return " ".join(f"config.local_steps.{name}={getattr(self, name):g}" for name in names)

    def check(self) -> None:
        """Raises ConfigError if both fields are set that say when to average."""
        if self.every and self.every_secs:
            raise ConfigError(
                f"config.local_steps takes one of every and every_secs. Received: {self.chosen}. "
                "Type --config.local_steps.every=0, for example."
            )


@dataclass
class EarlyStoppingConfig:
    """Training is complete when evaluations of `config.best_metric` no longer improve.

    Attributes:
        patience: The number of evaluations in a row without improvement; 0 never stops early.
        min_delta: An improvement is larger than this, in the direction that
            `Objective.is_lower_better` says.
    """

    patience: int = option(0, at_least=0, needs=(("eval_every_steps",), "eval_every_steps=1000"))
    min_delta: float = option(
        0.0, bound=AT_LEAST_0, needs=(("early_stopping.patience",), "early_stopping.patience=3")
    )


@dataclass
class WarmStartConfig:
    """The source of the initial weights. The step, the optimizer and the averages are initialised.

    It is read whenever a process starts, so keep it until the run is done. A run that resumes from
    its own checkpoint takes the weights from there.

    Attributes:
        path: The directory of a checkpoint, the model_dir of a run, or a .keras file. Empty: none.
        exclude: Pattern of variables that are initialised instead, for example those of a new head.
            The source may lack these variables.
    """

    path: str = ""
    exclude: str = option(
        "", is_pattern=True, needs=(("warm_start.path",), "warm_start.path=runs/RUN")
    )


@dataclass
class StepOptions:
    """The options of the computation of a step. Each is a field of Config, and is off by default.

    A new option is declared here, and applied in one part of trainer/learner. It needs a row in
    tests/cluster/parity.py, which compares all strategies. If `Learner.gradients` alone applies it,
    trainer/build.py lists it: a config file may replace that method.

    Attributes:
        micro_batches: Each replica computes its share of a batch in this many parts, one after
            another, and sums their gradients: the same step in less memory. Layers that mix
            examples, such as BatchNormalization, see one part at a time.
        virtual_replicas: The number of parts, a power of two, in which each batch is computed, on
            any number of replicas that is a power of two and not higher: the same weights to the
            last bit on each (docs/options.md). 0 does not cut batches.
        class_weight: The weight in training of each class, by its index; 1 for others. A weight
            multiplies the loss of an example.
        clip, penalty, weight_decay, ema, loss_scale, local_steps: See trainer/step/options.py.
    """

    micro_batches: int = option(1, at_least=1)
    virtual_replicas: int = option(0, at_least=0)
    class_weight: dict[int, float] = field(default_factory=dict)
    clip: ClipConfig = group(ClipConfig, with_tables="clip_norm=..., an argument of the layer")
    penalty: PenaltyConfig = group(PenaltyConfig)
    weight_decay: WeightDecayConfig = group(WeightDecayConfig)
    ema: EmaConfig = group(EmaConfig, with_tables="no moving average")
    loss_scale: LossScaleConfig = group(LossScaleConfig)
    local_steps: LocalStepsConfig = group(
        LocalStepsConfig, with_tables="sums in each step: leave it out"
    )


@dataclass
class Options(StepOptions):
    """The options of a Learner.

    Attributes:
        jit_compile: XLA compiles a replica's gradient.
        marks_changed_rows: Of tables, for checkpoints that have only these rows.
        last_step: The end of training; 0 if it is not known.
        log_every_steps: The steps of a report; 0 if there are no reports.
    """

    jit_compile: bool = option(False, with_tables="--config.jit_compile=False")
    marks_changed_rows: bool = False
    last_step: int = 0
    log_every_steps: int = 0


def matching(name: str, pattern: str, paths: Sequence[str]) -> list[bool]:
    """Returns True for each of `paths` that contains `pattern`, of config field `name`.

    Raises ConfigError if none does.
    """
    found = [re.search(pattern, path) is not None for path in paths]
    if not any(found):
        raise ConfigError(
            f"config.{name}={pattern!r} is found in none of: {', '.join(paths)}. Give a pattern "
            "that is found in one."
        )
    return found
