"""StopIfReplaced: ends the chief of an elastic cluster if another group of hosts took over."""

import contextlib
from dataclasses import dataclass

from typing_extensions import override

from strategies.lost_peers import PeerLostError
from strategies.metrics import Metrics
from trainer.hooks.base import Hook
from trainer.run_files import newest_generation


@dataclass(eq=False)
class StopIfReplaced(Hook):
    """Raises PeerLostError if another group of hosts has replaced the group of this task.

    It is the first hook, so nothing is reported or saved afterwards, except the last complete step.
    A group is replaced while all its hosts are frozen, for example, by a group of other hosts.
    """

    model_dir: str
    generation: int

    @override
    def begin(self, step: int) -> None:
        newest = 0
        with contextlib.suppress(OSError):  # What cannot be read cannot be written either.
            newest = newest_generation(self.model_dir)
        if newest > self.generation:
            reason = f"group {newest} trains in {self.model_dir}, not group {self.generation}"
            raise PeerLostError("Other hosts have taken over", RuntimeError(reason))

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        self.begin(step)
