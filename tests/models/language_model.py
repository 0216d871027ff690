"""A language model with the loss, the metrics and the layers of configs/text_lm.py."""

from typing import Any

from configs.text_lm import TextConfig, build_model, loss, metrics
from tests.models.examples import BATCH, parsed
from trainer.config import Config

__all__ = ["build_model", "get_config", "loss", "metrics", "parse"]


def get_config() -> Config:
    return TextConfig(
        width=16,
        blocks=1,
        optimizer="sgd",
        learning_rate=0.05,
        batch_size=BATCH,
        train_steps=30,
        log_every_steps=10,
    )


def parse(serialized: Any) -> Any:
    tokens = parsed(serialized)["tokens"]
    return tokens[:, :-1], tokens[:, 1:]
