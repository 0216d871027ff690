"""Uploads the reports of a run whose --model_dir is at s3://: they are written locally first.

    with uploading_reports("s3://bucket/runs/a", ["metrics.jsonl", "tensorboard"]) as sync:
        ...     # reports are appended to runs/bucket/runs/a/metrics.jsonl
        sync()

Objects cannot be appended to, and TensorFlow cannot write to s3://. So reports, TensorBoard files
and the logs of tasks are written below `local_dir`, and a thread uploads the files that have
changed, every 10 s, before a checkpoint is complete, and at the end. config.json, result.json and
checkpoints are written directly.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from data.system import object_store
from data.system.background import repeating
from data.system.files import exists, is_s3, join, stamp
from trainer.run_files import local_dir

log = logging.getLogger(__name__)

_SECS = 10.0


@contextlib.contextmanager
def uploading_reports(
    model_dir: str, names: Sequence[str], *, resumes: str = ""
) -> Iterator[Callable[[], None]]:
    """Uploads the files `names`, and files in directories of `names`, while the context is open.

    Yields a function that uploads the changed files now. The file `resumes` is downloaded first,
    because more is appended to it. If `model_dir` is not at s3://, nothing is done.
    """
    if not is_s3(model_dir):
        yield lambda: None
        return
    upload = ReportUpload(local_dir(model_dir), model_dir, names, resumes)
    try:
        with repeating(upload.sync, _SECS):
            yield upload.sync
    finally:
        upload.sync()
        if upload.failure:
            message = "%s lacks the last reports (%s); they are in %s."
            log.warning(message, model_dir, upload.failure, upload.directory)


class ReportUpload:
    """Uploads files that have changed since they were last uploaded, or since this was created."""

    def __init__(self, directory: str, url: str, names: Sequence[str], resumes: str = "") -> None:
        """Replaces the file `resumes` by its object. Raises OSError if that fails."""
        self.directory, self._url, self._names = Path(directory), url, names
        self.directory.mkdir(parents=True, exist_ok=True)
        if resumes:
            path, remote = self.directory / resumes, join(url, resumes)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            if exists(remote):
                object_store.download(remote, str(path))
        self._uploaded = self._stamps()
        self.failure = ""
        self._lock = threading.Lock()

    def sync(self) -> None:
        """Uploads the changed files. A failure is logged once; the next call tries again."""
        with self._lock:
            try:
                for path, changed in self._stamps().items():
                    if self._uploaded.get(path) != changed:
                        name = path.relative_to(self.directory).as_posix()
                        object_store.upload(str(path), join(self._url, name))
                        self._uploaded[path] = changed
                self.failure = ""
            except OSError as error:
                if not self.failure:
                    message = "%s: %s. Training continues; the next upload is tried."
                    log.warning(message, self._url, error)
                self.failure = str(error)

    def _stamps(self) -> dict[Path, tuple[int, int]]:
        """Size and time of the last change of each file."""
        tops = [self.directory / name for name in self._names]
        paths = [path for top in tops for path in (top, *top.rglob("*")) if path.is_file()]
        return {path: stamp(str(path)) for path in paths}
