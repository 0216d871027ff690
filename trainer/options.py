"""Options of a training step: fields of the config in groups, and their checks.

    config.clip.global_norm = 1.0           # or --config.clip.global_norm=1.0
    check_options(config)

| group | what | where in a step |
| --- | --- | --- |
| penalty | L1 and L2, counted once | in the loss |
| loss_scale | what float16 needs | around the gradients |
| clip | gradients cut down | on the sum over replicas |
| schedule | the learning rate by the step | before the variables change |
| weight_decay | decoupled decay | before the optimizer's own change |
| ema | an average of the weights, to evaluate and export | after it |

Patterns are Python regular expressions, looked for anywhere in the path of a variable, as
"conv2d/kernel", or of a layer, as "conv2d".
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")


class ConfigError(ValueError):
    """A user's mistake in a config; the message says what to type. Exit code 2."""


@dataclass
class ScheduleConfig:
    """The learning rate as a function of the steps done, `t`, from the first step of training.

    Each kind gives a factor of `config.learning_rate`; warm-up and linear scaling multiply it.

    | kind | factor | fields |
    | --- | --- | --- |
    | constant | 1 | |
    | exponential | decay_rate ** (t / decay_steps) | decay_steps, decay_rate, staircase |
    | step | decay_rate ** (how many boundaries are <= t) | boundaries, decay_rate |
    | cosine | from 1 to end_fraction in decay_steps, as half a cosine | decay_steps, end_fraction |
    | polynomial | the same, as (1 - t / decay_steps) ** power | decay_steps, end_fraction, power |

    Attributes:
        kind: One of these.
        warmup_steps: The rate rises linearly in so many steps, the last of which has it whole.
        warmup_start: The fraction of the rate at which it begins to rise.
        decay_steps: The length of the decay; 0 is train_steps, but exponential must be given one.
        decay_rate: By what the rate is multiplied.
        staircase: exponential: in whole steps of decay_steps.
        boundaries: step: the numbers of steps done at which the rate changes, rising.
        end_fraction: The fraction of the rate that is left after decay_steps.
        power: Of the polynomial.
        base_batch_size: Not 0: learning_rate is meant for this batch_size, and multiplied by
            batch_size / base_batch_size (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
    """

    kind: str = "constant"
    warmup_steps: int = 0
    warmup_start: float = 0.0
    decay_steps: int = 0
    decay_rate: float = 0.1
    staircase: bool = False
    boundaries: tuple[int, ...] = ()
    end_fraction: float = 0.0
    power: float = 1.0
    base_batch_size: int = 0


# What of a schedule's fields only some kinds look at.
_FIELDS_OF_KIND = {
    "constant": (),
    "exponential": ("decay_steps", "decay_rate", "staircase"),
    "step": ("boundaries", "decay_rate"),
    "cosine": ("decay_steps", "end_fraction"),
    "polynomial": ("decay_steps", "end_fraction", "power"),
}


@dataclass
class ClipConfig:
    """Gradients of a step are cut down, after their sum over the replicas; 0 leaves them.

    One of the three. Asynchronous parameter servers cut each worker's gradient, which is a step's
    whole gradient there.

    Attributes:
        value: Each number to [-value, value].
        norm: Each variable's gradient to this Euclidean norm.
        global_norm: All together to this norm (Pascanu et al., "On the difficulty of training
            recurrent neural networks", 2013).
    """

    value: float = 0.0
    norm: float = 0.0
    global_norm: float = 0.0


@dataclass
class PenaltyConfig:
    """Adds l1 * sum(|w|) + l2 * sum(w ** 2) to the loss of a step, once, however many replicas.

    As Keras' regularizers do: the L2 of TensorFlow 1, tf.nn.l2_loss, is half of this one.

    Attributes:
        l1: 0 adds nothing.
        l2: 0 adds nothing.
        variables: Pattern of the trainable variables that are meant.
    """

    l1: float = 0.0
    l2: float = 0.0
    variables: str = "kernel|embeddings"


@dataclass
class WeightDecayConfig:
    """Before each change a variable loses learning rate * rate of itself.

    Decoupled from the gradient and so from an optimizer's scaling of it (Loshchilov and Hutter,
    "Decoupled Weight Decay Regularization", 2019). The rate follows the schedule.

    Attributes:
        rate: 0 is what the optimizer's name stands for: 0.004 for adamw and muon, as in Keras,
            and none for others.
        exclude: Pattern of variables that do not decay, as "bias|gamma|beta". Empty excludes none.
    """

    rate: float = 0.0
    exclude: str = ""


@dataclass
class EmaConfig:
    """An exponential moving average of the trained weights, kept beside them.

    average <- decay * average + (1 - decay) * weight, after each step. Evaluation and export use
    it in place of the weights, and checkpoints have both.

    Attributes:
        decay: Below 1; 0 keeps no average.
        warmup: Uses min(decay, (1 + t) / (10 + t)), where t is the steps done before, as
            TensorFlow 1's ExponentialMovingAverage did when given num_updates.
    """

    decay: float = 0.0
    warmup: bool = False


@dataclass
class LossScaleConfig:
    """How the loss is scaled where a model computes in float16; see trainer/loss_scale.py.

    Attributes:
        initial: The scale of the first step.
        growth_steps: It is doubled after so many steps without overflow.
    """

    initial: float = 2.0**15
    growth_steps: int = 2000


@dataclass
class EarlyStoppingConfig:
    """Training is complete when evaluations of `config.best_metric` no longer improve.

    Attributes:
        patience: After so many evaluations in a row without improvement; 0 never stops early.
        min_delta: An improvement is more than this: lower for `loss`, higher for others.
    """

    patience: int = 0
    min_delta: float = 0.0


@dataclass
class WarmStartConfig:
    """Where the initial weights come from; the step, the optimizer and averages begin anew.

    It is read whenever a process starts, so keep it until the run is done. A run that goes on from
    a checkpoint of its own has its weights from there.

    Attributes:
        path: A checkpoint's directory, the model_dir of a run, or a .keras file; empty: initialise.
        exclude: Pattern of variables that are initialised all the same, as those of a new head.
    """

    path: str = ""
    exclude: str = ""


@dataclass(frozen=True)
class Options:
    """What Learner does beside the gradient and the optimizer; by default nothing.

    Attributes:
        clip, penalty, weight_decay, ema, loss_scale: Groups of the config.
        micro_batches: How many parts of a replica's share are computed one after another.
        jit_compile: Whether XLA compiles what a replica computes.
    """

    clip: ClipConfig = field(default_factory=ClipConfig)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    weight_decay: WeightDecayConfig = field(default_factory=WeightDecayConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    micro_batches: int = 1
    jit_compile: bool = False


def check_options(config: Any) -> None:
    """Returns if the groups of `config`, a Config whose types are right, can be used.

    Raises:
        ConfigError: names the first field that cannot, its value and what to type.
    """
    _check_schedule(config.schedule)
    _check_numbers(config)
    chosen = [name for name, value in vars(config.clip).items() if value]
    if len(chosen) > 1:
        raise ConfigError(
            f"config.clip takes one of value, norm and global_norm. Received: {config.clip}. Type "
            f"--config.clip.{chosen[0]}=0, for example."
        )
    if config.precision not in PRECISIONS:
        raise ConfigError(
            f"config.precision must be one of {', '.join(PRECISIONS)}. Received: "
            f"{config.precision!r}. Type --config.precision={PRECISIONS[-1]}, for example."
        )
    if config.early_stopping.patience and not config.eval_every_steps:
        raise ConfigError(
            f"config.early_stopping.patience={config.early_stopping.patience} counts evaluations, "
            "but there is none before the end. Type --config.eval_every_steps=1000, for example."
        )
    for name, needed, example in (
        ("ema.warmup", "ema.decay", 0.999),
        ("early_stopping.min_delta", "early_stopping.patience", 3),
        ("warm_start.exclude", "warm_start.path", "runs/RUN"),
    ):
        if _field(config, name) and not _field(config, needed):
            raise ConfigError(
                f"config.{name}={_field(config, name)} means nothing without config.{needed}. Type "
                f"--config.{needed}={example}, for example, or leave it out."
            )
    patterns = ("penalty.variables", "weight_decay.exclude", "freeze", "warm_start.exclude")
    for name in patterns:
        _check_pattern(name, _field(config, name))


# What each number must be, in words and as a test. Whole numbers are checked with the others of
# the config.
_AT_LEAST_0 = ("0 or more", lambda x: 0 <= x < math.inf)
_FRACTION = ("from 0 to 1", lambda x: 0 <= x <= 1)
_BELOW_1 = ("at least 0 and below 1", lambda x: 0 <= x < 1)
_ABOVE_0 = ("above 0", lambda x: 0 < x < math.inf)
_NUMBERS: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "schedule.warmup_start": _FRACTION,
    "schedule.decay_rate": _ABOVE_0,
    "schedule.end_fraction": _FRACTION,
    "schedule.power": _ABOVE_0,
    "clip.value": _AT_LEAST_0,
    "clip.norm": _AT_LEAST_0,
    "clip.global_norm": _AT_LEAST_0,
    "penalty.l1": _AT_LEAST_0,
    "penalty.l2": _AT_LEAST_0,
    "weight_decay.rate": _AT_LEAST_0,
    "ema.decay": _BELOW_1,
    "label_smoothing": _BELOW_1,
    "early_stopping.min_delta": _AT_LEAST_0,
    "loss_scale.initial": ("1 or more", lambda x: 1 <= x < math.inf),
}


def _check_numbers(config: Any) -> None:
    for name, (words, holds) in _NUMBERS.items():
        value = _field(config, name)
        if not holds(value):  # Not for nan either.
            raise ConfigError(
                f"config.{name} must be {words}. Received: {value}. Type --config.{name}="
                f"{1.0 if holds(1.0) else 0.1}, for example, or leave it out."
            )


def _check_schedule(schedule: ScheduleConfig) -> None:
    if schedule.kind not in _FIELDS_OF_KIND:
        raise ConfigError(
            f"config.schedule.kind must be one of {', '.join(_FIELDS_OF_KIND)}. Received: "
            f"{schedule.kind!r}. Type --config.schedule.kind=cosine, for example."
        )
    used = _FIELDS_OF_KIND[schedule.kind]
    for name in sorted({name for names in _FIELDS_OF_KIND.values() for name in names}):
        value = getattr(schedule, name)
        if name not in used and value != getattr(ScheduleConfig(), name):
            kinds = [kind for kind, names in _FIELDS_OF_KIND.items() if name in names]
            raise ConfigError(
                f"config.schedule.{name}={value} means nothing to kind={schedule.kind}. Leave it "
                f"out, or type --config.schedule.kind={kinds[0]}."
            )
    if schedule.kind == "exponential" and schedule.decay_steps < 1:
        raise ConfigError(
            "config.schedule.kind=exponential needs to know in how many steps the rate is "
            "multiplied by decay_rate. Type --config.schedule.decay_steps=1000, for example."
        )
    if schedule.kind == "step":
        bounds = schedule.boundaries
        whole = all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in bounds)
        if not bounds or not whole or list(bounds) != sorted(set(bounds)):
            raise ConfigError(
                "config.schedule.boundaries must be whole numbers above 0 that rise, at least one. "
                f"Received: {bounds}. Type --config.schedule.boundaries='(32000, 48000)', for "
                "example."
            )


def _check_pattern(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"config.{name} must be a regular expression. Received: {pattern!r}, which is none: "
            f"{error}. Type --config.{name}='kernel|bias', for example."
        ) from error


def matching(name: str, pattern: str, paths: Sequence[str]) -> list[bool]:
    """Which of `paths` the pattern in field `name` is found in.

    Raises:
        ConfigError: none.
    """
    found = [re.search(pattern, path) is not None for path in paths]
    if not any(found):
        raise ConfigError(
            f"config.{name}={pattern!r} is found in none of: {', '.join(paths)}. Give a pattern "
            "that is found in one."
        )
    return found


def _field(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config
