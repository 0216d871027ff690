"""`--keep_serving`: a worker or ps task that takes one job after another.

    exit_code = keep_serving(cluster.task, command)

The server is a process of its own. The chief ends it when its job is done, as it ends any other,
and here it is started anew: nothing of a job is left in the memory of the next one.
"""

import signal
import sys
import time
from collections.abc import Sequence

from strategies.cluster import Task
from trainer.exits import EXIT_BUG, EXIT_USAGE
from trainer.lifeline import Lifeline

# Between two starts of a server that fails.
_PAUSE_SECS = 1.0


def keep_serving(task: Task, command: Sequence[str]) -> int:
    """Runs `command`, a server of `task`, again and again, until a signal ends this process.

    Returns the exit code of a server that would only fail again: bad usage, or a bug.
    """
    while True:
        with Lifeline() as lifeline:
            code = lifeline.start(command).wait()
        if code in (EXIT_USAGE, EXIT_BUG):
            return code
        if code:
            why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            time.sleep(_PAUSE_SECS)
        else:
            why = "done with a job"
        print(f"{task}: {why}; serving the next", file=sys.stderr, flush=True)
