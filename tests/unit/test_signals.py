"""The first signal requests a stop, even if the main thread waits; the second ends at once."""

import logging
import os
import signal
import subprocess
import textwrap
import threading
from collections.abc import Iterator

import pytest

from tests.commands import run_python
from trainer.api import here
from trainer.api.here import Interrupts
from trainer.guards.signals import StopSignals, stop_signals

STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, signal.SIGHUP]
REPEATED = (signal.SIGHUP, signal.SIGXCPU)
EACH = pytest.mark.parametrize("signum", STOPS, ids=lambda s: s.name)


@pytest.fixture(autouse=True)
def is_without_nohup() -> Iterator[None]:
    """These tests may run under nohup, which ignores SIGHUP."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


def test_closed_terminal_asks_for_no_stop_under_nohup() -> None:
    assert list(stop_signals()) == STOPS
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert list(stop_signals()) == STOPS[:3]


@EACH
def test_signal_requests_a_stop_and_handlers_are_restored(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    asked = threading.Event()
    with StopSignals() as signals:
        signals.on_stop(asked.set, grace_secs=60)
        os.kill(os.getpid(), signum)
        assert asked.wait(10)
    assert signal.getsignal(signum) is before


def test_handler_that_a_library_replaced_is_set_again() -> None:
    """TensorFlow's coordination service replaces it while multiworker connects."""
    asked = threading.Event()
    with StopSignals() as signals:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signals.on_stop(asked.set, grace_secs=60)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(10)


@pytest.mark.parametrize("handling", [StopSignals, Interrupts])
def test_handler_that_is_not_of_python_is_no_error(
    handling: type[StopSignals], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that embeds Python sets such handlers before: Python's functions return None."""
    before = {number: signal.getsignal(number) for number in STOPS}
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda _: None)
        set_handler = signal.signal
        patched.setattr(signal, "signal", lambda *handler: set_handler(*handler) and None)
        with handling():
            pass
    is_kept = handling is Interrupts  # A notebook's process; the other one's ends afterwards.
    for number, handler in before.items():
        assert signal.getsignal(number) is (handler if is_kept else signal.SIG_DFL)
        signal.signal(number, handler)


PRELUDE = """
import os, queue, signal, threading, time
from trainer.guards.signals import SignalThread, StopSignals

asked = threading.Event()
def send(signum=signal.SIGTERM):
    os.kill(os.getpid(), signum)
def wait(secs=50):
    threading.Event().wait(secs)
"""


def ended_with(exit_code: int, body: str) -> subprocess.CompletedProcess[str]:
    """A process that ran `body`; asserts its exit code."""
    ended = run_python("-c", PRELUDE + textwrap.dedent(body))
    assert ended.returncode == exit_code, ended.stderr
    return ended


@EACH
def test_signal_before_on_stop_ends_at_once(signum: signal.Signals) -> None:
    ended = ended_with(75, f"with StopSignals():\n    send({signum:d})\n    wait()")
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@EACH
def test_second_signal_ends_at_once_unless_the_terminal_was_closed(signum: signal.Signals) -> None:
    is_saved = signum in REPEATED
    body = f"""
        with StopSignals() as signals:
            signals.on_stop(asked.set, grace_secs=60)
            send()
            assert asked.wait(50)
            print("asked", flush=True)
            time.sleep(0.6)  # A repetition comes earlier.
            send({signum:d})
            wait(0.5 if {is_saved} else 50)
            print("saved", flush=True)
    """
    ended = ended_with(0 if is_saved else 75, body)
    assert ended.stdout == ("asked\nsaved\n" if is_saved else "asked\n")


def test_signal_that_repeats_the_first_at_once_is_ignored() -> None:
    body = """
        with StopSignals() as signals:
            signals.on_stop(asked.set, grace_secs=60)
            for _ in range(3):
                send(signal.SIGINT)
                time.sleep(0.01)
            assert asked.wait(50)
            time.sleep(1)
            print("saved", flush=True)
    """
    assert ended_with(0, body).stdout == "saved\n"


def test_main_thread_that_waits_outside_python_can_be_stopped() -> None:
    """Python's handlers wait for the main thread, which here waits in the C library."""
    body = """
        import ctypes
        mutex = ctypes.create_string_buffer(64)  # Zeros are PTHREAD_MUTEX_INITIALIZER.
        libc = ctypes.CDLL(None)
        with StopSignals() as signals:
            signals.on_stop(lambda: os._exit(7), grace_secs=60)
            threading.Timer(0.1, send).start()
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)  # Blocks, whatever signal comes.
    """
    ended_with(7, body)


def test_task_that_is_not_done_after_grace_secs_is_ended() -> None:
    body = """
        with StopSignals() as signals:
            signals.on_stop(lambda: print("asked", flush=True), grace_secs=0.2)
            send()
            wait()
    """
    ended = ended_with(75, body)
    assert ended.stdout == "asked\n"
    assert "--grace_secs" in ended.stderr


def test_timer_is_cancelled_when_the_task_is_done() -> None:
    body = """
        with StopSignals() as signals:
            signals.on_stop(asked.set, grace_secs=0.5)
            send()
            assert asked.wait(50)
        time.sleep(1)
    """
    ended_with(0, body)


def test_sigusr1_says_that_a_peer_was_lost_while_a_callback_is_set() -> None:
    body = """
        with StopSignals() as signals:
            signals.on_stop(lambda: os._exit(3), grace_secs=60)
            signals.on_peer_lost(asked.set)
            send(signal.SIGUSR1)
            assert asked.wait(10)
            signals.on_peer_lost(None)
            send(signal.SIGUSR1)
            wait()
    """
    ended_with(-signal.SIGUSR1, body)


def test_signal_that_another_thread_gets_is_handled_while_the_main_thread_waits() -> None:
    """The kernel chooses another thread if the main thread handles another signal already."""
    body = """
        events = queue.SimpleQueue()
        with SignalThread([signal.SIGTERM], events.put):
            other = threading.Thread(target=wait, daemon=True)
            other.start()
            threading.Timer(0.2, signal.pthread_kill, (other.ident, signal.SIGTERM)).start()
            assert events.get(timeout=20) == signal.SIGTERM
        os._exit(0)
    """
    ended_with(0, body)


def test_error_of_a_callback_ends_the_process_also_if_nobody_reads_its_output() -> None:
    body = """
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 2)
        with SignalThread([signal.SIGTERM], lambda number: 1 / 0):
            send()
            wait()
    """
    ended_with(75, body)


def test_signals_at_the_end_of_the_context_are_not_lost() -> None:
    """A signal after each change of the handlers and of the descriptor."""
    body = """
        sent, handled = [], []
        signal.signal(signal.SIGUSR1, lambda *_: handled.append("handler"))
        reading = SignalThread([signal.SIGUSR1], lambda number: None)
        def sending(function):
            def call(*arguments):
                result = function(*arguments)
                sent.append(function.__name__)
                send(signal.SIGUSR1)
                return result
            return call
        with reading:
            signal.signal = sending(signal.signal)
            signal.set_wakeup_fd = sending(signal.set_wakeup_fd)
        assert sorted(sent) == ["set_wakeup_fd", "signal"], sent
        assert len(handled) == len(sent), (sent, handled)
    """
    ended_with(0, body)


def test_first_signal_requests_a_stop_and_does_not_print_in_the_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The handler may have interrupted a print of the main thread: Python refuses a print in it.
    printed = threading.Event()
    threads: list[threading.Thread] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            threads.append(threading.current_thread())
            printed.set()

    monkeypatch.setattr(here.log, "handlers", [Handler()])
    stops: list[None] = []
    with Interrupts() as handlers:
        handlers.on_stop(lambda: stops.append(None), grace_secs=0)
        os.kill(os.getpid(), signal.SIGINT)
        assert printed.wait(60)
        assert len(stops) == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert threading.main_thread() not in threads
