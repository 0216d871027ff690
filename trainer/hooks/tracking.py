"""The trackers of a run: those that its config names, and the writers of its config file.

    writers = build_trackers(recipe, "runs/a", document, is_complete=lambda: True)

Each is called on another thread, and its errors are only warnings: a tracker's server may not
answer for minutes, and its client may raise any error. Neither may stop or slow down training. At
the end of a run the last reports are waited for, but not for long.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from typing_extensions import override

from data.system.extras import of_satellite
from data.system.files import join, read_text, replace_file
from trainer.config import Recipe
from trainer.exit_codes import first_line
from trainer.hooks.base import built_by_user
from trainer.hooks.tracker_names import TRACKERS, names_of
from trainer.hooks.writers import Values, Writer
from trainer.run_files import Document
from trainer.step.options import ConfigError

log = logging.getLogger(__name__)

PROJECT = "tf-distribution-trainer"
_IDS = "trackers.json"  # The ids with which a resumed run continues in its trackers.
_MOST_WAITING = 10_000  # Reports; the oldest are dropped.
_END_SECS = 30.0


class Tracker(Writer):
    """A writer that continues its run in a tracker when the run is resumed."""

    def __init__(self, model_dir: str, document: Document, is_complete: Callable[[], bool]) -> None:
        """The arguments are those of build_trackers."""
        self._model_dir, self._document, self._is_complete = model_dir, document, is_complete


def remembered(model_dir: str) -> dict[str, str]:
    """The ids by the name of the tracker; without those that cannot be read."""
    try:
        ids = json.loads(read_text(join(model_dir, _IDS)))
        return {str(name): str(value) for name, value in ids.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def remember(model_dir: str, tracker: str, run_id: str) -> None:
    """Writes the id of the run in `tracker`. Raises OSError if that fails."""
    ids = {**remembered(model_dir), tracker: run_id}
    replace_file(join(model_dir, _IDS), f"{json.dumps(ids, indent=2)}\n".encode())


def numbers(split: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a report as `train/loss`, and `train/worker_share/worker 0`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(f"{split}/{name}", value)
        elif isinstance(value, (int, float)):
            yield f"{split}/{name}", float(value)


def build_trackers(
    recipe: Recipe, model_dir: str, document: Document, *, is_complete: Callable[[], bool]
) -> list[Writer]:
    """The trackers of the config, and the writers of `build_writers`, each in the background.

    `document` is the contents of config.json. `is_complete` is asked at the end: True if training
    is complete.

    Raises ConfigError if build_writers fails, or does not return writers.
    """
    writers: list[Writer] = []
    for name in names_of(recipe.config.trackers):
        tracker = of_satellite(f"trainer.hooks.trackers.{name}", TRACKERS[name])
        writers.append(Background(tracker(model_dir, document, is_complete), name))
    if recipe.build_writers is None:
        return writers
    what = f"build_writers(config, model_dir) of {recipe.path}"
    for writer in built_by_user(what, recipe.build_writers, recipe.config, model_dir):
        if not isinstance(writer, Writer):
            raise ConfigError(
                f"{what} must return a list of trainer.Writer, but one is {writer!r}. Derive its "
                "class from trainer.Writer, and define write(self, step, split, values)."
            )
        writers.append(Background(writer, type(writer).__name__))
    return writers


class Background(Writer):
    """Calls `writer` in the order of the calls. `name` is for messages.

    The thread ends when nothing is left to do: a run that fails leaves no thread behind.
    """

    def __init__(self, writer: Writer, name: str, end_secs: float = _END_SECS) -> None:
        self._writer = writer
        self._name = name
        self._end_secs = end_secs
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_working = False
        self._num_lost = 0

    @override
    def begin(self, step: int) -> None:
        self._call(partial(self._writer.begin, step))

    @override
    def write(self, step: int, split: str, values: Values) -> None:
        self._call(partial(self._writer.write, step, split, dict(values)))

    @override
    def end(self, step: int) -> None:
        self._call(partial(self._writer.end, step))
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._is_working, self._end_secs)
            self._num_lost += len(self._calls)
            self._calls.clear()
        if not is_done:
            log.warning(
                "%s has not answered for %g s: the run ends without it.", self._name, self._end_secs
            )
        if self._num_lost:
            log.warning("%s lacks %d report(s).", self._name, self._num_lost)

    def _call(self, call: Callable[[], None]) -> None:
        with self._changed:
            if len(self._calls) >= _MOST_WAITING:
                self._calls.popleft()
                self._num_lost += 1
            self._calls.append(call)
            if self._is_working:
                return
            self._is_working = True
        threading.Thread(target=self._work, name=f"tracker {self._name}", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._calls:
                    self._is_working = False
                    self._changed.notify_all()
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception as error:  # Each tracker raises other errors.
                if not self._num_lost:
                    log.warning(
                        "%s failed: %s: %s. Training continues; the next report is tried.",
                        self._name,
                        type(error).__name__,
                        first_line(error).rstrip("."),
                    )
                self._num_lost += 1
