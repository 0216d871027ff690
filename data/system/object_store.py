"""Objects at s3:// with the calls of a file system, by obstore (the optional extra `s3`).

    object_store.put("s3://bucket/run/config.json", b"{}")
    object_store.names_in("s3://bucket/run")            # ["config.json"]

An object is written in one operation: a reader sees the old one or the new one, complete. There are
no directories: a directory is the objects whose names begin with its name and "/".

obstore reads the environment variables of other S3 programs: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, AWS_SKIP_SIGNATURE. Without
keys it asks the machine's metadata service. Requests that fail for a passing reason are repeated,
up to AWS_MAX_ATTEMPTS times (10) within 30 s. Do not fork a process that has called this module.
"""

import contextlib
import errno
import functools
import io
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from data.system.errors import RunFailed, UsageError
from data.system.extras import missing

if TYPE_CHECKING:
    from obstore.store import S3Store

SCHEME = "s3://"

_ATTEMPTS = 10
_RETRY_SECS = 30.0
_SILENT_SECS = 20.0  # A connection on which nothing arrives for this long is given up.
_REQUEST_SECS = 600.0
_READ_AHEAD_BYTES = 8 << 20  # Of a file that is read from its begin to its end.
_PART_BYTES = 8 << 20
_PARTS_IN_FLIGHT = 4
_NO_SUCH_BUCKET = "NoSuchBucket"
_TOKEN = "trainer-token"  # In the metadata of an object of `put_new`: who made it.
_STATUS = re.compile(r"status code: (\d+)")
# The reason of object_store for a redirect, which S3 sends if the bucket is in another region.
_REDIRECT = "redirect without LOCATION"
# Codes that it sends for the same reason. Requests with other codes may work later.
_OTHER_REGION = (
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "InvalidRegionName",
    "PermanentRedirect",
)
_METADATA_SERVICE = "/latest/api/token"
_NO_KEYS = (
    "There are no keys for s3://. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "AWS_SKIP_SIGNATURE=true for a public bucket"
)


class UnavailableError(RunFailed, ConnectionError):
    """The object store does not answer, or not well. The same call may work later."""

    exit_code = 75

    def __str__(self) -> str:
        said = ": ".join(str(part) for part in (self.filename, self.strerror) if part)
        return said or super().__str__()


class RefusedError(UnavailableError, UsageError):
    """The object store refuses the request, and would refuse it again. The message says why."""

    exit_code = 2


class MissingObstoreError(OSError):
    """obstore is not installed. The message says what to type."""


def require() -> ModuleType:
    """The module obstore. Raises MissingObstoreError if it is not installed."""
    try:
        import obstore
    except ImportError as error:
        message = missing("s3://", "obstore", "s3")
        raise MissingObstoreError(errno.ENOENT, message) from error
    return obstore


def exists(url: str) -> bool:
    """Returns True if there is such an object or directory."""
    with contextlib.suppress(FileNotFoundError):
        stamp(url)
        return True
    return is_dir(url)


def is_dir(url: str) -> bool:
    """Returns True if there is an object in this directory."""
    with contextlib.suppress(FileNotFoundError), _object(url) as (store, key):
        return any(store.list(f"{key}/" if key else None, chunk_size=1))
    return False


def names_in(url: str) -> list[str]:
    """Names of the objects and directories in a directory.

    Raises FileNotFoundError if there are none.
    """
    with _object(url) as (store, key):
        listing = store.list_with_delimiter(key or None)
        paths = [*listing["common_prefixes"], *(item["path"] for item in listing["objects"])]
        if not paths:
            raise FileNotFoundError(errno.ENOENT, f"There is nothing in {url}")
        return [path.rstrip("/").rpartition("/")[2] for path in paths]


def stamp(url: str) -> tuple[int, int]:
    """Size and time of the last change, in ns."""
    with _object(url) as (store, key):
        return _stamp_of(store.head(key))


def stamps_in(url: str) -> dict[str, tuple[int, int]]:
    """`stamp` of each object in a directory, by name: one request for 1,000 objects."""
    with _object(url) as (store, key):
        items = store.list_with_delimiter(key or None)["objects"]
        return {item["path"].rpartition("/")[2]: _stamp_of(item) for item in items}


def _stamp_of(item: Mapping[str, Any]) -> tuple[int, int]:
    return item["size"], int(item["last_modified"].timestamp()) * 10**9


def open_object(url: str) -> BinaryIO:
    """Opens an object to read bytes, in large requests: made for reading in sequence."""
    num_bytes, _ = stamp(url)
    return cast(BinaryIO, io.BufferedReader(_ObjectReader(url, num_bytes), _READ_AHEAD_BYTES))


def get_range(url: str, begin: int, end: int) -> memoryview:
    """Bytes [begin, end) of an object. Raises OSError if it is shorter."""
    with _object(url) as (store, key):
        content = memoryview(store.get_range(key, start=begin, end=end))
    if len(content) != end - begin:
        raise OSError(errno.EIO, f"The object ends before byte {end}", url)
    return content


def put(url: str, content: bytes) -> None:
    """Writes an object."""
    with _object(url) as (store, key):
        store.put(key, content, use_multipart=False)


def put_new(url: str, content: bytes) -> bool:
    """Writes an object if there is none; returns False, and changes nothing, if there is one.

    A request whose answer is lost is repeated, and then finds the object that it has made: the
    object's token says so.
    """
    token = os.urandom(16).hex()
    with _object(url) as (store, key):
        try:
            store.put(key, content, mode="create", use_multipart=False, attributes={_TOKEN: token})
        except require().exceptions.AlreadyExistsError:
            with contextlib.suppress(FileNotFoundError):  # Its owner has removed it.
                return bool(store.get(key).attributes.get(_TOKEN) == token)
            return False
    return True


def upload(path: str, url: str, on_part: Callable[[], None] = lambda: None) -> None:
    """Writes a local file as an object. Calls `on_part` before each part of some MB."""
    with _object(url) as (store, key), _ReportingFile(path, on_part) as file:
        store.put(key, file, chunk_size=_PART_BYTES, max_concurrency=_PARTS_IN_FLIGHT)


def upload_tree(directory: str, url: str, on_part: Callable[[], None] = lambda: None) -> None:
    """`upload` of all files in a local directory, and below it, to the directory `url`."""
    for path in sorted(path for path in Path(directory).rglob("*") if path.is_file()):
        upload(str(path), f"{url}/{path.relative_to(directory).as_posix()}", on_part)


def download(url: str, path: str) -> None:
    """Writes an object to a local file."""
    with _object(url) as (store, key), open(path, "wb") as file:
        for block in store.get(key).stream(_PART_BYTES):
            file.write(block)


def remove(url: str) -> None:
    """Removes an object; there need not be one."""
    with _object(url) as (store, key):
        store.delete(key)


def remove_tree(url: str) -> None:
    """Removes all objects in a directory."""
    with _object(url) as (store, key):
        for listing in store.list(f"{key}/"):
            store.delete([item["path"] for item in listing])


class _ReportingFile(io.FileIO):
    """A file that is read; calls `on_read` before each read."""

    def __init__(self, path: str, on_read: Callable[[], None]) -> None:
        super().__init__(path)
        self._on_read = on_read

    def read(self, size: int | None = -1, /) -> bytes:
        self._on_read()
        return super().read(size)


class _ObjectReader(io.RawIOBase):
    """Reads an object that had `num_bytes` when it was opened; each read is a request."""

    def __init__(self, url: str, num_bytes: int) -> None:
        self._url, self._num_bytes, self._at = url, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begins = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}
        self._at = begins[whence] + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # Any buffer.
        end = min(self._at + len(buffer), self._num_bytes)
        if end <= self._at:
            return 0
        content = get_range(self._url, self._at, end)
        buffer[: len(content)] = content
        self._at = end
        return len(content)


@functools.cache
def _store(bucket: str) -> "S3Store":
    from obstore.store import S3Store

    endpoint = os.environ.get(_endpoint_name(), "")
    attempts = os.environ.get("AWS_MAX_ATTEMPTS", "")
    return S3Store(
        bucket,
        config={"endpoint": endpoint} if endpoint else None,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "read_timeout": timedelta(seconds=_SILENT_SECS),
            "timeout": timedelta(seconds=_REQUEST_SECS),
        },
        retry_config={
            "max_retries": max(0, int(attempts) - 1) if attempts.isdigit() else _ATTEMPTS - 1,
            "retry_timeout": timedelta(seconds=_RETRY_SECS),
        },
    )


def _endpoint_name() -> str:
    """The variable that has the address of the store, or should have it."""
    return "AWS_ENDPOINT_URL_S3" if os.environ.get("AWS_ENDPOINT_URL_S3") else "AWS_ENDPOINT_URL"


@contextlib.contextmanager
def _object(url: str) -> Iterator[tuple["S3Store", str]]:
    """The store and the key of `url`. Within it, errors of obstore become OSErrors.

    Raises UsageError for a key that obstore would refuse or change.
    """
    errors = require().exceptions
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    key = key.rstrip("/")
    has_bad_name = key and {"", ".", ".."} & {*key.split("/")}
    # "Cs": bytes that are no UTF-8.
    if not bucket or has_bad_name or {"Cc", "Cs"} & {*map(unicodedata.category, url)}:
        raise UsageError(
            f"{url!r} is no address of an object. Give s3://BUCKET/NAME/NAME: names that are not "
            "empty, '.' or '..', in UTF-8, without control characters, with one '/' between them."
        )
    try:
        yield _store(bucket), key
    except FileNotFoundError as error:
        if error.errno is not None:
            raise
        missing = "bucket" if _NO_SUCH_BUCKET in str(error) else "object"
        raise FileNotFoundError(errno.ENOENT, f"There is no such {missing}", url) from None
    except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, _first_line(error), url) from None
    except errors.BaseError as error:
        if _METADATA_SERVICE in str(error):
            raise PermissionError(errno.EACCES, _NO_KEYS, url) from None
        if _NO_SUCH_BUCKET in str(error):
            raise FileNotFoundError(errno.ENOENT, "There is no such bucket", url) from None
        if _status(error) in (401, 403):
            raise PermissionError(errno.EACCES, _first_line(error), url) from None
        if _is_refused(error):
            name = _endpoint_name()
            region, endpoint = map(os.environ.get, ("AWS_REGION", name))
            raise RefusedError(
                errno.EINVAL,
                f"{_first_line(error)}. The store refuses this request, and would refuse it again. "
                f"Set AWS_REGION (now {region}) to the region of the bucket, and {name} "
                f"(now {endpoint}) to the address of its store",
                url,
            ) from None
        raise UnavailableError(errno.EIO, _first_line(error), url) from None


def _status(error: Exception) -> int:
    """The HTTP status in the message of obstore; 0 if there is none."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _is_refused(error: Exception) -> bool:
    """Returns True if the same request would fail again, because the bucket is in another region.

    The answer to HEAD has no code: with a token, which may have expired, it may have other reasons.
    """
    text = str(error)
    has_token = "AWS_SESSION_TOKEN" in os.environ or "AWS_ACCESS_KEY_ID" not in os.environ
    return (
        _REDIRECT in text
        or any(f"<Code>{code}<" in text for code in _OTHER_REGION)
        or (_status(error) == 400 and "performing HEAD" in text and not has_token)
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
