"""Copies of shards at s3:// on a disk of this machine, filled by blocks when they are read.

    split = with_copies(split, directory="/disk/copies", max_bytes=100 << 30)
    split.copies.fetch(ranges)              # starts requests for what is missing, and returns
    split.copies.read_into(ranges, content) # waits for them
    split.copies.complete(split)            # whole files, for readers in TensorFlow

A shard has two files in the directory: a copy of its size, with holes, and a map with a byte for
each block of 128 KiB that says if the copy has it. Several processes may fill a copy at once: they
write equal bytes, and a block's byte in the map after the block. A copy's name has a hash of the
URL, the size and the time of the object, so a changed object gets another copy. The CRCs of the
records find a block that is damaged, for example after a loss of power; it is fetched again.

A shard gets a copy if all copies together then fit in `max_bytes`. For that, copies that no process
uses are removed, the oldest first. Shards without a copy are read from s3:// each time: every epoch
reads all shards, so removing one for another would gain nothing.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from data.system import files, object_store
from data.system.files import DataError
from data.system.locks import locked
from data.system.object_store import RefusedError, UnavailableError
from data.tfrecord.byte_ranges import ByteRanges, pread
from data.tfrecord.crc import Int64s, Uint8s
from data.tfrecord.damage import verify
from data.tfrecord.split import Split

log = logging.getLogger(__name__)

_BLOCK_BYTES = 128 << 10
_REQUEST_BYTES = 4 << 20  # The most of one request.
_GAP_BYTES = 32 << 10  # Bytes between two ranges that are cheaper to read than a request.
_REQUESTS_IN_FLIGHT = 16
_MAP = ".blocks"
_MISSING, _PRESENT, _VERIFIED = 0, 1, 2


class _NoCopyError(Exception):
    """The copy at `path` cannot be written any more: the bytes must be fetched into memory."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(f"{path} cannot be written: {error}")
        self.path = path


def with_copies(split: Split, directory: str, max_bytes: int) -> Split:
    """`split`, which is at s3://, with copies of its shards in `directory`.

    Without `directory`, copies are in the user's cache.
    """
    urls = list(dict.fromkeys(shard.path for shard in split.shards))
    if not directory:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        directory = os.path.join(cache, "tf-distribution-trainer", "shards")
    directory = os.path.abspath(os.path.expanduser(directory))
    try:
        return dataclasses.replace(split, copies=ShardCopies(urls, directory, max_bytes))
    except UnavailableError:
        raise
    except OSError as error:
        raise DataError(
            f"Copies of {files.parent(urls[0])} cannot be kept in {directory}: {error}. Give a "
            "directory on a local disk with room: --data_cache_dir=DIR"
        ) from error


class ShardCopies:
    """The copies of the shards `urls`. Safe to use from several threads and processes.

    `local`: the path of the copy of each shard, which need not exist, by its URL.
    """

    def __init__(self, urls: Sequence[str], directory: str, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        stamps = object_store.stamps_in(files.parent(urls[0]))
        self.local: dict[str, str] = {}
        self._objects: dict[str, tuple[str, int]] = {}  # By the path of the copy: URL, bytes.
        for url in urls:
            name = os.path.basename(url)
            num_bytes, _ = stamps[name]
            key = hashlib.sha256(f"{url} {stamps[name]}".encode()).hexdigest()[:16]
            path = os.path.join(directory, f"{key}-{name}")
            self.local[url], self._objects[path] = path, (url, num_bytes)
        os.makedirs(directory, exist_ok=True)
        self._copies = self._open_copies()
        self._pool = concurrent.futures.ThreadPoolExecutor(_REQUESTS_IN_FLIGHT, "s3")
        self._fetched: weakref.WeakKeyDictionary[ByteRanges, list[_Fetched]] = (
            weakref.WeakKeyDictionary()
        )

    def fetch(self, ranges: ByteRanges) -> None:
        """Starts to fetch what `read_into(ranges)` needs; `ranges.paths` are paths of copies."""
        self._fetched[ranges] = self._start(ranges)

    def read_into(self, ranges: ByteRanges, content: memoryview) -> None:
        """Reads `ranges` into `content`. While s3:// does not answer, warns and tries again.

        Raises OSError if an object is missing, is shorter, or may not be read.
        """

        def read() -> None:
            _finish(self._fetched.pop(ranges, []) or self._start(ranges), content)

        while True:
            try:
                return _patiently(read)
            except _NoCopyError as error:  # The disk is full or fails.
                if self._copies[error.path] is not None:
                    log.warning("%s. Reading without it.", error)
                self._copies[error.path] = None

    def forget(self, ranges: ByteRanges) -> None:
        """Marks the blocks of `ranges` as missing: they are damaged, and are fetched again."""
        for path, begins, ends in ranges.by_file():
            if (copy := self._copies[path]) is not None:
                for run in _runs(np.flatnonzero(copy.blocks_of(begins, ends))):
                    copy.mark(*run, _MISSING)

    def make_whole(self, ranges: ByteRanges) -> None:
        """Makes whole copies of the files of `ranges`, even if there is no room for them.

        TensorFlow then names what is damaged in them, or missing.
        """
        for path in {path for path, _, _ in ranges.by_file()}:
            try:
                copy = self._copies[path] or _Copy(path, self._objects[path])
                _patiently(functools.partial(self._fill, copy))
                self._copies[path] = copy
            except (OSError, _NoCopyError):  # For example, the object was removed.
                self._copies[path] = None
                _remove(path)

    def complete(self, split: Split) -> None:
        """Fetches what is missing of all shards, and compares every record with its CRCs.

        A damaged copy is fetched again, once.
        """
        num_bytes = sum(size for _, size in self._objects.values())
        if None in self._copies.values():
            raise DataError(
                f"Workers of ps read whole local copies of {split.name!r}, {num_bytes:,} bytes, "
                f"but not all fit in {self._directory} with --data_cache_bytes={self._max_bytes}. "
                "Raise it to the bytes of both splits or more, give --data_cache_dir on a larger "
                "disk, or use another strategy."
            )
        for path, copy in self._copies.items():
            assert copy is not None
            with locked(path + _MAP):  # Other processes wait here.
                if (copy.states() == _VERIFIED).all():
                    continue
                self._fill(copy)
                url, _ = self._objects[path]
                if _is_damaged(split, url, path):  # Perhaps the copy is damaged, not the object.
                    copy.mark(0, copy.num_blocks, _MISSING)
                    self._fill(copy)
                os.fsync(copy.descriptor)
                copy.mark(0, copy.num_blocks, _VERIFIED)

    def _fill(self, copy: "_Copy") -> None:
        missing = np.flatnonzero(copy.states() == _MISSING)
        requests = [self._pool.submit(copy.fetch, *run) for run in _runs(missing)]
        for request in requests:
            request.result()

    def _start(self, ranges: ByteRanges) -> list["_Fetched"]:
        fetched = []
        for path, begins, ends in ranges.by_file():
            if (copy := self._copies[path]) is not None:
                requests = copy.start(begins, ends, self._pool)
                fetched.append(_Fetched(copy, requests, begins, ends))
                continue
            url, _ = self._objects[path]
            for first, last in _near(begins, ends):
                bounds = int(begins[first]), int(ends[last - 1])
                request = self._pool.submit(object_store.get_range, url, *bounds)
                fetched.append(_Fetched(None, [request], begins[first:last], ends[first:last]))
        return fetched

    def _open_copies(self) -> "dict[str, _Copy | None]":
        with locked(os.path.join(self._directory, "lock")):
            maps = [
                entry.path for entry in os.scandir(self._directory) if entry.name.endswith(_MAP)
            ]
            others = {path.removesuffix(_MAP) for path in maps} - self._objects.keys()
            stats = {path: _stat(path) for path in others}  # Size and time.
            unused = [path for path in others if not _is_used(path)]
            room = self._max_bytes - sum(stats[path][0] for path in others.difference(unused))
            copies: dict[str, _Copy | None] = dict.fromkeys(self._objects)
            for path, (url, num_bytes) in self._objects.items():
                if num_bytes <= room:
                    room -= num_bytes
                    copies[path] = _Copy(path, (url, num_bytes))
                elif os.path.exists(path) and not _is_used(path):
                    _remove(path)
            room -= sum(stats[path][0] for path in unused)
            for path in sorted(unused, key=lambda path: stats[path][1]):
                if room < 0:
                    _remove(path)
                    room += stats[path][0]
            return copies


class _Fetched(NamedTuple):
    """Ranges of one file, and requests: of blocks of its `copy`, or without one, of the bytes."""

    copy: "_Copy | None"
    requests: Sequence[concurrent.futures.Future[Any]]
    begins: Int64s
    ends: Int64s


def _finish(fetched: Sequence[_Fetched], content: memoryview) -> None:
    """Waits for the requests, and writes the ranges to `content`, one after another."""
    at = 0
    for copy, requests, begins, ends in fetched:
        results = [request.result() for request in requests]
        for begin, size in zip(begins.tolist(), (ends - begins).tolist(), strict=True):
            into, skip = content[at : at + size], begin - int(begins[0])
            if copy is None:
                into[:] = results[0][skip : skip + size]
            else:
                pread(copy.descriptor, into, begin)
            at += size


class _Copy:
    """One file with holes, and the file that says which blocks it has."""

    def __init__(self, path: str, source: tuple[str, int]) -> None:
        self.path = path
        self._url, self._num_bytes = source
        self.num_blocks = -(-self._num_bytes // _BLOCK_BYTES)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)  # See `_is_used`.
        self._map = os.open(path + _MAP, os.O_RDWR | os.O_CREAT, 0o666)
        for descriptor in (self.descriptor, self._map):
            weakref.finalize(self, os.close, descriptor)
        sizes = os.fstat(self.descriptor).st_size, os.fstat(self._map).st_size
        if sizes != (self._num_bytes, self.num_blocks):
            os.ftruncate(self._map, 0)
            self.mark(0, self.num_blocks, _MISSING)
            os.ftruncate(self.descriptor, self._num_bytes)
        os.utime(path)
        self._lock = threading.Lock()
        self._in_flight: dict[int, concurrent.futures.Future[None]] = {}
        self._is_full = False

    def states(self) -> Uint8s:
        """The state of each block."""
        return np.frombuffer(os.pread(self._map, self.num_blocks, 0), np.uint8)

    def mark(self, first: int, last: int, state: int) -> None:
        """Sets the state of blocks [first, last)."""
        self._is_full = False
        os.pwrite(self._map, bytes([state]) * (last - first), first)

    def blocks_of(self, begins: Int64s, ends: Int64s) -> np.typing.NDArray[np.bool_]:
        """For each block, True if it has bytes of [begins[i], ends[i]) for any i."""
        changes = np.zeros(self.num_blocks + 1, np.int64)
        np.add.at(changes, begins // _BLOCK_BYTES, 1)
        np.add.at(changes, (ends - 1) // _BLOCK_BYTES + 1, -1)
        return np.cumsum(changes)[:-1] > 0

    def start(
        self, begins: Int64s, ends: Int64s, pool: concurrent.futures.Executor
    ) -> Sequence[concurrent.futures.Future[None]]:
        """Starts to fetch the missing blocks of some ranges; returns what must be waited for."""
        if self._is_full:
            return []
        states = self.states()
        self._is_full = bool((states != _MISSING).all())
        missing = np.flatnonzero(self.blocks_of(begins, ends) & (states == _MISSING)).tolist()
        with self._lock:
            self._in_flight = {b: f for b, f in self._in_flight.items() if not f.done()}
            new = np.array([b for b in missing if b not in self._in_flight], np.int64)
            for run in _runs(new):
                request = pool.submit(self.fetch, *run)
                self._in_flight |= dict.fromkeys(range(*run), request)
            return list({self._in_flight[block] for block in missing})

    def fetch(self, first: int, last: int) -> None:
        """Fetches blocks [first, last), and writes them.

        Raises _NoCopyError if they cannot be written.
        """
        begin, end = first * _BLOCK_BYTES, min(last * _BLOCK_BYTES, self._num_bytes)
        content = object_store.get_range(self._url, begin, end)
        try:
            while content:
                written = os.pwrite(self.descriptor, content, begin)
                content, begin = content[written:], begin + written
            self.mark(first, last, _PRESENT)
        except OSError as error:
            raise _NoCopyError(self.path, error) from error


def _is_damaged(split: Split, url: str, path: str) -> bool:
    """Compares the copy at `path` of the shard at `url` with its CRCs."""
    shards = [dataclasses.replace(s, path=path) for s in split.shards if s.path == url]
    left_out = [dataclasses.replace(d, path=path) for d in split.damages if d.path == url]
    copied = dataclasses.replace(split, shards=tuple(shards), damages=tuple(left_out))
    return bool(verify(copied))


def _patiently(call: Callable[[], None]) -> None:
    """Calls until s3:// answers. The watchdog of a task ends it if that takes too long."""
    while True:
        try:
            return call()
        except RefusedError:
            raise
        except UnavailableError as error:
            log.warning("Data cannot be read: %s. Trying again.", error)


def _runs(blocks: Int64s) -> Iterator[tuple[int, int]]:
    """Runs [first, last) of consecutive numbers of `blocks`, each for one request."""
    for first, last in _near(blocks * _BLOCK_BYTES, (blocks + 1) * _BLOCK_BYTES):
        yield int(blocks[first]), int(blocks[last - 1]) + 1


def _near(begins: Int64s, ends: Int64s) -> Iterator[tuple[int, int]]:
    """Indices [first, last) of ranges that are near to each other, for one request."""
    first = 0
    for i in range(1, len(begins) + 1):
        is_last = i == len(begins)
        if (
            is_last
            or not 0 <= begins[i] - ends[i - 1] <= _GAP_BYTES
            or ends[i] - begins[first] > _REQUEST_BYTES
        ):
            yield first, i
            first = i


def _stat(path: str) -> tuple[int, float]:
    """Size and time of a file; zeros if it was removed meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(path)
        return status.st_size, status.st_mtime
    return 0, 0.0


def _is_used(path: str) -> bool:
    """Returns True if a process has this copy open."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _remove(path: str) -> None:
    for each in (path, path + _MAP):
        with contextlib.suppress(FileNotFoundError):
            os.remove(each)
