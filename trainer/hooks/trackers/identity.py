"""The ids of a run in its trackers, in MODEL_DIR/trackers.json: a resumed run continues them.

remember("runs/a", "mlflow", "4f0c...")
remembered("runs/a")["mlflow"]
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from data.system.files import exists, join, read_text, replace_file

_FILE = "trackers.json"


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
