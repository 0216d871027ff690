"""tests/cluster/configs/straggler.py without the delay, and with a journal."""

from tests.chaos.journal import build_hooks as build_hooks
from tests.chaos.journal import often
from tests.cluster.configs import straggler
from tests.cluster.configs.straggler import build_model as build_model
from tests.cluster.configs.straggler import loss as loss
from tests.cluster.configs.straggler import metrics as metrics
from tests.cluster.configs.straggler import parse as parse


def get_config() -> straggler.StragglerConfig:
    config = straggler.get_config()
    config.delay_ms = 0
    often(config)
    return config
