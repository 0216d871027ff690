"""A real S3 server, moto's, in a process; and what is in its bucket.

with S3Server() as server:
    url = server.url("digits")              # s3://bucket/digits
    os.environ.update(server.env())
"""

import contextlib
import gc
import importlib.util
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Self

import pytest

from benchmarks.slow_link import SlowLink
from data.system import object_store
from strategies.cluster.ports import free_ports

BUCKET = "bucket"

needs_s3 = pytest.mark.skipif(
    importlib.util.find_spec("moto") is None or importlib.util.find_spec("obstore") is None,
    reason="needs moto and obstore: pip install -e '.[s3,test]' -c constraints.txt",
)


class S3Server:
    """moto's server with an empty bucket."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Self:
        address = f"http://127.0.0.1:{self.port}/{BUCKET}"
        request = urllib.request.Request(address, method="PUT")
        deadline = time.monotonic() + 100
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request).close()
                return self
            assert self._process.poll() is None, "moto's server has ended"
            assert time.monotonic() < deadline, "moto's server does not answer"
            time.sleep(0.1)

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()

    def url(self, key: str) -> str:
        return f"s3://{BUCKET}/{key}"

    def env(self, port: int = 0) -> dict[str, str]:
        """The environment of a user of this server; `port`: of a proxy in front of it."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_MAX_ATTEMPTS": "2",
        }


@pytest.fixture(scope="module")
def link() -> Iterator[SlowLink]:
    """The link to a server, for calls in the process of the tests."""
    with S3Server() as server, SlowLink(server.port) as link, pytest.MonkeyPatch.context() as patch:
        for name, value in server.env(link.port).items():
            patch.setenv(name, value)
        object_store._store.cache_clear()
        yield link
    object_store._store.cache_clear()


@pytest.fixture
def url(link: SlowLink, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty directory."""
    link.is_open = True
    yield f"s3://{BUCKET}/{request.node.name}"
    link.is_open = True
    # The end of an iterator waits for its reads. Freed in the thread of the link, it would wait for
    # this thread itself.
    gc.collect()
