"""The third backend of files, against moto's server."""

import contextlib
import errno
import http.server
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.slow_link import SlowLink
from data.system import files, object_store
from data.system.errors import UsageError
from data.system.object_store import MissingObstoreError, RefusedError, UnavailableError
from data.system.scratch import scratch_dir
from tests.commands import run_python
from tests.s3 import link, needs_s3, url
from trainer.run_files import local_dir
from trainer.run_record.report_upload import ReportUpload, uploading_reports

__all__ = ["link", "url"]  # Fixtures.
pytestmark = [pytest.mark.quick, needs_s3]


def test_files_are_written_listed_read_and_removed(url: str) -> None:
    assert not files.exists(url)
    assert not files.is_dir(url)
    with pytest.raises(FileNotFoundError):
        files.names_in(url)
    files.make_dirs(url)
    files.replace_file(f"{url}/a.json", b"{}")
    files.replace_file(f"{url}/a.json", b"[12]")
    files.replace_file(f"{url}/below/b", b"b")
    assert files.exists(url)
    assert files.is_dir(url)
    assert files.exists(f"{url}/a.json")
    assert not files.is_dir(f"{url}/a.json")
    assert not files.exists(f"{url}/a")  # A prefix of a name is not a directory.
    assert sorted(files.names_in(url)) == ["a.json", "below"]
    assert files.names_in("s3://bucket/") != []
    assert files.read_text(f"{url}/a.json") == "[12]"
    assert files.num_bytes_of(f"{url}/a.json") == files.stamp(f"{url}/a.json")[0] == 4
    assert files.sizes_of([f"{url}/a.json"]) == [4]
    files.remove_file(f"{url}/a.json")
    files.remove_file(f"{url}/a.json")
    assert files.names_in(url) == ["below"]
    files.remove_tree(url)
    assert not files.exists(url)
    assert files.stamp(f"{url}/a.json") == (-1, -1)


def test_large_file_is_uploaded_downloaded_and_read_at_any_place(url: str, tmp_path: Path) -> None:
    content = os.urandom(20 << 20)
    (tmp_path / "large").write_bytes(content)
    parts: list[int] = []
    object_store.upload_tree(str(tmp_path), url, lambda: parts.append(1))
    assert len(parts) >= 3, "progress was not reported"
    object_store.download(f"{url}/large", str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == content
    with files.open_file(f"{url}/large") as file:
        file.seek(19 << 20)
        assert file.read() == content[19 << 20 :]
        file.seek(5)
        assert file.read(10) == content[5:15]
    with pytest.raises(OSError, match="ends before byte"):
        object_store.get_range(f"{url}/large", len(content) - 1, len(content) + 1)


def test_missing_bucket_is_named_and_is_not_a_failure_of_the_store(url: str) -> None:
    with pytest.raises(FileNotFoundError):
        files.read_text("s3://no-bucket-here/file")
    for call in (files.names_in, lambda path: files.replace_file(path, b"")):
        with pytest.raises(FileNotFoundError, match="no such bucket"):
            call("s3://no-bucket-here/file")
    assert not files.exists("s3://no-bucket-here/file")


def test_store_without_an_answer_is_unavailable_and_works_later(url: str, link: SlowLink) -> None:
    link.is_open = False
    calls = files.read_text, files.names_in, files.exists, files.remove_tree
    for call in (*calls, lambda path: files.replace_file(path, b"")):
        with pytest.raises(UnavailableError):
            call(f"{url}/file")
    link.is_open = True
    files.replace_file(f"{url}/file", b"later")
    assert files.read_text(f"{url}/file") == "later"


class Answers:
    """A store that gives one answer after the other, and the last one to all later requests."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        left, self.requests = list(answers), 0
        self.token = ""
        store = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                store.requests += 1
                if self.command == "PUT" and store.token == "own":
                    store.token = self.headers.get("x-amz-meta-trainer-token", "")
                status, body = left.pop(0) if len(left) > 1 else left[0]
                if self.command == "GET" and store.token:
                    status, body = 200, "content"
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
                self.send_header("ETag", '"1"')
                self.send_header("x-amz-meta-trainer-token", store.token)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body.encode())

            do_GET = do_HEAD = do_PUT = answer

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Answers]]:
    """Makes a store that gives these answers."""
    with contextlib.ExitStack() as stack:

        def make(*statuses: tuple[int, str]) -> Answers:
            store = stack.enter_context(contextlib.closing(Answers(*statuses)))
            keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "r-1"}
            more = {"AWS_ENDPOINT_URL": store.address, "AWS_MAX_ATTEMPTS": "2"}
            for name, value in {**keys, **more}.items():
                monkeypatch.setenv(name, value)
            object_store._store.cache_clear()
            return store

        yield make
    object_store._store.cache_clear()


@pytest.mark.parametrize("token", ["own", "of another"])
def test_object_whose_first_answer_was_lost_belongs_to_who_made_it(
    token: str, answers: Callable[..., Answers]
) -> None:
    store = answers((500, ""), (412, ""))
    store.token = token
    assert object_store.put_new("s3://b/lock", b"chief 0") == (token == "own")
    assert store.requests == 3


def code(name: str) -> str:
    return f"<Error><Code>{name}</Code></Error>"


@pytest.mark.parametrize(
    ("status", "body", "exit_code"),
    [
        (301, "", 2),
        (400, code("AuthorizationHeaderMalformed"), 2),
        (301, code("PermanentRedirect"), 2),
        (405, "", 75),
        (501, code("NotImplemented"), 75),
        (400, code("ExpiredToken"), 75),
        (400, code("TokenRefreshRequired"), 75),
        (400, code("ThrottlingException"), 75),
        (400, code("XAmzContentSHA256Mismatch"), 75),
        (400, code("RequestTimeout"), 75),
        (408, "", 75),
        (429, "", 75),
        (503, "", 75),
    ],
)
def test_request_that_would_be_refused_again_is_a_mistake(
    status: int, body: str, exit_code: int, answers: Callable[..., Answers]
) -> None:
    store = answers((status, body))
    for call in (lambda: files.names_in("s3://b/x"), lambda: files.replace_file("s3://b/x", b"")):
        with pytest.raises(UnavailableError) as raised:
            call()
        assert raised.value.exit_code == exit_code
        advice = ("AWS_REGION (now r-1)", f"AWS_ENDPOINT_URL (now {store.address})")
        assert [words in str(raised.value) for words in advice] == [exit_code == 2] * 2


def test_head_without_a_body_may_be_of_a_token_that_has_expired(
    answers: Callable[..., Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = answers((400, ""))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.address)
    with pytest.raises(RefusedError, match=rf"AWS_ENDPOINT_URL_S3 \(now {store.address}\)"):
        files.exists("s3://b/x")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t")
    with pytest.raises(UnavailableError) as raised:
        files.exists("s3://b/x")
    assert raised.value.exit_code == 75


def test_keys_that_may_not_be_listed_are_a_lack_of_permission(
    answers: Callable[..., Answers],
) -> None:
    answers((403, ""))
    with pytest.raises(PermissionError):
        files.names_in("s3://b/x")


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/a//b",
        "s3://b//a",
        "s3://b/./a",
        "s3://b/a/..",
        "s3:///a",
        "s3://b/a\nb",
        "s3://b/\udcff",
    ],
)
def test_key_that_would_be_another_is_a_mistake(url: str) -> None:
    for call in (files.exists, files.names_in, lambda path: files.replace_file(path, b"")):
        with pytest.raises(UsageError, match="is no address of an object"):
            call(url)


@pytest.mark.parametrize("name", ["\u3000", "a\xa0b", "\U0001f469\u200d\U0001f4bb"])
def test_name_with_unusual_spaces_or_joined_signs_is_a_key(url: str, name: str) -> None:
    files.replace_file(f"{url}/{name}", b"1")
    assert files.names_in(url) == [name]


@pytest.mark.slow
def test_store_of_tensorflow_that_does_not_answer_is_unavailable() -> None:
    code = """
from data.system import files
from data.system.object_store import UnavailableError
from trainer.checkpoints.file_checks import contents_of
def call_all(*calls):
    for call in calls:
        try:
            print(call("gs://bucket/directory"))
        except UnavailableError as error:
            print("unavailable:", error)
call_all(files.exists, files.is_dir, files.names_in, files.read_text)
files.exists = lambda path: True  # The store falls silent before the file is read.
call_all(files.read_text, contents_of)
"""
    # TensorFlow tries again for minutes after most errors of a network, but not after this one.
    done = run_python("-c", code, https_proxy="http://no-host.invalid:9", NO_GCE_CHECK="true")
    lines = done.stdout.splitlines()
    assert len(lines) == 6, done
    for line in lines:
        assert re.match("unavailable: Error executing an HTTP request: .+ resolve proxy", line)


@pytest.mark.slow
def test_url_without_a_file_system_is_a_mistake() -> None:
    with pytest.raises(files.DataError, match=r"scheme 'abc' not implemented .* s3://"):
        files.exists("abc://host/file")


def test_missing_package_is_explained(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingObstoreError, match="pip install") as raised:
        files.exists(url)
    assert raised.value.errno == errno.ENOENT


def test_left_scratch_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / f"trainer-scratch-{os.getuid()}-left"
    left.mkdir()
    (left / "variables").write_text("half")
    with scratch_dir() as first:
        assert not left.exists()
        with scratch_dir() as second:  # The first is in use, and stays.
            assert sorted(map(str, tmp_path.iterdir())) == sorted([first, second])
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(60)
def test_what_others_put_in_place_of_a_scratch_directory_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, temporary = tmp_path / "others", tmp_path / "tmp"
    others.mkdir()
    temporary.mkdir()
    (others / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    prefix = f"trainer-scratch-{os.getuid()}-"
    os.mkfifo(temporary / f"{prefix}fifo")
    (temporary / f"{prefix}link").symlink_to(others)
    (temporary / f"{prefix}file").touch()
    with scratch_dir() as directory:
        assert os.listdir(directory) == []
    assert len(os.listdir(temporary)) == 3
    assert (others / "file").exists()


def test_files_that_change_are_uploaded_and_failures_are_made_up_for(
    url: str, link: SlowLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "old.txt").write_text("of an earlier run")
    upload = ReportUpload(str(tmp_path), url, ["metrics.jsonl", "tensorboard", "old.txt"])
    (tmp_path / "tensorboard" / "train").mkdir(parents=True)
    (tmp_path / "tensorboard" / "train" / "events").write_text("1")
    (tmp_path / "metrics.jsonl").write_text("one\n")
    (tmp_path / "other").write_text("not mirrored")
    upload.sync()
    assert sorted(files.names_in(url)) == ["metrics.jsonl", "tensorboard"]
    assert files.read_text(f"{url}/tensorboard/train/events") == "1"
    link.is_open = False
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\n")
    with caplog.at_level(logging.WARNING):
        upload.sync()
        upload.sync()
    assert len(caplog.records) == 1
    link.is_open = True
    upload.sync()
    assert files.read_text(f"{url}/metrics.jsonl") == "one\ntwo\n"
    assert len(caplog.records) == 1


def test_resumed_run_appends_to_the_reports_in_the_bucket(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files.replace_file(f"{url}/metrics.jsonl", b"one\n")
    lines = Path(local_dir(url), "metrics.jsonl")
    assert lines.is_relative_to(tmp_path / "runs" / "bucket")
    with uploading_reports(url, ["metrics.jsonl"], resumes="metrics.jsonl"):
        assert lines.read_text() == "one\n"
        lines.write_text("one\ntwo\n")
    assert files.read_text(f"{url}/metrics.jsonl") == "one\ntwo\n"
    with uploading_reports(str(tmp_path), ["metrics.jsonl"]):
        assert local_dir(str(tmp_path)) == str(tmp_path)
