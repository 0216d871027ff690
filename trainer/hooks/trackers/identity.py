"""The base class of trackers, and trackers.json: the ids with which a resumed run continues."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from data.system.files import exists, join, read_text, replace_file
from trainer.hooks.writers import Writer

PROJECT = "tf-distribution-trainer"
_FILE = "trackers.json"


class Tracker(Writer):
    """A writer that continues its run in a tracker when the run is resumed."""

    def __init__(
        self, model_dir: str, document: Mapping[str, Any], is_complete: Callable[[], bool]
    ) -> None:
        """`document` is the contents of config.json. `is_complete`: see build_trackers."""
        self._model_dir, self._document, self._is_complete = model_dir, document, is_complete


def remembered(model_dir: str) -> dict[str, str]:
    """The ids by the name of the tracker; without those that cannot be read."""
    path = join(model_dir, _FILE)
    if not exists(path):
        return {}
    try:
        return {str(name): str(value) for name, value in json.loads(read_text(path)).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def remember(model_dir: str, tracker: str, run_id: str) -> None:
    """Writes the id of the run in `tracker`. Raises OSError if that fails."""
    ids = {**remembered(model_dir), tracker: run_id}
    replace_file(join(model_dir, _FILE), f"{json.dumps(ids, indent=2)}\n".encode())


def numbers(split: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a report as `train/loss`, and `train/worker_share/worker 0`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(f"{split}/{name}", value)
        elif isinstance(value, (int, float)):
            yield f"{split}/{name}", float(value)
