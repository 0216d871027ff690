"""Meets the other tasks at their addresses, measures the way to each, and exchanges reports.

    with Exchange(cluster) as exchange:
        exchange.meet(until)            # returns when all have come, or at this time
        meetings = exchange.measure(until)
        exchange.send({"task": "worker 0", "meetings": meetings})
        reports = exchange.wait_for_reports(until)

Each task listens at its own address of the cluster, as it would in training, and connects to all
others. A request and its answer are lines of JSON. This is not done with TensorFlow: its servers
cannot say that a task cannot be reached, or why. Reports are pushed, not fetched, so a task that no
other task can reach still says what it knows.
"""

import contextlib
import errno
import json
import math
import socket
import statistics
import threading
import time
from collections.abc import Mapping
from typing import Any, Self, TypeAlias

from strategies.cluster.peers import host_of, port_of
from strategies.cluster.ports import bind
from strategies.cluster.tf_config import Cluster, Task

# JSON objects.
Json: TypeAlias = dict[str, Any]

_POLL_SECS = 0.3
_CONNECT_SECS = 2.0
_ANSWER_SECS = 5.0
_NUM_PINGS, _ROUNDS = 10, 3
_LARGE_BYTES = 32 << 10  # More than a packet of any link.
_MAX_LINE_BYTES = 4 << 20
# The first bytes of a bulk transfer are not measured: they may pass a rate limit as a burst, and
# TCP begins slowly. If they take _LONG_SKIP_SECS, they are measured, and no others. A measurement
# takes _BULK_SECS: in a much shorter time a busy receiver would only measure how fast it empties
# its own buffer.
_BULK_BYTES, _SKIPPED_BYTES = 16 << 20, 1 << 20
_BULK_SECS, _LONG_SKIP_SECS = 0.4, 1.5
_CHUNK = bytes(1 << 18)


class Exchange:
    """This task's listener, and its connections to all other tasks of the cluster."""

    def __init__(self, cluster: Cluster, mark: str = "") -> None:
        """`mark` is the path of a file that the other tasks look for, or empty."""
        self._cluster = cluster
        self._mark = mark
        self._others = [task for task in cluster.tasks() if task != cluster.task]
        self._states: dict[Task, Json] = {task: {"state": "unknown"} for task in self._others}
        self._reports: dict[str, Json] = {}
        self._visitors: set[str] = set()  # Tasks that have reached this one.
        self._changed = threading.Condition()
        self._bulk = threading.Lock()  # One transfer at a time: each has the whole link.
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        self._listener = bind(port_of(self._cluster.address))
        self._listener.listen(128)
        self._start(self._accept)
        for task in self._others:
            self._start(self._greet, task)
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _start(self, target: Any, *arguments: object) -> None:  # Any: threads take any function.
        threading.Thread(target=target, args=arguments, name="doctor", daemon=True).start()

    def meet(self, until: float) -> None:
        """Waits until all other tasks have answered, or until the time (time.monotonic) `until`."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(state["state"] == "met" for state in self._states.values()),
                max(0.0, until - time.monotonic()),
            )

    def mark_of(self, task: Task) -> str:
        """Returns the path of the file that `task` has written for the others; empty if unknown."""
        return str(self._states.get(task, {}).get("mark", ""))

    def measure(self, until: float) -> dict[str, Json]:
        """Returns the `state` of each other task, by its name, and measurements if it was met.

        `latency_ms` is the median time of a request and its answer. `mb_per_sec` is the rate at
        which the other task sends. `clock_secs` is how far its clock is ahead. Each is the best of
        the _ROUNDS that end by `until`, because other work on the machines disturbs them.
        `rounds_mb_per_sec` has the rates of all rounds: how far they differ.
        """
        own = self._cluster.tasks().index(self._cluster.task)
        for _ in range(_ROUNDS):
            # Each task begins with the next one, so that not all measure the same link.
            for task in self._others[own:] + self._others[:own]:
                if time.monotonic() < until and self._states[task]["state"] == "met":
                    try:
                        state = _combined(self._states[task], self._measured(task))
                    except (OSError, ValueError) as error:
                        state = {"state": "lost", "detail": str(error)}
                    with self._changed:
                        self._states[task] = state
        return {str(task): state for task, state in self._states.items()}

    def send(self, report: Json) -> None:
        """Keeps the report of this task, and sends it to each task that was met."""
        self._keep(report)
        for task, state in self._states.items():
            if state["state"] == "met":
                with contextlib.suppress(OSError, ValueError), self._connected(task) as connection:
                    connection.ask({"do": "report", "report": report})

    def wait_for_reports(self, until: float) -> dict[str, Json]:
        """Returns the reports by task, when all tasks that came have sent one, or at `until`."""
        with self._changed:
            states = {str(task): state["state"] for task, state in self._states.items()}
            met = {name for name, state in states.items() if state == "met"}
            came = {name for name in self._visitors if states.get(name) != "small only"}
            names = (met | came) & states.keys()
            self._changed.wait_for(
                lambda: names <= self._reports.keys(), max(0.0, until - time.monotonic())
            )
            return dict(self._reports)

    def _keep(self, report: Json) -> None:
        with self._changed:
            self._reports[report["task"]] = report
            self._changed.notify_all()

    # The side that asks.

    def _connected(self, task: Task) -> "_Connection":
        address = self._cluster.address_of(task)
        return _Connection(
            socket.create_connection((host_of(address), port_of(address)), _CONNECT_SECS)
        )

    def _greet(self, task: Task) -> None:
        """Tries until the task answers, or this exchange ends."""
        while not self._is_over.is_set():
            state = self._greeted(task)
            with self._changed:
                self._states[task] = state
                self._changed.notify_all()
            if state["state"] == "met":
                return
            self._is_over.wait(_POLL_SECS)

    def _greeted(self, task: Task) -> Json:
        try:
            with self._connected(task) as connection:
                answer = connection.ask({"do": "hello", "from": str(self._cluster.task)})
        except socket.gaierror as error:
            return {"state": "unknown host", "detail": str(error.strerror)}
        except ConnectionRefusedError:
            return {"state": "refused"}
        except TimeoutError:
            return {"state": "silent"}
        except (ConnectionError, ValueError):
            return {"state": "stranger"}
        except OSError as error:
            is_far = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
            return {"state": "silent" if is_far else "stranger", "detail": str(error.strerror)}
        if answer.get("task") != str(task):
            return {"state": "stranger", "detail": f"it is {answer.get('task')}"}
        return {"state": "met", "mark": str(answer.get("mark", ""))}

    def _measured(self, task: Task) -> Json:
        """The measures of one round; or another state, if a long message does not arrive."""
        round_trips, offsets = [], []
        with self._connected(task) as connection:
            for _ in range(_NUM_PINGS):
                began, sent = time.monotonic(), time.time()
                there = connection.ask({"do": "ping"})["time"]
                round_trips.append(time.monotonic() - began)
                offsets.append(there - (sent + time.time()) / 2)
            clock_secs = offsets[round_trips.index(min(round_trips))]
            try:
                connection.ask({"do": "ping", "echo": "-" * _LARGE_BYTES})
            except OSError:  # No answer; or the other side has waited for the message in vain.
                return {"state": "small only", "detail": f"{_LARGE_BYTES:,}"}
            bytes_per_sec = connection.receive_bulk()
        return {
            "latency_ms": round(1e3 * statistics.median(round_trips), 3),
            "mb_per_sec": round(1e-6 * bytes_per_sec, 3),
            "clock_secs": round(clock_secs, 3),
        }

    # The side that answers.

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # Until the listener is shut down.
            while True:
                accepted = self._listener.accept()[0]
                accepted.settimeout(_ANSWER_SECS)
                self._start(self._serve, _Connection(accepted))

    def _serve(self, connection: "_Connection") -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection:
            while request := connection.read():
                if request["do"] == "bulk":
                    with self._bulk:
                        connection.send_bulk()
                    continue
                if request["do"] == "hello":
                    with self._changed:
                        self._visitors.add(str(request["from"]))
                if request["do"] == "report":
                    self._keep(request["report"])
                answer = {"task": str(self._cluster.task), "time": time.time(), "mark": self._mark}
                connection.write({**answer, "echo": request.get("echo", "")})


def _combined(state: Json, measured: Json) -> Json:
    """The measures with the shorter latency, the higher rate of both, and the rates of all."""
    if "state" in measured:
        return measured
    rates = [*state.get("rounds_mb_per_sec", ()), measured["mb_per_sec"]]
    is_best = measured["latency_ms"] < state.get("latency_ms", math.inf)
    best = {**state, **measured} if is_best else state
    return {**best, "mb_per_sec": max(rates), "rounds_mb_per_sec": rates}


class _Connection(contextlib.AbstractContextManager["_Connection"]):
    """A socket with lines of JSON."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(_ANSWER_SECS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._file = connected.makefile("rb")

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._socket.close()

    def ask(self, request: Mapping[str, object]) -> Json:
        """Returns the answer. Raises ValueError if it is not JSON, OSError if there is none."""
        self.write(request)
        answer = self.read()
        if answer is None:
            raise ConnectionResetError("closed without an answer")
        return answer

    def write(self, message: Mapping[str, object]) -> None:
        """Sends a message."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> Json | None:
        """Returns the next message; None at the end. Raises ValueError if it is no JSON object."""
        line = self._file.readline(_MAX_LINE_BYTES)
        if not line:
            return None
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a JSON object")
        return message

    def send_bulk(self) -> None:
        """Sends _BULK_BYTES, or less if the other side closes."""
        for _ in range(_BULK_BYTES // len(_CHUNK)):
            self._socket.sendall(_CHUNK)

    def receive_bulk(self) -> float:
        """Returns the bytes per second at which the other side sends.

        Waits until the other side has ended its transfers to others. Uses the connection up.
        """
        self.write({"do": "bulk"})
        self._socket.settimeout(6 * _ANSWER_SECS)
        buffer = bytearray(1 << 16)
        num_bytes = self._file.readinto(buffer)
        self._socket.settimeout(_ANSWER_SECS)
        skipped, began = 0, time.monotonic()
        secs = 0.0
        while num_bytes < _BULK_BYTES and secs < (_BULK_SECS if skipped else _LONG_SKIP_SECS):
            num_read = self._file.readinto1(buffer)
            if not num_read:
                raise ConnectionResetError("closed in a transfer")
            num_bytes += num_read
            if not skipped and num_bytes >= _SKIPPED_BYTES:
                skipped, began = num_bytes, time.monotonic()
            secs = time.monotonic() - began
        return (num_bytes - skipped) / max(secs, 1e-6)
