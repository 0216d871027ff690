"""From a recipe to the learner and the checkpointer of a run.

learner = executor.build(lambda: build_learner(recipe))
checkpointer = build_checkpointer(recipe, "runs/a", inputs, learner)
"""

import dataclasses
import inspect
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import keras
import numpy as np

from data.system.compat.keras_layers import all_layers
from data.system.compat.keras_optimizers import given_rate
from data.system.compat.keras_state import names_from_zero
from data.system.extras import of_satellite
from strategies.base import Batch
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.config import (
    Config,
    ConfigError,
    Recipe,
    config_document,
    flatten,
    overridden_fields,
)
from trainer.config_file import errors_explained
from trainer.inputs import Inputs
from trainer.learner import Learner
from trainer.learner.variables import is_trainable, tables_of
from trainer.models import build_model, declared_outputs
from trainer.run_files import RunFiles
from trainer.step.advice import advice
from trainer.step.keras_losses import KerasLoss, ModelLoss, is_keras, output_names, overrides
from trainer.step.keras_metrics import KerasMetrics, default_metrics, split_metrics
from trainer.step.layer_options import Use, check_layers
from trainer.step.losses import PerExample, smoothed_crossentropy
from trainer.step.optimizers import (
    Adopted,
    adopt,
    has_schedule,
    made_optimizer,
    optimizer_named,
    supported_optimizers,
)
from trainer.step.options import (
    LocalStepsConfig,
    LossScaleConfig,
    Options,
    ScheduleConfig,
    StepOptions,
    WeightDecayConfig,
    matching,
)
from trainer.step.schedules import rate_factor

# Options that only Learner.gradients implements.
_IN_GRADIENTS = ("micro_batches", "penalty.l1", "penalty.l2", "jit_compile", "class_weight")


def check_for_strategy(
    learner: Learner, recipe: Recipe, strategy: str, num_workers: int, read_dtype: str
) -> None:
    """Raises ConfigError if `learner`, of `recipe`, cannot train as the flags say."""
    config = recipe.config
    check_layers(learner.model, recipe.path, Use(strategy, num_workers, config))
    if config.loss_scale != LossScaleConfig() and not learner.loss_scale:
        raise ConfigError(
            f"config.loss_scale={config.loss_scale} means nothing to the model of {recipe.path}, "
            "which does not compute in float16. Type --config.precision=mixed_float16, or leave it "
            "out."
        )
    if config.local_steps.chosen:
        _check_local_steps(learner, recipe, strategy)
    if config.virtual_replicas:
        _check_virtual_replicas(learner, recipe, strategy)
    if read_dtype != "float32" and learner.overrides_gradients:
        raise ConfigError(
            f"--read_dtype={read_dtype}: the Learner of {recipe.path} overrides `gradients`, and "
            "reads its variables itself. Leave the flag out."
        )


def _check_local_steps(learner: Learner, recipe: Recipe, strategy: str) -> None:
    """Raises ConfigError if replicas cannot train alone; notes what changes if they do."""
    options, chosen = recipe.config.local_steps, recipe.config.local_steps.chosen
    if strategy == "ps":
        values, defaults = flatten(options), flatten(LocalStepsConfig())
        # To be typed, since a run that continues has them recorded.
        without = [
            f"--config.local_steps.{name}={default}"
            for name, default in defaults.items()
            if values[name] != default
        ]
        raise ConfigError(
            f"{chosen} needs workers that keep their own weights, but under --strategy=ps all use "
            f"those of the servers. Type --strategy=multiworker, or {' '.join(without)}."
        )
    if learner.loss_scale:
        raise ConfigError(
            f"{chosen}: the model of {recipe.path} computes in float16, where workers that train "
            "alone would have different scales of the loss. Type "
            "--config.precision=mixed_bfloat16."
        )
    if options.every_secs and strategy == "mirrored":
        raise ConfigError(
            f"{chosen} is for workers of unequal speed, but the replicas of one process make each "
            "step together. Type --config.local_steps.every_secs=0 --config.local_steps.every=100, "
            "for example, or --strategy=multiworker."
        )
    if options.every_secs:
        learner.notes.append(
            f"each worker trains alone for about {options.every_secs:g} s (config.local_steps); "
            "reports, evaluations, checkpoints and the end come after an average; the weights "
            "depend on the speed of the workers"
        )
        return
    end = -(-recipe.config.train_steps // options.every) * options.every
    learner.notes.append(
        f"each replica trains alone for {options.every} steps (config.local_steps); reports, "
        f"evaluations, checkpoints and the end, step {end:,}, are at multiples of {options.every}"
    )
    names = ("log_every_steps", "eval_every_steps", "checkpoint_every_steps")
    intervals = {getattr(recipe.config, name): name for name in names}
    steps = min(filter(None, intervals))  # log_every_steps is at least 1.
    if options.overlap and steps <= options.every:
        learner.notes.append(
            f"config.local_steps.overlap has no effect with config.{intervals[steps]}={steps}: "
            "replicas wait for a complete average there. Type "
            f"--config.{intervals[steps]}={10 * options.every}, for example."
        )


def _check_virtual_replicas(learner: Learner, recipe: Recipe, strategy: str) -> None:
    """Raises ConfigError if `learner` may change state by its `gradients` that is not averaged."""
    what = ""
    if strategy == "ps" and learner.layer_state:
        what = "moving statistics, which workers of ps would change one after the other"
    elif learner.own_state:
        what = "state of its own, which each replica would change by its own parts"
    if what and learner.overrides_gradients:
        raise ConfigError(
            f"config.virtual_replicas={recipe.config.virtual_replicas}: the Learner of "
            f"{recipe.path} overrides `gradients`, and has {what}. Leave the option out."
        )


def check_standby(checkpointer: Checkpointer, path: str, every_steps: int) -> None:
    """Raises ConfigError if --ps_standby=`every_steps` cannot copy the state of `path`'s model.

    The servers copy variables: a table of dynamic ids, or a lookup table that changes, is none.
    """
    if every_steps and not checkpointer.variables:
        raise ConfigError(
            f"--ps_standby={every_steps}: the model of {path} has state that parameter servers "
            "cannot copy to each other: a ShardedEmbedding with dynamic ids (rows=None), or a "
            "lookup table that changes. Leave the flag out, and save more often: "
            f"--config.checkpoint_every_steps={every_steps}."
        )


@names_from_zero()
def build_learner(recipe: Recipe, input_specs: Batch = None) -> Learner:
    """The learner of `recipe`, with the same initial weights in every process.

    A model that is not built yet is built from `input_specs`, the tensor specs of its inputs.
    """
    config = recipe.config
    keras.utils.set_random_seed(config.seed)
    model = build_model(recipe, input_specs)
    origin = ""
    if config.warm_start.path:
        # Before averages and optimizer states that are initialised from the weights.
        warm_start = of_satellite("trainer.checkpoints.warm_start", "warm_start")
        origin = warm_start(model, config.warm_start)
    if config.freeze:
        _freeze(model, config.freeze)
    adopted = _optimizer(recipe, model)
    options = _options(config, adopted)
    if config.weight_decay.exclude and not options.weight_decay.rate:
        raise ConfigError(
            f"config.weight_decay.exclude={config.weight_decay.exclude!r} means nothing where "
            "nothing decays. Type --config.weight_decay.rate=0.01, for example, or leave it out."
        )
    loss = _loss(recipe, model)
    functions, keras_metrics = _metrics(recipe, model, input_specs)
    factor = None
    if config.schedule != ScheduleConfig():
        factor = rate_factor(
            config.schedule, train_steps=config.train_steps, batch_size=config.batch_size
        )
    make = partial(recipe.build_learner, config) if recipe.build_learner else Learner
    with errors_explained(f"build_learner(config, **parts) of {recipe.path}"):
        learner = make(
            model=model,
            optimizer=adopted.optimizer,
            loss=loss,
            metrics=functions,
            keras_metrics=keras_metrics,
            batch_size=config.batch_size,
            rate_factor=factor,
            options=options,
            origin=origin,
        )
    _check_learner(learner, recipe)
    learner.notes += [*adopted.notes, *advice(model, recipe.loss, loss, recipe.path)]
    return learner


def _options(config: Config, adopted: Adopted) -> Options:
    """The options of `config`, with the settings that the user gave to the optimizer instead."""
    options = Options()
    for name in (field.name for field in dataclasses.fields(Options)):
        if hasattr(config, name):
            ours, theirs = getattr(config, name), getattr(adopted.options, name, None)
            is_group = dataclasses.is_dataclass(ours)
            setattr(options, name, _merged(name, ours, theirs) if is_group else ours)
    options.jit_compile = config.jit_compile is True
    options.marks_changed_rows = config.complete_checkpoint_every > 1
    options.last_step = config.train_steps
    options.clip.check()
    return options


def _merged(name: str, ours: Any, of_optimizer: Any) -> Any:  # A group of fields.
    default, changes = vars(type(ours)()), {}
    for key, value in vars(of_optimizer).items():
        if value in (default[key], vars(ours)[key]):
            continue
        if vars(ours)[key] != default[key]:
            raise ConfigError(
                f"The optimizer has a setting for config.{name}.{key}, {value}, and the config has "
                f"another: {vars(ours)[key]}. Leave one of them out."
            )
        changes[key] = value
    return dataclasses.replace(ours, **changes)


def _check_learner(learner: object, recipe: Recipe) -> None:
    if not isinstance(learner, Learner):
        raise ConfigError(
            f"build_learner() of {recipe.path} must return a trainer.learner.Learner, but returned "
            f"{type(learner).__name__}. Derive a class from it; see configs/custom_step.py."
        )
    with errors_explained(f"The property `state` of the Learner of {recipe.path}"):
        dict(learner.state)
    if type(learner).gradients is Learner.gradients:
        return
    values, defaults = flatten(recipe.config), flatten(Config())
    for name in _IN_GRADIENTS:
        if values[name] and values[name] != defaults[name]:
            raise ConfigError(
                f"config.{name}={values[name]} is for Learner.gradients, in whose place "
                f"{recipe.path} defines another method. Do it there, or leave {name} out."
            )
    if learner.loss_scale:
        raise ConfigError(
            f"The model of {recipe.path} computes in float16, where Learner.gradients scales the "
            "loss, but the file defines another `gradients`. Type "
            "--config.precision=mixed_bfloat16, which needs no scale."
        )
    if recipe.config.histogram_every_steps:
        try:
            inspect.signature(learner.gradients).bind((), training=False)
        except TypeError as error:
            raise ConfigError(
                f"config.histogram_every_steps needs gradients without an effect, but `gradients` "
                f"of the Learner of {recipe.path} takes no argument `training`. Write `def "
                "gradients(self, batch, *, training=True)`, and call the model with it."
            ) from error


def build_checkpointer(
    recipe: Recipe,
    model_dir: str,
    inputs: Inputs,
    learner: Learner,
    io_device: str | None = None,
    *,
    is_shared: bool = False,
    is_evaluator: bool = False,
) -> Checkpointer:
    """The checkpointer of `model_dir`. The chief saves with it; an evaluator, only the best."""
    order = inputs.train.order
    identity = {  # Determines the example at each position. Only the same run can be resumed.
        "train data": inputs.train.split.fingerprint,
        "batch_size": order.batch_size,
        "seed": order.seed,
        "data.shuffle": order.shuffle,
        "data.lanes": order.lanes,
        "data.window_batches": order.window_batches,
    }
    return Checkpointer(
        RunFiles(model_dir).checkpoints,
        learner,
        identity,
        keep=recipe.config.keep_checkpoints,
        config=config_document(recipe.config),
        io_device=io_device,
        is_shared=is_shared,
        complete_every=recipe.config.complete_checkpoint_every,
        is_evaluator=is_evaluator,
    )


def _freeze(model: keras.Model, pattern: str) -> None:
    tables = tables_of(model)  # Those of dynamic ids have no weights of Keras.
    layers = [la for la in all_layers(model, include_self=False) if la.weights or la in tables]
    found = matching("freeze", pattern, [layer.path for layer in layers])
    for layer in itertools.compress(layers, found):
        layer.trainable = False
    if not is_trainable(model):
        raise ConfigError(
            f"config.freeze={pattern!r} is found in every layer, so that nothing would be trained. "
            "Give a pattern that leaves one."
        )


def _loss(recipe: Recipe, model: keras.Model) -> PerExample | KerasLoss | ModelLoss:
    smoothing = recipe.config.label_smoothing
    if overrides(model, "compute_loss"):
        return _loss_of_model(recipe, model)
    if recipe.loss is None:
        _refuse_loss_weights(recipe, "the default loss")
        return smoothed_crossentropy(smoothing)
    if smoothing:
        raise ConfigError(
            f"config.label_smoothing={smoothing} is for the default loss, but {recipe.path} "
            "defines another. Smooth the labels in it, or leave label_smoothing out."
        )
    if is_keras(recipe.loss):
        return KerasLoss(recipe.loss, recipe.loss_weights)
    if not callable(recipe.loss):
        raise ConfigError(
            f"loss of {recipe.path} is {recipe.loss!r}, but must be a name of keras.losses, an "
            "object of it, a function of (labels, outputs), or a list or dict of these by output."
        )
    _refuse_loss_weights(recipe, "a function")
    return recipe.loss


def _loss_of_model(recipe: Recipe, model: keras.Model) -> ModelLoss:
    given = {
        "loss": recipe.loss is not None,
        "loss_weights": recipe.loss_weights is not None,
        "config.label_smoothing": bool(recipe.config.label_smoothing),
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"{type(model).__name__} of {recipe.path} overrides compute_loss(), which is the loss, "
            f"and {', '.join(names)} would be ignored. Leave one of them out."
        )
    return ModelLoss(model)


def _refuse_loss_weights(recipe: Recipe, loss: str) -> None:
    if recipe.loss_weights is not None:
        raise ConfigError(
            f"loss_weights of {recipe.path} are for several losses, a list or dict, but the loss "
            f"is {loss}. Leave loss_weights out."
        )


def _metrics(
    recipe: Recipe, model: keras.Model, input_specs: Batch
) -> tuple[Mapping[str, PerExample], KerasMetrics | None]:
    """The metrics that are functions of each example, by name, and the metrics of Keras."""
    metrics, weighted_metrics = recipe.metrics, recipe.weighted_metrics or []
    outputs = None
    # Not for lists: it costs time for models that declare no outputs.
    if metrics is None or any(isinstance(each, Mapping) for each in (metrics, weighted_metrics)):
        outputs = declared_outputs(model, input_specs)
    if metrics is None:
        metrics = default_metrics(recipe.loss, outputs)
    names = output_names(model, outputs)
    functions, others = split_metrics("metrics", metrics, names)
    unweighted, weighted = split_metrics("weighted_metrics", weighted_metrics, names)
    if unweighted:
        raise ConfigError(
            f"weighted_metrics of {recipe.path} has functions by name, {', '.join(unweighted)}, "
            "which get no weights. Give a list: weighted_metrics = [function, ...]."
        )
    return functions, KerasMetrics(others, weighted) if others or weighted else None


def _optimizer(recipe: Recipe, model: keras.Model) -> Adopted:
    config = recipe.config
    if recipe.build_optimizer is None:
        supported = supported_optimizers()
        if config.optimizer.lower() not in supported:
            raise ConfigError(
                f"config.optimizer={config.optimizer!r} is none of the optimizers that a name "
                f"alone can choose: {', '.join(sorted(supported))}. Use one of them, or define "
                "build_optimizer(config) in the config file."
            )
        rate = config.weight_decay.rate
        optimizer, rate = optimizer_named(config.optimizer.lower(), config.learning_rate, rate)
        return Adopted(optimizer, StepOptions(weight_decay=WeightDecayConfig(rate=rate)))
    function = f"build_optimizer(config) of {recipe.path}"
    with errors_explained(function):
        made = recipe.build_optimizer(config)
    optimizer = made_optimizer(made, function, config.learning_rate)
    if has_schedule(optimizer) and config.schedule != ScheduleConfig():
        raise ConfigError(
            f"{function} has a schedule, and config.schedule is another: {config.schedule}. Give "
            "the optimizer config.learning_rate, or leave config.schedule out."
        )
    adopted = adopt(optimizer, model.trainable_variables)
    adopted.notes += _other_than_typed(recipe, adopted.optimizer, function)
    return adopted


def _other_than_typed(recipe: Recipe, optimizer: keras.Optimizer, function: str) -> list[str]:
    """Says which option of the command line is another in `optimizer`, which `function` made."""
    config, rate = recipe.config, given_rate(optimizer)
    kind, others = type(optimizer).__name__, {}
    if kind.lower() != config.optimizer.lower():
        others["optimizer"] = f"{kind}. It can use config.optimizer instead"
    if isinstance(rate, keras.Variable) and rate.numpy() != np.float32(config.learning_rate):
        others["learning_rate"] = f"the learning rate {rate.numpy():g}"
    return [
        f"config.{name}={getattr(config, name)}: {function} chooses {other}."
        for name, other in others.items()
        if name in overridden_fields(recipe)
    ]
