"""Work that is divided among forked processes.

squares = in_processes(lambda part, count_one: [x * x for x in part], [range(5), range(5, 9)])
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from data.system.linux import signal_when_parent_ends

T = TypeVar("T")

_REPORT_RECORDS = 256


def in_processes(
    work: Callable[[range, Callable[[], None]], list[T]],
    parts: Sequence[range],
    report: Callable[[int], None] = lambda count: None,
    name: str = "A writer of examples",
) -> list[T]:
    """Calls `work` for each part in a forked process; returns all results in order.

    `work` calls its second argument for each record, and `report` is called in this process with
    the sum. The processes end with this function. If this process dies, Linux ends them at once;
    on macOS they end at a later call of `count_one`. A process that has imported TensorFlow must
    not fork. `name`: what the processes belong to, for messages.

    Raises:
        OSError: a process died. An error of `work` is raised here, too.
    """
    context = multiprocessing.get_context("fork")
    # Each process writes its own element, so no lock is needed that a killed process could hold.
    done = context.RawArray("q", len(parts))
    parent = os.getpid()

    def run(number: int, answer: multiprocessing.connection.Connection) -> None:
        def count_one() -> None:
            done[number] += 1
            if done[number] % _REPORT_RECORDS == 0 and os.getppid() != parent:
                os._exit(1)

        if sys.platform == "linux":
            signal_when_parent_ends(signal.SIGKILL)
            if os.getppid() != parent:  # It ended before the call.
                os._exit(1)
        # Ctrl-C goes to all processes of a terminal; the parent ends the others.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            answer.send(work(parts[number], count_one))
        except Exception as error:
            answer.send(error)

    answers: dict[int, list[T]] = {}
    processes = []
    waiting = {}
    try:
        for number in range(len(parts)):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run, args=(number, theirs))
            process.start()
            processes.append(process)
            theirs.close()
            waiting[ours] = number
        while waiting:
            for answer in multiprocessing.connection.wait(list(waiting), timeout=1.0):
                assert isinstance(answer, multiprocessing.connection.Connection)
                try:
                    received = answer.recv()
                except EOFError:
                    process = processes[waiting[answer]]
                    process.join()
                    is_killed = process.exitcode == -signal.SIGKILL
                    raise OSError(
                        f"{name}: its process ended with exit code {process.exitcode}"
                        f"{' (SIGKILL): perhaps the memory is too small' if is_killed else ''}"
                    ) from None
                if isinstance(received, Exception):
                    raise received
                answers[waiting.pop(answer)] = received
            report(sum(done))
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return [result for number in range(len(parts)) for result in answers[number]]
