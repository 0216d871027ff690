"""Serves a directory as the objects of a bucket: the part of S3's protocol that reading needs.

    python -m benchmarks.file_bucket --directory=DIR        # prints its port; http://HOST:PORT/any-name

For measurements. moto's server copies the complete object for each range that is asked for, which
would take the CPU that is measured.
"""

import http.server
import os
import urllib.parse
from collections.abc import Sequence
from xml.sax.saxutils import escape

from absl import app, flags

from data.system.flags import parse_flags

_TIME = "2026-01-01T00:00:00.000Z"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    directory: str

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, *, with_content: bool) -> None:
        parsed = urllib.parse.urlparse(self.path)
        query = dict(urllib.parse.parse_qsl(parsed.query))
        key = urllib.parse.unquote(parsed.path).lstrip("/").partition("/")[2]
        if not key:
            return self._send(200, self._listing(query.get("prefix", "")))
        path = os.path.join(self.directory, key)
        if not os.path.isfile(path):
            return self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        size = os.path.getsize(path)
        begin, end = 0, size
        if "Range" in self.headers:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1, size)
        content = b""
        if with_content:
            with open(path, "rb") as file:
                content = os.pread(file.fileno(), end - begin, begin)
        self._send(206 if "Range" in self.headers else 200, content, begin, end, size)

    def _send(
        self, status: int, content: bytes, begin: int = 0, end: int = -1, size: int = 0
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if end < 0 else end - begin))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", '"0"')
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        self.wfile.write(content)

    def _listing(self, prefix: str) -> bytes:
        """All objects below the directory `prefix`, which has no directories."""
        directory = os.path.join(self.directory, prefix)
        names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
        objects = "".join(
            f"<Contents><Key>{escape(prefix + name)}</Key><LastModified>{_TIME}</LastModified>"
            f"<ETag>0</ETag><Size>{os.path.getsize(os.path.join(directory, name))}</Size>"
            "</Contents>"
            for name in names
        )
        return (
            f"<ListBucketResult><KeyCount>{len(names)}</KeyCount><IsTruncated>false</IsTruncated>"
            f"{objects}</ListBucketResult>"
        ).encode()

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


def _main(argv: Sequence[str]) -> None:
    _Handler.directory = flags.FLAGS.directory
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    flags.DEFINE_string("directory", None, "The directory whose files are served.", required=True)
    app.run(_main, flags_parser=parse_flags("benchmarks.file_bucket"))
