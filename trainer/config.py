"""Config: what to train, as one typed dataclass; and the Recipe, the user's file that goes with it.

    recipe = load_recipe("configs/mnist_replica.py")
    check(recipe.config)

A config file is a user's whole plug-in. It defines

| name | needed | what |
| --- | --- | --- |
| `get_config()` | yes | returns a Config, or a dataclass derived from it with fields of its own |
| `build_model(config)` | yes | returns a built keras.Model; labels and outputs go to `loss` |
| `build_optimizer(config)` | no | returns a keras.Optimizer; else `config.optimizer` by name |
| `parse(serialized)` | no | string [B] -> (inputs, labels); else made from dataset_info.json |
| `augment(inputs, labels, seeds)` | no | -> (inputs, labels) of training; seeds int32 [B, 2] |
| `loss(labels, outputs)` | no | -> [B]; else softmax cross entropy of integer labels and logits |
| `metrics` | no | {name: function(labels, outputs) -> [B]}; else accuracy |
| `build_learner(config, **parts)` | no | returns a Learner; `parts` are its arguments, built |
| `build_hooks(config, model_dir)` | no | returns a list of trainer.hooks.Hook, for the chief |

`parse` and `augment` treat examples one by one, whatever B is: several batches may go through them
at once, or a share of one. Random numbers come from an example's seed, as in
`tf.random.stateless_uniform`: it is made of `config.seed` and the example's place in the endless
order, so an example is augmented in another way each epoch, and in the same way on any topology.

`build_learner` is for a step of another kind: several losses, several optimizers. `parts` are what
trainer.learner.Learner takes, made of the config and the other functions; its class says what one
that is derived from it may override. See `configs/custom_step.py`.

It is executed when the command line is read, so it should import TensorFlow and Keras inside its
functions where it can, and must not make a tensor: multiworker has to be set up before the first
one.
"""

import dataclasses
import difflib
import importlib.util
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from data.files import FAIL, SKIP
from trainer.options import (
    ClipConfig,
    EarlyStoppingConfig,
    EmaConfig,
    LossScaleConfig,
    PenaltyConfig,
    ScheduleConfig,
    WarmStartConfig,
    WeightDecayConfig,
    check_options,
)
from trainer.options import ConfigError as ConfigError  # Where everybody looks for it.

log = logging.getLogger(__name__)


@dataclass
class DataConfig:
    """How the examples are read and ordered.

    Attributes:
        train_split: The split trained on: files named `*-train.tfrecord-*`.
        eval_split: The split evaluated.
        shuffle: A new order every epoch, a function of (seed, epoch); otherwise the order on disk.
        lanes: Parallel reading orders; must divide batch_size, and is the most replicas possible.
            0 is batch_size, which mixes best.
        window_batches: Records are shuffled inside windows of this many batches, and what is read
            at once. More mixes better and needs more memory.
        prefetch_batches: Batches that are ready before they are asked for, at most, for each
            replica, beside what its threads have parsed (a batch each, or some if they are small);
            0: none. Under ps workers read tickets, and nothing ahead.
        on_corrupt: "fail" ends the run at damaged data; "skip" verifies every record when the data
            is opened, and leaves out and counts those that cannot be read.
        cache_bytes: Training examples are kept in memory, by each process that trains, if all of
            them together are no larger than this; 0 never keeps them. Kept is what `parse` returns,
            or, of the default and other ExampleParses, what is there before it is widened: bytes,
            not floats. They are picked, widened and augmented in the step: prefetch_batches says
            nothing then, and an `augment` that takes long is better off without. Workers of ps read
            all of it with their first ticket, and again when they are started again.
    """

    train_split: str = "train"
    eval_split: str = "test"
    shuffle: bool = True
    lanes: int = 0
    window_batches: int = 32
    prefetch_batches: int = 0
    on_corrupt: str = FAIL
    cache_bytes: int = 0


@dataclass
class Config:
    """What to train. Every field can be set with `--config.FIELD=VALUE`.

    Attributes:
        dataset: A name that `python -m data.prepare` knows; says where data_dir is by default.
        data_dir: Directory with TFRecord files; empty means datasets/<dataset>.
        seed: Of the initial weights, the order of the examples, and what random layers draw.
        batch_size: Examples a step consumes, over all replicas. Under asynchronous ps each
            worker's gradient is a step, and covers batch_size examples.
        eval_batch_size: Examples evaluated at a time; 0 means batch_size.
        optimizer: A name in keras.optimizers, where the file has no build_optimizer.
        learning_rate: Given to that optimizer; `schedule` multiplies it.
        train_steps: The step at which training ends.
        steps_per_call: Steps between two looks at hooks and signals, at most; all in one graph.
        log_every_steps: Progress, metrics.jsonl and TensorBoard scalars.
        eval_every_steps: Evaluation; 0 evaluates at the end only.
        checkpoint_every_steps: Checkpoints; 0 saves at the end only.
        keep_checkpoints: The newest ones kept, besides the best.
        recover_from_nan: How many times in a run a loss that is no number does not end it:
            training goes back to the last checkpoint, and on behind the examples that followed it.
        best_metric: The evaluation metric whose best checkpoint is kept; the lower the better for
            `loss`, the higher for others.
        histogram_every_steps: TensorBoard histograms of variables and gradients; 0 is never.
        profile_first_step: Where the profiler starts; 0 is never.
        profile_num_steps: For how many steps it runs.
        export: Whether to write export/model.keras and export/saved_model at the end.
        micro_batches: Each replica computes its share of a batch in so many parts, one after
            another, and adds their gradients up: the same step in less memory. Layers that look at
            other examples, as BatchNormalization, see one part at a time.
        precision: The dtype policy in which Keras makes layers that are given none: float32,
            mixed_float16 (with a scaled loss) or mixed_bfloat16. Variables are float32 in all.
        jit_compile: XLA compiles what a replica computes. The first steps take longer.
        label_smoothing: The part of each label's probability that goes to all classes alike
            (Szegedy et al., "Rethinking the Inception Architecture", 2016), in training and
            evaluation; where the file has no loss of its own.
        freeze: Pattern of the paths of layers that are not trained, as "conv"; empty trains all. A
            frozen BatchNormalization does not move its statistics either.
        schedule, clip, penalty, weight_decay, ema, loss_scale, early_stopping, warm_start: See
            trainer/options.py.
        data: How examples are read and ordered.
    """

    dataset: str = "digits"
    data_dir: str = ""
    seed: int = 0
    batch_size: int = 64
    eval_batch_size: int = 0
    optimizer: str = "adam"
    learning_rate: float = 0.001
    train_steps: int = 1000
    steps_per_call: int = 50
    log_every_steps: int = 100
    eval_every_steps: int = 0
    checkpoint_every_steps: int = 1000
    keep_checkpoints: int = 3
    recover_from_nan: int = 0
    best_metric: str = "loss"
    histogram_every_steps: int = 0
    profile_first_step: int = 0
    profile_num_steps: int = 10
    export: bool = True
    micro_batches: int = 1
    precision: str = "float32"
    jit_compile: bool = False
    label_smoothing: float = 0.0
    freeze: str = ""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    weight_decay: WeightDecayConfig = field(default_factory=WeightDecayConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True)
class Recipe:
    """A config and the functions of its file; see the head of this module."""

    path: str
    config: Config
    build_model: Callable[[Any], Any]
    build_optimizer: Callable[[Any], Any] | None
    parse: Callable[[Any], Any] | None
    augment: Callable[[Any, Any, Any], Any] | None
    loss: Callable[[Any, Any], Any] | None
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None
    build_hooks: Callable[[Any, str], Iterable[Any]] | None
    build_learner: Callable[..., Any] | None = None


def load_recipe(path: str, config: Config | None = None) -> Recipe:
    """The functions that the file at `path` defines, with its config, or `config` in its place.

    Raises:
        ConfigError: there is no such file, it cannot be run, or lacks what is needed.
    """
    module = _load_module(path)
    for name in ("get_config", "build_model"):
        if not callable(getattr(module, name, None)):
            raise ConfigError(f"--config={path} defines no {name}(). See configs/digits.py.")
    if config is None:
        config = module.get_config()
    if not isinstance(config, Config):
        raise ConfigError(
            f"get_config() of {path} returned {type(config).__name__}, but must return a "
            "trainer.config.Config, or a dataclass derived from it."
        )
    return Recipe(
        path=path,
        config=config,
        build_model=module.build_model,
        build_optimizer=getattr(module, "build_optimizer", None),
        parse=getattr(module, "parse", None),
        augment=getattr(module, "augment", None),
        loss=getattr(module, "loss", None),
        metrics=getattr(module, "metrics", None),
        build_hooks=getattr(module, "build_hooks", None),
        build_learner=getattr(module, "build_learner", None),
    )


def check(config: Config) -> None:
    """Returns if the values of `config` can be trained with.

    Raises:
        ConfigError: names the first field that cannot, its value and what is needed.
    """
    at_least = {
        "batch_size": 1,
        "eval_batch_size": 0,
        "train_steps": 1,
        "steps_per_call": 1,
        "log_every_steps": 1,
        "eval_every_steps": 0,
        "checkpoint_every_steps": 0,
        "keep_checkpoints": 1,
        "recover_from_nan": 0,
        "histogram_every_steps": 0,
        "profile_first_step": 0,
        "profile_num_steps": 1,
        "seed": 0,
        "micro_batches": 1,
        "loss_scale.growth_steps": 1,
        "early_stopping.patience": 0,
        "schedule.warmup_steps": 0,
        "schedule.decay_steps": 0,
        "schedule.base_batch_size": 0,
        "data.lanes": 0,
        "data.window_batches": 1,
        "data.prefetch_batches": 0,
        "data.cache_bytes": 0,
    }
    values = flatten(config)
    for name, default in flatten(Config()).items():
        wanted = (int, float) if isinstance(default, float) else type(default)
        came = values[name]
        if not isinstance(came, wanted) or (isinstance(came, bool) != isinstance(default, bool)):
            raise ConfigError(
                f"config.{name} must be of type {type(default).__name__}. Received: {came!r}, of "
                f"type {type(came).__name__}."
            )
    if config.seed >= 2**32:
        raise ConfigError(f"config.seed must be below 2**32. Received: seed={config.seed}.")
    for name, least in at_least.items():
        if values[name] < least:
            raise ConfigError(
                f"config.{name} must be at least {least}. Received: {name}={values[name]}. "
                f"Type --config.{name}={max(least, 1)}, or more."
            )
    if not config.learning_rate > 0:
        raise ConfigError(
            "config.learning_rate must be above 0. Received: "
            f"learning_rate={config.learning_rate}. Type --learning_rate=0.001, for example."
        )
    if config.recover_from_nan and not config.checkpoint_every_steps:
        raise ConfigError(
            f"config.recover_from_nan={config.recover_from_nan} needs checkpoints to go back to, "
            "but config.checkpoint_every_steps=0 saves at the end only. Type "
            "--config.checkpoint_every_steps=100, for example."
        )
    check_options(config)
    if config.data.on_corrupt not in (FAIL, SKIP):
        raise ConfigError(
            f"config.data.on_corrupt must be {FAIL} or {SKIP}. Received: "
            f"{config.data.on_corrupt!r}. Type --config.data.on_corrupt={SKIP}."
        )
    if config.data.lanes and config.batch_size % config.data.lanes:
        raise ConfigError(
            "config.data.lanes must divide batch_size, so that every batch takes as many examples "
            f"from each lane. Received: lanes={config.data.lanes}, batch_size={config.batch_size}. "
            "Leave lanes at 0 to have it chosen."
        )


def check_shares(config: Config, num_shares: int, num_workers: int) -> None:
    """Returns if synchronous ps workers can compute a step of `num_shares` gradients.

    With backup workers a step may sum shares of different batches, so all must have one size.

    Raises:
        ConfigError: they would not, or a share would be empty.
    """
    lanes = num_lanes(config)
    if lanes < num_shares or (num_shares < num_workers and lanes % num_shares):
        raise ConfigError(
            f"--replicas_to_aggregate={num_shares} of {num_workers} workers needs a number of "
            f"lanes that {num_shares} divides. Received: {lanes} lanes for batch_size="
            f"{config.batch_size}. Choose a --batch_size that {num_shares} divides, and set "
            f"--config.data.lanes to a divisor of it that {num_shares} divides."
        )


def check_replicas(config: Config, num_replicas: int) -> None:
    """Returns if every replica gets a share of each batch; warns where shares are uneven.

    Raises:
        ConfigError: there are more replicas than examples, or than lanes.
    """
    for name, size in (
        ("batch_size", config.batch_size),
        ("config.eval_batch_size", config.eval_batch_size or config.batch_size),
    ):
        if size < num_replicas:
            raise ConfigError(
                f"{name}={size} is smaller than the {num_replicas} replicas that share a batch. "
                f"Use --{name}={num_replicas} or more, or fewer replicas."
            )
    lanes = num_lanes(config)
    if lanes < num_replicas:
        raise ConfigError(
            f"{num_replicas} replicas need at least as many lanes, but there are {lanes}. Set "
            f"--config.data.lanes to a divisor of batch_size={config.batch_size} from "
            f"{num_replicas} up: {config.batch_size}, for example."
        )
    smallest = lanes // num_replicas * (config.batch_size // lanes)
    if config.micro_batches > smallest:
        raise ConfigError(
            f"config.micro_batches={config.micro_batches} cuts a replica's share into more parts "
            f"than the {smallest} examples it may have: batch_size={config.batch_size} on "
            f"{num_replicas} replica(s). Type --config.micro_batches={smallest}, or less."
        )
    if lanes % num_replicas:
        log.warning(
            "batch_size=%d is shared unevenly by %d replicas; a multiple of them is faster.",
            config.batch_size,
            num_replicas,
        )


def num_lanes(config: Config) -> int:
    """The parallel reading orders of `config`, given or chosen."""
    return config.data.lanes or config.batch_size


def data_dir(config: Config) -> str:
    """Where the TFRecord files of `config` are."""
    return config.data_dir or str(Path("datasets") / config.dataset)


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """`{"batch_size": 100, "data.lanes": 0, ...}`: every field by its name on the command line."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(config):  # type: ignore[arg-type]  # It is a dataclass.
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            values |= flatten(value, f"{prefix}{item.name}.")
        else:
            values[prefix + item.name] = value
    return values


def explain_unknown_field(name: str, config: Config) -> str:
    """The message for a field that `config` does not have; names the nearest one."""
    known = list(flatten(config))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean --config.{near[0]}?" if near else f"Fields: {', '.join(known)}."
    return f"The config has no field {name!r}. {hint}"


def to_json(config: Config) -> str:
    """The config whole, as it is printed and saved."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def _load_module(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise ConfigError(
            f"--config={path}: there is no such file (looked in {Path.cwd()}). "
            f"Known: {', '.join(_shipped()) or 'none here'}."
        )
    spec = importlib.util.spec_from_file_location(f"recipe_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={path} is no Python file. See configs/digits.py.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # A user's code, which may fail in any way.
        raise ConfigError(
            f"--config={path} cannot be run: {type(error).__name__}: {error}"
        ) from error
    return module


def _shipped() -> list[str]:
    return [str(path) for path in sorted(Path("configs").glob("*.py")) if path.stem != "__init__"]
