"""A `mirrored` run in the user's process: a script, or a notebook whose kernel lives on.

    result = run_here({}, None)         # while the flags are parsed

The command may change its process as it likes, because the process ends with the run. Here the
state that others see is set back: signal handlers, the names and seeds of Keras, random numbers of
Python and NumPy. TensorFlow may have been used before, so its devices are taken as they are. The
process is never ended: there is no watchdog.
"""

import contextlib
import dataclasses
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from typing_extensions import override

from data.system.compat.first_tensor import has_tensors
from data.system.errors import TrainerError, UsageError
from data.system.files import exists
from data.system.pipes import outlives_terminal
from trainer import flags, tf_setup
from trainer.api.result import Result, result_of
from trainer.config import Config, Recipe
from trainer.flags import start
from trainer.flags.checks import read_recipe
from trainer.guards.signals import StopSignals, stop_signals
from trainer.run_files import RunFiles

log = logging.getLogger(__name__)

_FOR_COMMANDS = {
    "log_device_placement": "it redirects the output of the whole process",
    "stall_timeout_secs": "it ends the process, and this process is yours",
    "grace_secs": "it ends the process, and this process is yours",
}

_OPTIMIZES = "arithmetic_optimization"  # An option of the optimizer of graphs.


def run_here(functions: Mapping[str, object], config: Config | None) -> Result:
    """Trains as the parsed flags say; raises the errors of `trainer.train`."""
    _refuse_flags()
    _check_keras()
    recipe = read_recipe()
    start.read_cluster(is_launched=False)
    tf_setup.set_environment()
    with _settings_kept(), outlives_terminal():
        tf_setup.import_tensorflow()
        _check_tensorflow(recipe.config.virtual_replicas)
        from data.system.compat.keras_state import keras_state_kept  # Imports Keras.

        with keras_state_kept():
            return _run(recipe, lambda model_dir: Result(model_dir, functions, config))


def _run(recipe: Recipe, result_in: Callable[[str], Result]) -> Result:
    from trainer import task

    start.set_train_steps(recipe)
    model_dir = start.model_dir_of(recipe)
    if start.says_finished(recipe, model_dir, hides_gpus=False):
        return result_in(model_dir)
    spec = dataclasses.replace(start.task_spec(recipe, None, model_dir), stall_timeout_secs=0.0)
    try:
        exit_code = task.run(spec, Interrupts())
    except TrainerError as error:
        if exists(RunFiles(model_dir).config):
            error.result = result_in(model_dir)
        raise
    return result_of(model_dir, exit_code, result_in(model_dir))


def _refuse_flags() -> None:
    for name, reason in _FOR_COMMANDS.items():
        if flags.FLAGS[name].present:
            raise UsageError(
                f"train() runs mirrored in this process, where {name} cannot be used: {reason}. "
                "Leave it out, or type the command in a terminal: python -m trainer"
            )


def _check_keras() -> None:
    keras = sys.modules.get("keras")
    if keras is not None and keras.backend.backend() != "tensorflow":
        raise UsageError(
            f"Keras was imported with the backend {keras.backend.backend()!r}, but this program "
            "needs 'tensorflow'. Set os.environ['KERAS_BACKEND'] = 'tensorflow' before the first "
            "import of keras, and start this process again."
        )


def _check_tensorflow(virtual_replicas: int) -> None:
    """Refuses flags that are for devices or threads, if TensorFlow has made these before."""
    if not has_tensors():
        return
    import tensorflow as tf

    threads = tf.config.threading.get_intra_op_parallelism_threads()
    gpus = [] if flags.NUM_GPUS.value == 0 else tf.config.list_logical_devices("GPU")
    devices = gpus or tf.config.list_logical_devices("CPU")
    given = ""
    if flags.NUM_THREADS.value and flags.NUM_THREADS.value != threads:
        given = f"num_threads={flags.NUM_THREADS.value}"
    elif virtual_replicas and threads != 1:
        given = f"virtual_replicas={virtual_replicas}, num_threads=1"
    elif flags.REPLICAS.value > len(devices):
        given = f"replicas={flags.REPLICAS.value}"
    if given:
        raise UsageError(
            f"{given} must be given before TensorFlow is first used in a process, and this process "
            f"has used it: with {threads or 'its own number of'} threads and {len(devices)} "
            f"{devices[0].device_type} device(s). Restart the kernel, and call "
            f"trainer.train(..., {given}) first."
        )


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """Restores random states and the settings of TensorFlow that a run changes."""
    import numpy as np

    python_state, numpy_state = random.getstate(), np.random.get_state()
    logger = logging.getLogger("tensorflow")
    logger.addFilter(_is_no_retracing)
    is_soft, optimizes = None, True
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        is_soft = tf.config.get_soft_device_placement()
        optimizes = tf.config.optimizer.get_experimental_options().get(_OPTIMIZES, True)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_retracing)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if is_soft is not None:
            tf.config.set_soft_device_placement(is_soft)
            # config.virtual_replicas turns it off.
            tf.config.optimizer.set_experimental_options({_OPTIMIZES: optimizes})


def _is_no_retracing(record: logging.LogRecord) -> bool:
    """Returns False for a warning of TensorFlow about many graphs: each run traces its own."""
    return "triggered tf.function retracing" not in record.getMessage()


class Interrupts(StopSignals):
    """Handles Ctrl-C, SIGTERM and SIGHUP by Python's own handlers, and sets them back at the end.

    The first signal stops training at a step, with its state saved; the next one, and any before
    training, has its usual effect: KeyboardInterrupt, for example. Handlers run between two calls
    of the graph, about once a second. In another thread than the main thread nothing is done. A
    signal whose handler is not of Python keeps it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._request: Callable[[], None] | None = None
        self._former: dict[int, signal._HANDLER] = {}

    @override
    def on_stop(self, stop: Callable[[], None], grace_secs: float) -> None:
        self._request = stop

    @override
    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                if signal.getsignal(number) is None:  # Of C code: Python cannot set it back.
                    continue
                self._former[number] = signal.signal(number, self._handle)
        return self

    @override
    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._is_stop_requested:
            return
        if self._request is None:
            signal.signal(number, self._former[number])
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        text = "%s: training stops after this step, and saves. Again: it ends at once."
        # On a thread: this handler may have interrupted a print, and Python refuses a second one.
        threading.Thread(target=log.warning, args=(text, name)).start()
        self._is_stop_requested = True
        self._request()
        self._request = None
