"""tests/cluster/configs/counting.py with a journal: its one weight counts what was applied."""

from tests.chaos.journal import build_hooks as build_hooks
from tests.chaos.journal import often
from tests.cluster.configs import counting
from tests.cluster.configs.counting import build_model as build_model
from tests.cluster.configs.counting import loss as loss
from tests.cluster.configs.counting import metrics as metrics


def get_config() -> counting.CountingConfig:
    config = counting.get_config()
    often(config)
    return config
