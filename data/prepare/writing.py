"""Examples -> TFRecord shards with their index, by one process or several.

    split = write_split(examples, "datasets/digits", "digits", "train", 4, num_examples)

Equal examples give equal files.
"""

import array
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from data.prepare.processes import in_processes
from data.system import files
from data.system.files import DataError, join
from data.tfrecord.crc import FRAME_BYTES, Int64s, framed
from data.tfrecord.split import Split, index_of, write_index


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
            cuts = [i * num_shards // num_parts for i in range(num_parts + 1)]
            ends = in_processes(write, list(map(range, cuts, cuts[1:])), report)
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
