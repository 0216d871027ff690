"""What must run in a process that has not used TensorFlow yet: functions, each called in a fork.

python -m tests.unit.compat.in_forks        # prints {function: [failed, its output or error]}
"""

import contextlib
import json
import linecache
import os
import re
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe  # noqa: TID251

from data.system.compat import determinism, generated_files
from data.system.compat.collective_abort import abort_collectives
from data.system.compat.first_tensor import has_tensors
from data.system.compat.function_names import number_functions_by_name
from data.system.compat.interpreter_lock import interpreter_lock_released
from data.system.compat.lookup_tables import capture_outside_of_branches
from data.system.compat.program_cache import PROGRAM_CACHE, as_text, set_program_cache
from data.system.compat.scheduled_closures import as_scheduled
from strategies.cluster.ports import free_ports
from tests.unit.compat.messages import Messages, delete

TIMEOUT_SECS = 60.0


def in_fork(function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
    """The exit code of a fork that calls `function`, and what it returns, or its error."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            answered, code = json.dumps(function(*arguments)), 0
        except BaseException:
            answered, code = json.dumps(traceback.format_exc()), 1
        os.write(write, answered.encode())
        os._exit(code)
    os.close(write)
    if not select.select([read], [], [], TIMEOUT_SECS)[0]:
        os.killpg(pid, signal.SIGKILL)
    with open(read) as answer:
        text = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, json.loads(text or "null")


def names(num_others: int, is_numbered: bool) -> list[str]:
    if is_numbered:
        number_functions_by_name()
    for _ in range(num_others):
        tf.function(lambda: tf.zeros([])).get_concrete_function()

    @tf.function
    def count(number: Any) -> Any:
        return tf.while_loop(lambda n: n < 3, lambda n: n + 1, [number])[0]

    graph = count.get_concrete_function(tf.TensorSpec([], tf.int32))
    library = graph.graph.as_graph_def().library
    return [graph.name.decode(), *sorted(function.signature.name for function in library.function)]


def names_of_functions_do_not_depend_on_earlier_functions() -> None:
    assert in_fork(names, 0, True) == in_fork(names, 5, True)
    assert in_fork(names, 0, False) != in_fork(names, 5, False), delete("function_names")


def compiled(entries: Mapping[str, str]) -> dict[str, str]:
    """The entries of the cache after a function was compiled; `entries` were there before."""
    set_program_cache()
    number_functions_by_name()
    tf.io.gfile.makedirs(PROGRAM_CACHE)
    for name, text in entries.items():
        tf.io.gfile.GFile(f"{PROGRAM_CACHE}/{name}", "wb").write(text.encode("latin-1"))
    tf.function(lambda x: tf.sin(x) @ x, jit_compile=True)(tf.ones([2, 2]))
    return {
        name: as_text(tf.io.gfile.GFile(f"{PROGRAM_CACHE}/{name}", "rb").read()).decode("latin-1")
        for name in tf.io.gfile.listdir(PROGRAM_CACHE)
        if name not in entries
    }


def compiled_program_is_found_as_text_and_damage_ends_the_step() -> None:
    code, made = in_fork(compiled, {})
    assert (code, len(made)) == (0, 1), made
    assert in_fork(compiled, made) == (0, {}), "the program was compiled again"
    damaged = {name: text[: len(text) // 2] + '"' for name, text in made.items()}
    assert in_fork(compiled, damaged)[0] == 1, "a damaged program needs no check any more"


def first_tensor_is_noticed() -> None:
    assert not has_tensors()
    tf.zeros([])
    assert has_tensors()


def waiting_collective_is_ended() -> None:
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            tf.raw_ops.CollectiveReduceV2(
                input=tf.ones([2]),
                group_size=2,
                group_key=1,
                instance_key=1,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )
        except tf.errors.OpError as error:
            raised.append(error)

    tf.zeros([])
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    abort_collectives("a worker is lost")
    waiting.join(TIMEOUT_SECS / 2)
    assert [type(error) for error in raised] == [tf.errors.UnavailableError], raised
    assert "a worker is lost" in str(raised[0])


def time_is_0_in_deterministic_graphs() -> None:
    started = time.time() - 1
    assert tf.function(determinism.timestamp)() > started
    tf.config.experimental.enable_op_determinism()
    assert tf.function(determinism.timestamp)() == 0
    try:
        tf.function(lambda: tf.timestamp())()
    except tf.errors.FailedPreconditionError:
        return
    raise AssertionError(delete("determinism"))


def generated_functions_are_kept_in_memory() -> None:
    def before(number: Any) -> Any:
        if number > 0:
            number = number * 2
        return number

    def after(number: Any) -> Any:
        if number > 0:
            number = number * 3
        return number * (tf.constant([1, 2]) + tf.constant([1, 2, 3]))

    with tempfile.TemporaryDirectory() as tempfile.tempdir:
        tf.function(before)(tf.constant(1))
        written = os.listdir(tempfile.tempdir)
        assert any(map(generated_files.is_generated, written)), delete("generated_files")
        earlier = set(sys.modules)
        generated_files.keep_generated_in_memory()
        line = re.escape("return number * (tf.constant([1, 2])")  # Of the user, not of AutoGraph.
        with pytest.raises(ValueError, match=line):
            tf.function(after)(tf.constant(1))
        assert os.listdir(tempfile.tempdir) == written
    made = [m for name, m in sys.modules.items() if name not in earlier]
    (file,) = [str(m.__file__) for m in made if generated_files.is_generated(m.__name__)]
    assert os.path.isabs(file)
    assert any("tf__after" in text for text in linecache.getlines(file))


def connect_to_nobody(is_released: bool) -> None:
    """Ends with 0 if a thread of Python runs while TensorFlow waits for another worker."""

    def end() -> None:
        time.sleep(1)
        os._exit(0)

    addresses = [f"localhost:{port}" for port in free_ports(2)]
    task = {"type": "worker", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    with interpreter_lock_released() if is_released else contextlib.nullcontext():
        connect = pywrap_tfe.TFE_EnableCollectiveOps

        def connect_watched(*arguments: Any) -> None:
            signal.alarm(4)  # The kernel ends the process, whatever Python does.
            threading.Thread(target=end).start()
            connect(*arguments)

        pywrap_tfe.TFE_EnableCollectiveOps = connect_watched
        tf.distribute.MultiWorkerMirroredStrategy()


def python_runs_while_workers_connect() -> None:
    assert in_fork(connect_to_nobody, True) == (0, None)
    assert in_fork(connect_to_nobody, False)[0] == -signal.SIGALRM, delete("interpreter_lock")


SERVERS: list[Any] = []  # TensorFlow logs an error if one is deleted.


def parameter_servers() -> tf.distribute.coordinator.ClusterCoordinator:
    """A coordinator of a worker and a parameter server in this process."""
    worker, ps = (f"localhost:{port}" for port in free_ports(2))
    jobs = {"worker": [worker], "ps": [ps]}
    for job in jobs:
        spec = tf.train.ClusterSpec(jobs)
        SERVERS.append(tf.distribute.Server(spec, job_name=job, task_index=0, protocol="grpc"))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return tf.distribute.coordinator.ClusterCoordinator(strategy)


def looked_up(is_changed: bool) -> int:
    coordinator = parameter_servers()
    if is_changed:
        capture_outside_of_branches()
    with coordinator.strategy.scope():
        pairs = tf.lookup.KeyValueTensorInitializer(["a"], tf.constant([7], tf.int64))
        table = tf.lookup.StaticHashTable(pairs, -1)

    @tf.function
    def look_up() -> Any:
        word = tf.constant("a")
        is_short = tf.strings.length(word) < 2
        return tf.cond(is_short, lambda: table.lookup(word), lambda: tf.constant(0, tf.int64))

    result = coordinator.schedule(look_up)
    coordinator.join()
    return int(result.fetch())


def worker_looks_up_words_in_a_branch() -> None:
    assert in_fork(looked_up, True) == (0, 7)
    code, error = in_fork(looked_up, False)
    assert code == 1, delete("lookup_tables")
    assert "You must feed a value" in error


def tracing_outside_of_schedule_warns() -> None:
    strategy = parameter_servers().strategy

    def trace() -> list[str]:
        with Messages("tensorflow") as messages, strategy.scope():
            tf.function(lambda: strategy.run(tf.zeros, ([],))).get_concrete_function()
        return messages.texts

    with as_scheduled(strategy):
        assert not (found := trace()), found
    assert trace(), delete("scheduled_closures")


def connections_of_grpc_have_no_limit_of_silence() -> None:
    SERVERS.append(parameter_servers())
    limits = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(name)))
            found.getpeername()
            limits.append(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        except OSError:  # No connection.
            continue
    assert limits
    assert 0 in limits, delete("connections")


PROGRAMS: tuple[Callable[[], None], ...] = (
    names_of_functions_do_not_depend_on_earlier_functions,
    compiled_program_is_found_as_text_and_damage_ends_the_step,
    first_tensor_is_noticed,
    waiting_collective_is_ended,
    time_is_0_in_deterministic_graphs,
    generated_functions_are_kept_in_memory,
    python_runs_while_workers_connect,
    worker_looks_up_words_in_a_branch,
    tracing_outside_of_schedule_warns,
    connections_of_grpc_have_no_limit_of_silence,
)

if __name__ == "__main__":
    outcomes = {program.__name__: in_fork(program) for program in PROGRAMS}
    print(json.dumps(outcomes))
    sys.stdout.flush()
    os._exit(0)
