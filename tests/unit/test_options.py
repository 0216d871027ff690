"""Options of a step: every field is checked, and none means nothing."""

from typing import Any

import pytest

from trainer.config import Config, ConfigError
from trainer.config_checks import check, check_replicas


def changed(changes: dict[str, Any]) -> Config:
    config = Config()
    for name, value in changes.items():
        *groups, last = name.split(".")
        target: Any = config
        for group in groups:
            target = getattr(target, group)
        setattr(target, last, value)
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule.kind": "cosine", "schedule.end_fraction": 1.0, "schedule.warmup_steps": 3},
        {"schedule.kind": "step", "schedule.boundaries": (3, 5), "schedule.decay_rate": 0.5},
        {"schedule.kind": "exponential", "schedule.decay_steps": 3},
        {"schedule.base_batch_size": 256},
        {"clip.norm": 1.0},
        {"penalty.l1": 1e-4, "penalty.l2": 1e-4, "penalty.variables": "kernel$"},
        {"weight_decay.rate": 0.1, "weight_decay.exclude": "bias|gamma"},
        {"ema.decay": 0.99, "ema.warmup": True},
        {"micro_batches": 64},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_valid_options_are_accepted(changes: dict[str, Any]) -> None:
    check(changed(changes))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schedule.kind": "linear"}, "be constant, cosine, .*Type --config.schedule.kind=cosine"),
    ({"schedule.kind": "exponential"}, "schedule.decay_steps=1000"),
    ({"schedule.kind": "step"}, r"boundaries='\(32000, 48000\)'"),
    ({"schedule.kind": "step", "schedule.boundaries": (5, 3)}, r"that rise.*\(5, 3\)"),
    ({"schedule.kind": "step", "schedule.boundaries": (2.5,)}, "whole numbers"),
    ({"schedule.kind": "step", "schedule.boundaries": (0,)}, "above 0"),
    ({"schedule.kind": "cosine", "schedule.boundaries": (3,)}, "nothing to kind=cosine.*kind=step"),
    ({"schedule.decay_rate": 0.5}, "means nothing to kind=constant"),
    ({"schedule.warmup_steps": -1}, "schedule.warmup_steps must be at least 0"),
    ({"schedule.warmup_start": 2.0}, "warmup_start must be from 0 to 1.*2.0"),
    ({"schedule.kind": "cosine", "schedule.end_fraction": -0.1}, "end_fraction"),
    ({"schedule.kind": "polynomial", "schedule.power": 0.0}, "must be a finite number above 0"),
    ({"clip.norm": 1.0, "clip.value": 1.0}, "one of value, norm and global_norm"),
    ({"clip.global_norm": float("nan")}, "clip.global_norm must be 0 or more.*nan"),
    ({"penalty.l1": -1.0}, "penalty.l1 must be 0 or more"),
    ({"penalty.l2": float("inf")}, "penalty.l2 must be 0 or more"),
    ({"penalty.l2": 1.0, "penalty.variables": "("}, "regular expression"),
    ({"weight_decay.rate": -0.1}, "weight_decay.rate must be 0 or more"),
    ({"weight_decay.exclude": "["}, "weight_decay.exclude.*regular expression"),
    ({"ema.decay": 1.0}, "ema.decay must be at least 0 and below 1"),
    ({"ema.warmup": True}, "ema.warmup.*ema.decay"),
    ({"micro_batches": 0}, "micro_batches must be at least 1"),
    ({"ema.decay": "0.9"}, "config.ema.decay must be of type float"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_invalid_option_is_refused_with_what_to_type(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        check(changed(changes))


@pytest.mark.parametrize(("num_replicas", "most"), [(1, 64), (2, 32), (3, 21)])
def test_every_micro_batch_has_an_example(num_replicas: int, most: int) -> None:
    check_replicas(Config(batch_size=64, micro_batches=most), num_replicas)
    with pytest.raises(ConfigError, match=f"micro_batches={most + 1}.*Type .*micro_batches={most}"):
        check_replicas(Config(batch_size=64, micro_batches=most + 1), num_replicas)
