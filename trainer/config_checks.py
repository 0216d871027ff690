"""The checks of a config, before anything starts.

    check(recipe.config)                                # each field, and what fits together
    check_replicas(recipe.config, num_replicas=4)       # what depends on the cluster

All raise ConfigError: what came, what is needed, what to type. trainer/step/options.py declares the
checks of a field with the field, and `build.py` checks what needs the model.
"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from trainer.config import Config, ConfigError, fields_of, flatten, num_lanes
from trainer.hooks.tracker_names import check_trackers
from trainer.step.options import must_be

log = logging.getLogger(__name__)


def check(config: Config) -> None:
    """Raises ConfigError for the first invalid field."""
    values = flatten(config)
    # As Config declares them: a field that a derived class declares again has no other bounds.
    declared = list(fields_of(Config()))
    for name, item, default in declared:
        _check_field(name, item.metadata, default, values[name])
    for name, item, default in declared:
        needed, example = item.metadata.get("needs", ((), ""))
        if values[name] != default and needed and not any(values[other] for other in needed):
            raise ConfigError(
                f"config.{name}={values[name]} means nothing without "
                f"{' or '.join(f'config.{other}' for other in needed)}. Type "
                f"--config.{example}, for example, or leave {name} out."
            )
    config.schedule.check()
    config.clip.check()
    config.local_steps.check()
    if config.deterministic and (secs := config.local_steps.every_secs):
        raise ConfigError(
            f"config.local_steps.every_secs={secs:g} divides the steps by the speed of the "
            "workers, which no run repeats, but config.deterministic asks for equal bits in each "
            "run. Type --config.local_steps.every_secs=0 --config.local_steps.every=100, or leave "
            "deterministic out."
        )
    weights = config.class_weight
    if not isinstance(weights, Mapping) or not all(
        type(index) is int
        and index >= 0
        and isinstance(weight, int | float)
        and 0 <= weight < math.inf
        for index, weight in weights.items()
    ):
        raise must_be(
            "indices of classes with finite weights from 0", "class_weight", weights, "'{0: 2}'"
        )
    if config.virtual_replicas & (config.virtual_replicas - 1):
        raise must_be("0 or a power of two", "virtual_replicas", config.virtual_replicas, 8)
    if config.virtual_replicas and (chosen := config.local_steps.chosen):
        raise ConfigError(
            f"{chosen}: what a replica computes alone "
            "depends on the number of replicas, so config.virtual_replicas cannot keep the bits "
            "equal. Leave one of the two out."
        )
    check_trackers(config.trackers)
    if config.warm_start.path.startswith("s3://"):
        raise ConfigError(
            f"config.warm_start.path={config.warm_start.path} cannot be read: give a local copy. "
            "Type, for example: aws s3 cp --recursive s3://BUCKET/RUN/checkpoints/step-00001000 DIR"
        )
    if config.data.lanes and config.batch_size % config.data.lanes:
        raise ConfigError(
            "config.data.lanes must divide batch_size, so that every batch takes as many examples "
            f"from each lane. Received: lanes={config.data.lanes}, batch_size={config.batch_size}. "
            "Leave lanes at 0 to have it chosen."
        )


def _check_field(name: str, declared: Mapping[str, Any], default: Any, value: Any) -> None:
    """Raises ConfigError if `value` has not the type, or is not in the bounds, of field `name`."""
    if choices := declared.get("one_of"):
        if (type(value), value) not in [(type(choice), choice) for choice in choices]:
            needed = f"{', '.join(map(str, choices[:-1]))} or {choices[-1]}"
            raise must_be(needed, name, value, choices[1 if value else -1])
        return
    wanted = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(value, wanted) or (isinstance(value, bool) != isinstance(default, bool)):
        raise ConfigError(
            f"config.{name} must be of type {type(default).__name__}. Received: {value!r}, of "
            f"type {type(value).__name__}."
        )
    least = declared.get("at_least")
    if least is not None and value < least:
        raise ConfigError(
            f"config.{name} must be at least {least}. Received: {name}={value}. "
            f"Type --config.{name}={max(least, 1)}, or more."
        )
    words, is_valid = declared.get("bound", ("", lambda _: True))
    if not is_valid(value):  # NaN is not valid either.
        raise must_be(words, name, value, default or type(default)(1 if is_valid(1) else 0.1))
    if declared.get("is_pattern"):
        try:
            re.compile(str(value))
        except re.error as error:
            needed = f"a regular expression ({error})"
            raise must_be(needed, name, value, "'kernel|bias'") from error


def check_sub_batches(config: Config, num_sub_batches: int, num_workers: int) -> None:
    """Raises ConfigError if a step of synchronous ps cannot sum `num_sub_batches` gradients.

    With backup workers a step may sum sub-batches of different batches, so all must have one size.
    Without, no sub-batch may be empty.
    """
    lanes = num_lanes(config)
    has_backups = num_sub_batches < num_workers
    if config.virtual_replicas:
        check_virtual_replicas(config, num_sub_batches)
    if lanes < num_sub_batches or (has_backups and lanes % num_sub_batches):
        raise ConfigError(
            f"--replicas_to_aggregate={num_sub_batches} of {num_workers} workers needs a number of "
            f"lanes that {num_sub_batches} divides. Received: {lanes} lanes for batch_size="
            f"{config.batch_size}. Choose a --batch_size that {num_sub_batches} divides, and set "
            f"--config.data.lanes to a divisor of it that {num_sub_batches} divides."
        )


def check_replicas(config: Config, num_replicas: int) -> None:
    """Raises ConfigError if a replica gets no examples; warns if their numbers differ."""
    for name in ("batch_size", "eval_batch_size"):
        size = getattr(config, name) or config.batch_size
        if size < num_replicas:
            raise ConfigError(
                f"{name}={size} is smaller than the {num_replicas} replicas that share a batch. "
                f"Use --config.{name}={num_replicas} or more, or fewer replicas."
            )
    lanes = num_lanes(config)
    if lanes < num_replicas:
        raise ConfigError(
            f"{num_replicas} replicas need at least as many lanes, but there are {lanes}. Set "
            f"--config.data.lanes to a divisor of batch_size={config.batch_size} from "
            f"{num_replicas} up: {config.batch_size}, for example."
        )
    smallest = lanes // num_replicas * (config.batch_size // lanes)
    if config.virtual_replicas:
        check_virtual_replicas(config, num_replicas)
        smallest = config.batch_size // config.virtual_replicas
    if config.micro_batches > smallest:
        raise ConfigError(
            f"config.micro_batches={config.micro_batches} cuts a replica's share into more parts "
            f"than the {smallest} examples it may have: batch_size={config.batch_size} on "
            f"{num_replicas} replica(s). Type --config.micro_batches={smallest}, or less."
        )
    if lanes % num_replicas and (chosen := config.local_steps.chosen):
        raise ConfigError(
            f"{chosen} needs replicas with equal shares of a batch. "
            f"Received: {num_replicas} replicas, and {lanes} lanes for batch_size="
            f"{config.batch_size}. Choose a --batch_size that {num_replicas} divides, and set "
            f"--config.data.lanes to a divisor of it that {num_replicas} divides."
        )
    if lanes % num_replicas:
        message = "batch_size=%d is shared unevenly by %d replicas; a multiple of them is faster."
        log.warning(message, config.batch_size, num_replicas)


def check_virtual_replicas(config: Config, num_replicas: int) -> None:
    """Raises ConfigError if `num_replicas` cannot have equal parts of a batch."""
    parts = config.virtual_replicas
    if num_replicas > parts or parts % num_replicas:
        possible = min(parts, 1 << (num_replicas.bit_length() - 1))
        raise ConfigError(
            f"config.virtual_replicas={parts} needs a number of replicas that is a power of two up "
            f"to {parts}. Received: {num_replicas} replicas. Train with {possible}, for example."
        )
    sizes = {
        "batch_size": config.batch_size,
        "eval_batch_size": config.eval_batch_size or config.batch_size,
        "data.lanes": num_lanes(config),
    }
    for name, size in sizes.items():
        if size % parts:
            raise ConfigError(
                f"config.virtual_replicas={parts} must divide config.{name}, so that all parts of "
                f"a batch are equal. Received: {size}. Type --config.{name}="
                f"{-(-size // parts) * parts}, for example."
            )
