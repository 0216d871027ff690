"""Examples -> TFRecord shards with their index, by one process or several.

    split = write_split(examples, "datasets/digits", "digits", "train", 4, num_examples)
    squares = in_processes(lambda part, count_one: [x * x for x in part], 9, 2, print)

Equal examples give equal files.
"""

import array
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from data.system import files
from data.system.files import DataError, join
from data.system.linux import signal_when_parent_ends
from data.tfrecord.crc import FRAME_BYTES, Int64s, framed
from data.tfrecord.split import Split, index_of, write_index

T = TypeVar("T")

_REPORT_RECORDS = 256


def write_split(
    examples: Callable[[int, int], Iterator[bytes]],
    out_dir: str,
    name: str,
    split: str,
    num_shards: int,
    num_examples: int,
    num_processes: int = 1,
    report: Callable[[int], None] = lambda count: None,
) -> Split:
    """Writes examples in order to `out_dir/NAME-SPLIT.tfrecord-*`, with their index.

    The shards are contiguous, and their lengths differ by one record at most. The files get their
    final names when the last shard is complete. They do not depend on the number of processes.

    `examples(first, last)` yields examples first..last-1, and is called once by each process. The
    processes are forked, so nothing is pickled. A process that has imported TensorFlow cannot
    fork, because a fork loses TensorFlow's threads: it writes alone. `report`: called in this
    process with the number of examples written so far.
    """
    if num_examples < 1:
        raise DataError(f"Split {split!r} of {name} has no examples: check the source files.")
    num_shards = max(1, min(num_shards, num_examples))
    files.make_dirs(out_dir)
    paths = [
        join(out_dir, f"{name}-{split}.tfrecord-{i:05d}-of-{num_shards:05d}")
        for i in range(num_shards)
    ]
    partial = [files.partial_name(path) for path in paths]
    bounds = [shard * num_examples // num_shards for shard in range(num_shards + 1)]

    def write(shards: range, count_one: Callable[[], None]) -> list[Int64s]:
        iterator = iter(examples(bounds[shards.start], bounds[shards.stop]))
        ends = []
        for shard in shards:
            count = bounds[shard + 1] - bounds[shard]
            ends.append(_write_shard(partial[shard], itertools.islice(iterator, count), count_one))
            if len(ends[-1]) < count:
                raise DataError(
                    f"Split {split!r} of {name} ended after {bounds[shard] + len(ends[-1])} "
                    f"examples; {num_examples} were announced. The source is incomplete."
                )
        if next(iterator, None) is not None:
            raise DataError(
                f"Split {split!r} of {name} has more than the {num_examples} examples announced."
            )
        return ends

    try:
        num_parts = min(num_processes, num_shards)
        if num_parts == 1 or "tensorflow" in sys.modules:
            counter = itertools.count(1)
            ends = write(range(num_shards), lambda: report(next(counter)))
        else:
            ends = in_processes(write, num_shards, num_parts, report)
        for source, target in zip(partial, paths, strict=True):
            files.rename(source, target)
    finally:
        for path in filter(files.exists, partial):
            files.remove_file(path)
    starts = [np.append(np.int64(0), shard[:-1]) for shard in ends]
    indexed = index_of(split, paths, [int(shard[-1]) for shard in ends], starts)
    write_index(out_dir, indexed)
    return indexed


def _write_shard(path: str, examples: Iterable[bytes], count_one: Callable[[], None]) -> Int64s:
    lengths = array.array("q")
    with files.create_file(path) as file:
        for example in examples:
            file.write(framed(example))
            lengths.append(len(example) + FRAME_BYTES)
            count_one()
    return np.cumsum(np.frombuffer(lengths, np.int64))


def in_processes(
    work: Callable[[range, Callable[[], None]], list[T]],
    count: int,
    num_processes: int,
    report: Callable[[int], None],
    name: str = "A writer of examples",
) -> list[T]:
    """Calls `work` for each part of range(count) in a forked process; returns the results in order.

    `work` calls its second argument for each record, and `report` is called in this process with
    the sum. The processes end with this function. If this process dies, Linux ends them at once;
    on macOS they end at a later call of `count_one`. A process that has imported TensorFlow must
    not fork. `name`: what the processes belong to, for messages.

    Raises:
        OSError: a process died. An error of `work` is raised here, too.
    """
    cuts = [i * count // num_processes for i in range(num_processes + 1)]
    parts = list(map(range, cuts, cuts[1:]))
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
