"""`--keep_serving`: a worker or ps task that serves one chief after another.

    exit_code = keep_serving(cluster.task, command)

The server runs in a child process, so no memory of one training is left in the next. Its chief ends
it when the training is done; if that chief was killed, the next one does.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from strategies.cluster.tf_config import Task
from trainer.exit_codes import EXIT_BUG, EXIT_RESTART, EXIT_USAGE
from trainer.guards.parent_watch import ParentWatch
from trainer.guards.signals import SignalThread, stop_signals
from trainer.local.task_logs import say

_PAUSE_SECS = 1.0  # Before the next start, because a server may fail at once.


def keep_serving(task: Task, command: Sequence[str]) -> int:
    """Runs `command`, a server of `task`, repeatedly, until a signal ends this process.

    Returns 75 after a signal, or the exit code after bad usage or a bug, which would happen again.
    The first signal goes to the server, which has its chief save and end. A second signal, or any
    while no server runs, ends this process and its server at once.
    """
    signals: list[int] = []
    server: subprocess.Popen[bytes] | None = None

    def on_signal(signum: int) -> None:
        signals.append(signum)
        running = server  # Read once, because the main thread changes it.
        if running is None or len(signals) > 1:
            # The server ends, too: it watches this process.
            name = signal.Signals(signum).name
            with contextlib.suppress(OSError):  # Nobody may read it.
                os.write(2, f"{name}: {task} and its server end at once.\n".encode())
            os._exit(EXIT_RESTART)
        running.send_signal(signum)

    with SignalThread(stop_signals(), on_signal):
        while True:
            with ParentWatch() as parent_watch:
                server = parent_watch.start(command)
                code = server.wait()
                server = None
            if signals:
                return EXIT_RESTART
            if code in (EXIT_USAGE, EXIT_BUG):
                return code
            time.sleep(_PAUSE_SECS)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            what = f"the server died: {how}" if code else "the chief is done"
            say(f"{task}: {what}; starting a server for the next chief")
