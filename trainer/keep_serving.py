"""`--keep_serving`: a worker or ps task that takes one job after another.

    exit_code = keep_serving(cluster.task, command)

The server is a process of its own. The chief ends it when its job is done, as it ends any other,
and here it is started anew: nothing of a job that has ended is left in the memory of the next one.
(A chief that was killed leaves its server to the next chief, which ends it in its turn.)
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from strategies.cluster import Task
from trainer.exits import EXIT_BUG, EXIT_RESTART, EXIT_USAGE
from trainer.lifeline import Lifeline

# Between two starts of a server, which may fail at once.
_PAUSE_SECS = 1.0


def keep_serving(task: Task, command: Sequence[str]) -> int:
    """Runs `command`, a server of `task`, again and again, until a signal ends this process.

    Returns 75 then; or the exit code of a server that would only fail again: bad usage, or a bug.
    The first signal is passed on: the server lets its chief save first. The second ends at once.
    """
    signals: list[int] = []
    server: subprocess.Popen[bytes] | None = None

    def on_signal(signum: int, frame: object) -> None:
        signals.append(signum)
        if server is None or len(signals) > 1:
            # The end of the lifeline ends the server, too.
            name = signal.Signals(signum).name
            os.write(2, f"{name}: ending, and the server with me.\n".encode())
            os._exit(EXIT_RESTART)
        server.send_signal(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, on_signal)
    while True:
        with Lifeline() as lifeline:
            server = lifeline.start(command)
            code = server.wait()
            server = None
        if signals:
            return EXIT_RESTART
        if code in (EXIT_USAGE, EXIT_BUG):
            return code
        time.sleep(_PAUSE_SECS)
        if code:
            why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        else:
            why = "done with a job"
        print(f"{task}: {why}; serving the next", file=sys.stderr, flush=True)
