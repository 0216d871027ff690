"""Config: the typed options of a training run; Recipe: a config with the functions of its file.

    recipe = load_recipe("configs/mnist_replica.py")
    recipe = recipe_of_run(RunFiles("runs/a").read_config())      # with the config of that run

A config file is a user's whole plug-in. It defines

| name | needed | what |
| --- | --- | --- |
| `get_config()` | yes | returns a Config, or a dataclass derived from it with more fields |
| `build_model(config)` | yes | returns a built keras.Model; labels and outputs go to `loss` |
| `build_optimizer(config)` | no | returns a keras.Optimizer, its config or name |
| `parse(serialized)` | no | string [B] -> (inputs, labels) or (inputs, labels, weights) |
| `parse(serialized, seeds)` | no | the same; seeds int32 [B, 2] in training, else None |
| `augment(inputs, labels, seeds)` | no | -> (inputs, labels) of training; seeds int32 [B, 2] |
| `loss` | no | a function (labels, outputs) -> [B], or a loss of Keras, or several by output |
| `loss_weights` | no | the factors of several losses, a list or a dict |
| `metrics` | no | {name: function(labels, outputs) -> [B]}, or metrics of Keras |
| `weighted_metrics` | no | metrics of Keras that use the weights of examples |
| `build_learner(config, **parts)` | no | returns a Learner; `parts` are its arguments, built |
| `build_hooks(config, model_dir)` | no | returns a list of trainer.hooks.base.Hook, for the chief |
| `build_callbacks(config)` | no | returns a list of callbacks of Keras: docs/keras.md |
| `build_writers(config, model_dir)` | no | returns a list of trainer.Writer: docs/trackers.md |

Without `parse`, examples are parsed as dataset_info.json says. The default loss is the softmax
cross entropy of labels, integer or one-hot, and logits; the default metric is accuracy, where
labels are classes. docs/keras.md has losses and metrics of Keras.

`parse` and `augment` must treat each example independently of B: they may get several batches at
once, or a part of a batch. Random numbers must come from the seeds, as of
`tf.random.stateless_uniform`: an example has another seed in each epoch, the same on any topology.

`build_learner` is for a step of another kind: several losses, several optimizers. `parts` are the
arguments of trainer.learner.Learner, which lists the methods to override. See
`configs/custom_step.py`.

The file is executed when the command line is read. It should import TensorFlow and Keras inside its
functions, and must not create a tensor: multiworker must be set up before the first tensor.
"""

import dataclasses
import difflib
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from data.system.files import FAIL, SKIP, expanded
from data.system.files import absolute as absolute_path
from trainer.config_file import errors_explained, load_module, split_target
from trainer.step.options import (
    ABOVE_0,
    BELOW_1,
    PRECISIONS,
    EarlyStoppingConfig,
    ScheduleConfig,
    StepOptions,
    WarmStartConfig,
    group,
    option,
)
from trainer.step.options import ConfigError as ConfigError  # Users import it from here.

if TYPE_CHECKING:
    import keras

    from data.reader import Augment, Parse
    from trainer.hooks.base import Hook
    from trainer.hooks.writers import Writer
    from trainer.learner import Learner
    from trainer.step.keras_losses import LossSpec
    from trainer.step.keras_metrics import MetricSpec
    from trainer.step.losses import PerExample

# In place of a config file, in config.json and in messages: a Config object that trainer.train got.
PYTHON_CONFIG = "trainer.train()"


@dataclass
class DataConfig:
    """How the examples are read and ordered.

    Attributes:
        train_split: The split trained on: files named `*-train.tfrecord-*`, or in `train/`.
        eval_split: The split evaluated.
        shuffle: A new order every epoch, a function of (seed, epoch); if False, the order on disk.
        lanes: Parallel reading orders; must divide batch_size, and is the most replicas possible.
            0 is batch_size, which mixes best.
        window_batches: Records are shuffled inside windows of this many batches, and a window is
            read at once. A larger window mixes better and needs more memory.
        prefetch_batches: The most batches that are prepared ahead for each replica, in addition to
            the batches that its threads are parsing; 0 prepares none. Under ps, workers read
            tickets, and nothing ahead.
        on_corrupt: "fail" ends the run at damaged data; "skip" verifies every record when the data
            is opened, and leaves out and counts the damaged records.
        cache_bytes: Cache the parsed training set in memory if it fits in this many bytes per
            process that trains; 0 never caches. uint8 inputs are cached as uint8 and converted in
            the step. Cached examples are also augmented in the step, so a slow `augment` is faster
            without a cache, and prefetch_batches has no effect. Workers of ps read the whole set
            with their first ticket, and again after a restart.
        max_record_bytes: The most bytes of a record. Files with longer ones are refused, because
            records are held in memory.
        inputs: The features that the default `parse` gives to the model. Empty: the names of the
            model's inputs, if they are a dict; else the only image or tensor, or all numbers.
        label: The feature that is the label: a ClassLabel or a number. Empty: the only ClassLabel,
            or the one that is called label.
    """

    train_split: str = "train"
    eval_split: str = "test"
    shuffle: bool = True
    lanes: int = option(0, at_least=0)
    window_batches: int = option(32, at_least=1)
    prefetch_batches: int = option(0, at_least=0)
    on_corrupt: str = option(FAIL, one_of=(FAIL, SKIP))
    cache_bytes: int = option(0, at_least=0)
    max_record_bytes: int = option(1 << 30, at_least=1)
    inputs: tuple[str, ...] = ()
    label: str = ""


# The reading list of a batch needs 50 to 124 bytes an example: the kernel would end the process.
_AT_MOST_2_24 = ("at most 2**24", lambda size: size <= 2**24)


@dataclass
class RunOptions:
    """The fields of Config that are no options of a step.

    Attributes:
        dataset: A name that `python -m data.prepare` knows; the default of data_dir follows it.
        data_dir: Directory with TFRecord files; empty means datasets/<dataset>.
        data_cache_dir: With data_dir at s3://, a directory on a disk of this machine for copies of
            what is read; empty means a directory below ~/.cache.
        data_cache_bytes: The most bytes of all copies in data_cache_dir. Files that do not fit are
            read from s3:// in each epoch; under ps all must fit.
        seed: Seed of the initial weights, the order of the examples, and the random layers.
        batch_size: Examples per step, over all replicas. Under asynchronous ps each
            worker's gradient is a step, and covers batch_size examples.
        eval_batch_size: Examples evaluated at a time; 0 means batch_size.
        optimizer: A name in keras.optimizers, where the file has no build_optimizer.
        learning_rate: Given to that optimizer; `schedule` multiplies it.
        train_steps: The step at which training ends.
        steps_per_call: The most steps in one call of the graph, between checks of the hooks. With
            local_steps.overlap a call ends only when a hook is due.
        log_every_steps: Progress, metrics.jsonl and TensorBoard scalars.
        eval_every_steps: Evaluation; 0 evaluates at the end only.
        checkpoint_every_steps: Checkpoints; 0 saves at the end only.
        keep_checkpoints: The number of newest checkpoints that are kept, in addition to the best.
        complete_checkpoint_every: Of checkpoints, each n-th has complete tables of
            ShardedEmbedding layers. Those between have the rows that were changed since the
            checkpoint before, and need the checkpoints from the last complete one on.
        recover_from_nan: The number of times in a run that training, after a NaN loss, goes back
            to the last checkpoint, and skips the examples that were consumed since.
        best_metric: The evaluation metric whose best checkpoint is kept.
        best_mode: min: the lowest value of best_metric is the best; max: the highest. auto: as
            Keras knows of its metrics; of others the lowest if a word of the name says a loss,
            such as error, distance or perplexity, and else the highest.
        histogram_every_steps: TensorBoard histograms of variables and gradients; 0 is never.
        profile_first_step: Where the profiler starts; 0 is never.
        profile_num_steps: The number of steps that it records.
        trackers: Experiment trackers that get the reports, joined by commas: mlflow, wandb.
        export: True writes export/model.keras and export/saved_model at the end.
        precision: The dtype policy of layers without a policy: float32, mixed_float16 (with a
            scaled loss) or mixed_bfloat16. Variables are float32 with all three.
        jit_compile: True: XLA compiles what a replica computes: the gradient; under mirrored also
            the update, and complete steps if there is one replica; and the evaluation, but not
            under ps. The first start takes longer. "auto": under mirrored as True on GPUs, and on
            CPUs for models with attention, unless XLA cannot compile them; otherwise as False.
        deterministic: The same bits in each run on the same devices: only deterministic ops of
            TensorFlow, and no TensorFloat-32; slower on GPUs, and records are parsed on one thread.
            Not for asynchronous ps, nor with backup workers.
        label_smoothing: The part of each label's probability that is spread over all classes
            (Szegedy et al., "Rethinking the Inception Architecture", 2016), in training and
            evaluation. Only for the default loss.
        freeze: Pattern of the paths of layers not to train, for example "conv"; empty trains all. A
            frozen BatchNormalization does not move its statistics either.
        schedule, early_stopping, warm_start: See trainer/step/options.py.
        data: How examples are read and ordered.
    """

    dataset: str = "digits"
    data_dir: str = ""
    data_cache_dir: str = ""
    data_cache_bytes: int = option(10 << 30, at_least=0)
    seed: int = option(0, at_least=0, bound=("below 2**32", lambda seed: seed < 2**32))
    batch_size: int = option(64, at_least=1, bound=_AT_MOST_2_24)
    eval_batch_size: int = option(0, at_least=0, bound=_AT_MOST_2_24)
    optimizer: str = "adam"
    learning_rate: float = option(0.001, bound=ABOVE_0)
    train_steps: int = option(1000, at_least=1)
    steps_per_call: int = option(50, at_least=1)
    log_every_steps: int = option(100, at_least=1)
    eval_every_steps: int = option(0, at_least=0)
    checkpoint_every_steps: int = option(1000, at_least=0)
    keep_checkpoints: int = option(3, at_least=1)
    complete_checkpoint_every: int = option(1, at_least=1)
    recover_from_nan: int = option(
        0, at_least=0, needs=(("checkpoint_every_steps",), "checkpoint_every_steps=100")
    )
    best_metric: str = "loss"
    best_mode: str = option("auto", one_of=("auto", "min", "max"))
    histogram_every_steps: int = option(0, at_least=0)
    profile_first_step: int = option(0, at_least=0)
    profile_num_steps: int = option(
        10, at_least=1, needs=(("profile_first_step",), "profile_first_step=100")
    )
    trackers: str = ""
    export: bool = True
    precision: str = option(PRECISIONS[0], one_of=PRECISIONS)
    jit_compile: bool | str = option("auto", one_of=("auto", True, False))
    deterministic: bool = False
    label_smoothing: float = option(0.0, bound=BELOW_1)
    freeze: str = option("", is_pattern=True)
    schedule: ScheduleConfig = group(ScheduleConfig)
    early_stopping: EarlyStoppingConfig = group(EarlyStoppingConfig)
    warm_start: WarmStartConfig = group(WarmStartConfig)
    data: DataConfig = group(DataConfig)


@dataclass
class Config(StepOptions, RunOptions):
    """What to train. Every field can be set with `--config.FIELD=VALUE`.

    Attributes: see RunOptions above, and StepOptions in trainer/step/options.py.
    """


@dataclass(frozen=True)
class Recipe:
    """A config and the functions of its file, which the head of this module explains."""

    path: str
    config: Config
    build_model: Callable[[Config], "keras.Model"]
    build_optimizer: Callable[[Config], "keras.Optimizer"] | None = None
    parse: "Parse | None" = None
    augment: "Augment | None" = None
    loss: "PerExample | LossSpec | None" = None
    loss_weights: Mapping[str, float] | Sequence[float] | None = None
    metrics: "MetricSpec | None" = None
    weighted_metrics: "MetricSpec | None" = None
    build_hooks: Callable[[Config, str], Iterable["Hook"]] | None = None
    build_learner: Callable[..., "Learner"] | None = None
    build_callbacks: Callable[[Config], Iterable["keras.callbacks.Callback"]] | None = None
    build_writers: Callable[[Config, str], Iterable["Writer"]] | None = None
    files: tuple[str, ...] = ()  # The config file, and the neighbours that it imports.
    # The fields as `get_config` of the file made them; none of a Config object of a program.
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)


def load_recipe(path: str) -> Recipe:
    """The functions that the file or module `path` defines, with its config.

    `path` may end with `:function`, which is called in place of `get_config`.

    Raises ConfigError if there is no such file, it cannot be run, or a function is missing.
    """
    place, get_config = split_target(path)
    module, files = load_module(place)
    for name in (get_config, "build_model"):
        if not callable(getattr(module, name, None)):
            raise ConfigError(f"--config={path} defines no {name}(). See configs/digits.py.")
    with errors_explained(f"{get_config}() of {place}"):
        config = getattr(module, get_config)()
    if not isinstance(config, Config):
        raise ConfigError(
            f"{get_config}() of {place} returned {type(config).__name__}, but must return a "
            "trainer.config.Config, or a dataclass derived from it."
        )
    with errors_explained(f"The annotations of {type(config).__name__} in {place}"):
        _resolve_annotations(config)
    names = (item.name for item in dataclasses.fields(Recipe)[2:-2])
    # Any: functions of a user's module, which has no types.
    functions: dict[str, Any] = {name: getattr(module, name, None) for name in names}
    return Recipe(path, config, **functions, files=files, defaults=flatten(config))


def overridden_fields(recipe: Recipe) -> list[str]:
    """The fields that differ from those of the config file: the command line has changed them."""
    values, defaults = flatten(recipe.config), recipe.defaults
    return [name for name in defaults if values.get(name) != defaults[name]]


def recipe_of_run(document: Mapping[str, Any]) -> Recipe:  # Any: JSON values.
    """The recipe that a run was started with. `document` is the contents of its config.json.

    Fields that the config file has lost since are left out. Raises ConfigError if the file is gone.
    """
    if document["recipe"] == PYTHON_CONFIG and PYTHON_CONFIG not in sys.modules:
        raise ConfigError(
            "This run was started from Python, with a Config object, so there is no config file "
            "with its functions. Give them again: trainer.load_run(RUN, build_model=build_model)."
        )
    recipe = load_recipe(document["recipe"])
    set_fields(recipe.config, flatten_as(recipe.config, document["config"]))
    # Absolute, also where the field is empty or relative to the directory that the run began in.
    recipe.config.data_dir = document["data_dir"]
    return recipe


def set_fields(config: Config, values: Mapping[str, object]) -> None:
    """Sets the fields that `values` names as `flatten` does."""
    for name, value in values.items():
        *groups, last = name.split(".")
        setattr(functools.reduce(getattr, groups, config), last, value)


def flatten_json(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """As `flatten`, of the "config" of a config.json."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        is_group = isinstance(value, Mapping)
        fields |= flatten_json(value, f"{prefix}{name}.") if is_group else {prefix + name: value}
    return fields


def flatten_as(config: object, values: Mapping[str, Any]) -> dict[str, Any]:
    """As `flatten`, of the "config" of a config.json; only the fields that `config` has.

    JSON has lists in place of tuples, and its keys are text: the values get the declared types.
    """
    fields: dict[str, Any] = {}
    for name, _, current in fields_of(config):
        found = _value_in(values, name, _ABSENT)
        is_group = isinstance(found, Mapping) and not isinstance(current, Mapping | None)
        if found is _ABSENT or is_group:  # The config file has changed since.
            continue
        if found == json.loads(json.dumps(current)):
            fields[name] = current
        elif isinstance(found, Mapping):
            *groups, last = name.split(".")
            owner = functools.reduce(getattr, groups, config)
            make_key = _type_of_keys(get_type_hints(type(owner))[last])
            fields[name] = {make_key(key): _tuples(value) for key, value in found.items()}
        else:
            fields[name] = found if isinstance(current, list) else _tuples(found)
    return fields


_ABSENT = object()


def _value_in(values: Any, name: str, default: object) -> Any:
    """The value of the field `name` in the "config" of a config.json; else `default`."""
    for key in name.split("."):
        values = values.get(key, default) if isinstance(values, Mapping) else default
    return values


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _type_of_keys(declared: Any) -> Callable[[str], object]:
    """Int or float for `dict[int, ...]`, `dict[float, ...] | None` and so on, else str."""
    mappings = filter(_is_mapping, _types_in(declared))
    key = (*get_args(next(mappings, None)), str)[0]
    return key if key in (int, float) else str


def _types_in(declared: Any) -> list[Any]:
    """`[int, str]` for `int | str | None`, and `[int]` for `int`."""
    is_union = get_origin(declared) in (Union, UnionType)
    types = get_args(declared) if is_union else [declared]
    return [each for each in types if each is not type(None)]


def _is_mapping(declared: Any) -> bool:
    kind = get_origin(declared) or declared
    return isinstance(kind, type) and issubclass(kind, Mapping)


def num_lanes(config: Config) -> int:
    """The number of parallel reading orders."""
    return config.data.lanes or config.batch_size


def data_dir(config: Config) -> str:
    """The directory of the TFRecord files."""
    return expanded(config.data_dir) or str(Path("datasets") / config.dataset)


def flatten(config: object) -> dict[str, object]:
    """`{"batch_size": 100, "data.lanes": 0, ...}`: every field by its name on the command line."""
    return {name: value for name, _, value in fields_of(config)}


def fields_of(
    config: object, prefix: str = ""
) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:  # Fields have no common type.
    """Each field with its name on the command line, its declaration and its value in `config`."""
    for item in dataclasses.fields(config):  # type: ignore[arg-type]  # It is a dataclass.
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item, value


def explain_unknown_field(name: str, config: Config) -> str:
    """The message for a field that `config` does not have; names the nearest one."""
    known = list(flatten(config))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean --config.{near[0]}?" if near else f"Fields: {', '.join(known)}."
    return f"The config has no field {name!r}. {hint}"


def to_json(config: Config) -> str:
    """The complete config, as it is printed and saved."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def config_document(config: Config) -> dict[str, Any]:  # Any: JSON values.
    """The config as checkpoints have it: all tasks have the same, in any directory."""
    return {**json.loads(to_json(config)), "data_dir": absolute_path(data_dir(config))}


def changed_fields(former: Mapping[str, Any], config: Config) -> str:  # Any: JSON values.
    """Describes what differs from `former`, a `config_document`; "" if nothing does.

    Fields that only one of the two has are of another version of the config file or program.
    """
    changes, document = [], config_document(config)
    for name in flatten(config):
        ours = _value_in(document, name, None)
        theirs = _value_in(former, name, ours)
        if theirs != ours:
            changes.append(f"{name} {json.dumps(theirs)} -> {json.dumps(ours)}")
    return ", ".join(changes)


def _resolve_annotations(config: object) -> None:
    """Makes types of annotations that are text, as after `from __future__ import annotations`.

    ml_collections needs the types of the fields that flags set.
    """
    items = dataclasses.fields(config)  # type: ignore[arg-type]  # It is a dataclass.
    hints = get_type_hints(type(config)) if any(isinstance(i.type, str) for i in items) else {}
    for item in items:
        item.type = hints.get(item.name, item.type)
        types = _types_in(item.type)
        if len(types) > 1 or any(map(_is_mapping, types)):
            item.type = object  # For which ml_collections reads a literal of Python, or text.
        if dataclasses.is_dataclass(value := getattr(config, item.name)):
            _resolve_annotations(value)
