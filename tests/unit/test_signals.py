"""The first signal asks for a stop, even of a main thread that waits; the second ends at once."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from trainer.signals import StopSignals

BOTH = pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)


@BOTH
def test_signal_asks_for_a_stop_and_handlers_are_given_back(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    asked = threading.Event()
    with StopSignals() as signals:
        signals.on_stop(asked.set, grace_secs=60)
        os.kill(os.getpid(), signum)
        assert asked.wait(10)
    assert signal.getsignal(signum) is before


def test_handler_that_a_library_replaced_is_taken_back() -> None:
    """As TensorFlow's coordination service does while multiworker connects."""
    asked = threading.Event()
    with StopSignals() as signals:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signals.on_stop(asked.set, grace_secs=60)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(10)


def run(body: str) -> subprocess.CompletedProcess[str]:
    program = "import os, signal, threading\nfrom trainer.signals import StopSignals\n"
    return subprocess.run(
        [sys.executable, "-c", program + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
    )


@BOTH
def test_signal_before_there_is_anything_to_save_ends_at_once(signum: signal.Signals) -> None:
    ended = run(f"""
        with StopSignals():
            os.kill(os.getpid(), {signum:d})
            threading.Event().wait(50)
    """)
    assert ended.returncode == 75
    assert "Traceback" not in ended.stderr


@BOTH
def test_second_signal_ends_at_once(signum: signal.Signals) -> None:
    ended = run(f"""
        asked = threading.Event()
        with StopSignals() as signals:
            signals.on_stop(asked.set, grace_secs=60)
            os.kill(os.getpid(), {signum:d})
            assert asked.wait(50)
            print("asked", flush=True)
            os.kill(os.getpid(), {signum:d})
            threading.Event().wait(50)
    """)
    assert ended.stdout == "asked\n"
    assert ended.returncode == 75


def test_main_thread_that_waits_outside_python_can_be_stopped() -> None:
    """Python's own handlers wait for the main thread; this one waits in the C library."""
    ended = run("""
        import ctypes
        mutex = ctypes.create_string_buffer(64)  # Zeros are PTHREAD_MUTEX_INITIALIZER.
        libc = ctypes.CDLL(None)
        with StopSignals() as signals:
            signals.on_stop(lambda: os._exit(7), grace_secs=60)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)  # For ever, whatever signal comes.
    """)
    assert ended.returncode == 7


def test_task_that_does_not_end_in_its_grace_ends_all_the_same() -> None:
    ended = run(f"""
        with StopSignals() as signals:
            signals.on_stop(lambda: print("asked", flush=True), grace_secs=0.2)
            os.kill(os.getpid(), {signal.SIGTERM:d})
            threading.Event().wait(50)
    """)
    assert ended.stdout == "asked\n"
    assert ended.returncode == 75
    assert "--grace_secs" in ended.stderr


def test_grace_is_over_when_the_task_is_done() -> None:
    ended = run(f"""
        import time
        asked = threading.Event()
        with StopSignals() as signals:
            signals.on_stop(asked.set, grace_secs=0.5)
            os.kill(os.getpid(), {signal.SIGTERM:d})
            assert asked.wait(50)
        time.sleep(1)
        os._exit(0)
    """)
    assert ended.returncode == 0
