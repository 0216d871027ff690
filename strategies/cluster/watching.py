"""Watches the other tasks during training, over connections of its own.

watch_peers(cluster, 150, on_silent)            # returns immediately
"""

import concurrent.futures
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from strategies.cluster.peers import (
    UnknownHostError,
    accepts_connections,
    host_of,
    identify,
    is_reachable,
)
from strategies.cluster.tf_config import Cluster, Task

log = logging.getLogger(__name__)

# The longest interval between two checks of a task.
_WATCH_SECS = 10.0
# How often in succession a worker must see that it alone does not reach a ps.
_PROOFS = 4
# Tasks of other hosts that are asked before this host counts as cut off: each takes a second.
_ASKED = 4


def watch_chief(cluster: Cluster, timeout_secs: float, on_gone: Callable[[str], None]) -> None:
    """Calls `on_gone` with a message if the chief accepts no connection for `timeout_secs`.

    Returns immediately; the calls come on another thread. The time counts from now: `timeout_secs`
    is also how long the chief may take to start. A warning is logged after a quarter of it, at most
    _WATCH_SECS, if the chief was there before.
    """
    chief, address = cluster.chief, cluster.address_of(cluster.chief)
    warn_secs = min(_WATCH_SECS, timeout_secs / 4)

    def watch() -> None:
        last_seen = time.monotonic()
        was_seen = has_warned = False
        while True:
            with contextlib.suppress(UnknownHostError):
                if accepts_connections(address):
                    last_seen, was_seen, has_warned = time.monotonic(), True, False
            away_secs = time.monotonic() - last_seen
            if was_seen and not has_warned and away_secs > warn_secs:
                has_warned = True
                message = "%s (%s) has not answered for %.0f s. This task ends at %.0f s."
                log.warning(message, chief, address, away_secs, timeout_secs)
            if away_secs > timeout_secs:
                on_gone(f"{chief} ({address}) has not answered for {away_secs:.0f} s")
                return
            time.sleep(min(_WATCH_SECS, timeout_secs / 10))

    threading.Thread(target=watch, name="watch chief", daemon=True).start()


def watch_peers(
    cluster: Cluster,
    timeout_secs: float,
    on_silent: Callable[[Task], None],
    is_over: threading.Event | None = None,
) -> None:
    """Calls `on_silent` when another training task has not answered for `timeout_secs`.

    The process of such a task is stopped, or its host is disconnected; TensorFlow itself would wait
    for it without limit. Returns immediately; the calls come on another thread, one at each check
    until the task answers. A warning is logged at half of `timeout_secs`, and at the second check
    that finds no open port. Ends when `is_over` is set.
    """
    poll_secs = min(_WATCH_SECS, timeout_secs / 10)
    over = is_over or threading.Event()

    def watch(task: Task) -> None:
        address = cluster.address_of(task)
        last_seen = time.monotonic()
        num_warnings = num_refusals = 0
        while not over.wait(poll_secs):
            with contextlib.suppress(UnknownHostError):
                answer = identify(address)
                if answer not in ("silent", None):
                    last_seen = time.monotonic()
                num_refusals = num_refusals + 1 if answer is None else 0
                if num_refusals == 2:
                    message = "its process has ended, or its host cannot be reached."
                    log.warning("%s (%s) accepts no connection: %s", task, address, message)
            silent_secs = time.monotonic() - last_seen
            num_half_timeouts = min(2, int(2 * silent_secs / timeout_secs))
            if num_half_timeouts > num_warnings:
                when = f"at {timeout_secs:.0f} s " if num_half_timeouts == 1 else ""
                message = "%s (%s) has not answered for %.0f s: %sit is considered lost."
                log.warning(message, task, address, silent_secs, when)
            elif num_half_timeouts < num_warnings:
                log.warning("%s answers again.", task)
            num_warnings = num_half_timeouts
            if silent_secs >= timeout_secs and not over.is_set():
                on_silent(task)

    for task in cluster.other_trainers:
        threading.Thread(target=watch, args=[task], name=f"watch {task}", daemon=True).start()


def silence_of(cluster: Cluster, silent: Sequence[Task]) -> str:
    """Says that the tasks `silent` do not answer; or that no other host answers, if none does.

    In the second case this host is more likely cut off from the network than all others.
    """
    own, *hosts = (host_of(cluster.address_of(t)) for t in (cluster.task, *cluster.other_trainers))
    others = {host: t for host, t in zip(hosts, cluster.other_trainers, strict=True) if host != own}
    asked = [cluster.address_of(task) for task in others.values()][:_ASKED]
    with concurrent.futures.ThreadPoolExecutor(_ASKED) as pool:  # Each may take a second.
        is_alone = len(asked) > 1 and not any(pool.map(is_reachable, asked))
    if is_alone:
        return (
            f"no other host answers: {own} is probably cut off from the network, or all others "
            "have ended"
        )
    return f"{' and '.join(map(str, silent))} {'do' if len(silent) > 1 else 'does'} not answer"


def watch_servers(cluster: Cluster, timeout_secs: float, on_silent: Callable[[Task], None]) -> None:
    """In a worker under ps: calls `on_silent` with a ps that only this worker cannot reach.

    Such a ps has answered before, but not for `timeout_secs`, and at each of the last checks the
    chief has answered. (A single check may come in the moment when the network of this worker
    returns.) Returns at once; the call comes on another thread. The chief cannot detect this,
    because it reaches both.
    """
    poll_secs = min(_WATCH_SECS, timeout_secs / 10)

    def watch(ps: Task) -> None:
        last_seen = math.inf  # It has not answered yet.
        num_proofs = 0
        while num_proofs < _PROOFS or time.monotonic() - last_seen <= timeout_secs:
            time.sleep(poll_secs)
            try:
                if identify(cluster.address_of(ps)) not in ("silent", None):
                    last_seen, num_proofs = time.monotonic(), 0
                # If the ps is lost for all, the chief ends.
                elif identify(cluster.address_of(cluster.chief)) == cluster.chief:
                    num_proofs += 1
                else:
                    num_proofs = 0
            except UnknownHostError:  # It says nothing about its host.
                num_proofs = 0
        on_silent(ps)

    for index in cluster.jobs["ps"]:
        ps = Task("ps", index)
        threading.Thread(target=watch, args=[ps], name=f"watch {ps}", daemon=True).start()
