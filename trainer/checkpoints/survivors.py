"""After the death of another task: saves the last complete step once.

    write = functools.partial(write_once, cluster=cluster)
    save_last_complete_step(executor, learner, checkpointer, write)       # then end

An error of one worker leaves the others in a sum that never ends. So workers do not communicate:
the first that creates the lock file of a step writes its checkpoint, and the others wait until it
is complete. If the writer dies, the next worker that sees it creates another lock file. No worker
writes a step that is not later than the newest complete checkpoint. The next start of the run
removes all lock files. docs/failures.md says why the checkpoint of the furthest worker is enough.
"""

import logging
import time

from data.system import files
from strategies.cluster.peers import UnknownHostError, identify
from strategies.cluster.tf_config import Cluster, Task
from strategies.position import Reached
from trainer.checkpoints.checkpointer import Checkpointer
from trainer.checkpoints.last_step import is_saved, write_if_newer

log = logging.getLogger(__name__)

_POLL_SECS = 0.2
# How long the chief may take to lock a step, before another worker does: it has written all
# checkpoints so far, and may still be writing this one.
_CHIEF_SECS = 5.0
# How long to wait for the checkpoint of another worker. If it is not complete then, the storage is
# slow: a second writer would not be faster.
_WAIT_SECS = 120.0


def write_once(reached: Reached, checkpointer: Checkpointer, cluster: Cluster) -> None:
    """As `write_if_newer`, but one of the tasks that call it writes, and the others wait for it."""
    step = reached.step
    deadline = time.monotonic() + _WAIT_SECS
    head_start = 0.0 if cluster.is_chief else time.monotonic() + _CHIEF_SECS
    number = 0  # Of the lock file: each writer that died has left one.
    while time.monotonic() < deadline:
        if is_saved(reached, checkpointer):
            return
        if time.monotonic() < head_start and not _is_dead(cluster.chief, cluster):
            time.sleep(_POLL_SECS)
            continue
        lock = f"{checkpointer.staging}/step-{step:08d}.{number}"
        files.make_dirs(checkpointer.staging)
        if files.create_new(lock, f"{cluster.task.job} {cluster.task.index}".encode()):
            try:
                write_if_newer(reached, checkpointer)
            finally:
                files.remove_file(lock)
            return
        if _is_dead(_owner(lock), cluster):
            number += 1
        else:
            time.sleep(_POLL_SECS)
    log.warning("Another worker has not saved step %s in %.0f s.", f"{step:,}", _WAIT_SECS)


def _owner(lock: str) -> Task | None:
    """Returns the task that has written the lock file; None if there is no such file now."""
    try:
        job, index = files.read_text(lock).split()
    except (FileNotFoundError, ValueError):
        return None
    return Task(job, int(index))


def _is_dead(task: Task | None, cluster: Cluster) -> bool:
    if task is None:
        return False
    try:
        return identify(cluster.address_of(task)) is None
    except UnknownHostError:
        return True
