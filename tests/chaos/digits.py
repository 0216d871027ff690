"""tests/cluster/configs/slow.py with a journal: for strategies whose end is a function of it."""

from tests.chaos.journal import build_hooks as build_hooks
from tests.chaos.journal import often
from tests.cluster.configs import slow
from tests.cluster.configs.slow import build_model as build_model


def get_config() -> slow.SlowConfig:
    config = slow.get_config()
    often(config)
    return config
