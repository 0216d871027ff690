"""The names of the trackers in a config, checked when the command line is read.

    check_trackers(config.trackers)                     # "mlflow,wandb"
    reached_over_network(config.trackers)

TensorFlow is not imported.
"""

import importlib.util
import os

from data.system.extras import missing
from trainer.step.options import ConfigError

TRACKERS = {"mlflow": "MLflow", "wandb": "WandB"}  # The classes in trainer/hooks/trackers/NAME.py.
_LOCAL_URIS = ("file:", "sqlite:", "/", ".")


def names_of(trackers: str) -> list[str]:
    """The names in `config.trackers`, which are joined by commas."""
    return [name.strip() for name in trackers.split(",") if name.strip()]


def check_trackers(trackers: str) -> None:
    """Raises ConfigError for a name that is not known, or a package that is not installed."""
    for name in names_of(trackers):
        if name not in TRACKERS:
            raise ConfigError(
                f"config.trackers={trackers!r}: there is no tracker {name!r}. Known: "
                f"{', '.join(TRACKERS)}. Others are written with build_writers in the config file."
            )
        if importlib.util.find_spec(name) is None:
            raise ConfigError(missing(f"config.trackers={trackers!r}", name, name))


def reached_over_network(trackers: str) -> str:
    """The first tracker that needs the network, for messages; "" if there is none."""
    for name in names_of(trackers):
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        is_offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
        is_local = (not uri or uri.startswith(_LOCAL_URIS)) if name == "mlflow" else is_offline
        if not is_local:
            return f"The tracker {name}"
    return ""
