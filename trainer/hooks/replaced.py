"""StopIfReplaced: ends a chief if another process trains in its MODEL_DIR.

hooks = [StopIfReplaced(model_dir, is_elastic=False), ...]       # in each chief
"""

import time
from dataclasses import dataclass

from typing_extensions import override

from data.system.files import is_url
from strategies.base import PeerLostError
from strategies.metrics import Metrics
from trainer.guards.owner import ReplacedError, described, is_replaced
from trainer.hooks.base import Hook

_EVERY_SECS = 1.0
_EVERY_SECS_OF_URL = 10.0  # A request takes some of the time of training.


@dataclass(eq=False)
class StopIfReplaced(Hook):
    """Raises an error if another process has begun to train in `model_dir`.

    It is the first hook, so nothing is reported or saved after that. This matters if a chief was
    frozen or cut off, and another one was started in its place.

    With `is_elastic` hosts that this group did not have have taken over. The error is a
    PeerLostError then: this host may join them, and saves the last complete step before.
    """

    model_dir: str
    is_elastic: bool = False
    _checked: float = 0.0

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        every = _EVERY_SECS_OF_URL if is_url(self.model_dir) else _EVERY_SECS
        if time.monotonic() - self._checked < every:
            return
        self._checked = time.monotonic()
        if not is_replaced(self.model_dir):
            return
        other = described(self.model_dir)
        if self.is_elastic:
            raise PeerLostError("Other hosts have taken over", RuntimeError(f"{other} trains now"))
        raise ReplacedError(
            f"{other} trains in {self.model_dir} now, so this process ends. If both shall train, "
            "give them different values of --model_dir."
        )
