"""Named data sets of tensorflow-datasets, as it wrote them: the records are copied, not changed."""

import logging
import os
import socket
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING

from data.files import DataError
from data.sources import Source, SourceSplit
from data.sources.rewrite import copied, metadata_files

if TYPE_CHECKING:
    import tensorflow_datasets as tfds


def source(name: str, directory: str | None, quiet: bool) -> Source:
    """The data set that tensorflow-datasets calls `name` ("mnist", "cifar10", "mnist/3.0.1").

    One that it has prepared already is read where it is. Otherwise tensorflow-datasets prepares it
    in its own directory (TFDS_DATA_DIR, or ~/tensorflow_datasets), from the files in `directory` if
    given, or by download. `directory` may also be a directory of data sets already prepared.
    `quiet`: without its progress bars.

    Raises:
        DataError: tensorflow-datasets does not know the name, or cannot get the files; says which,
            and where to put them.
    """
    import tensorflow_datasets as tfds

    prepared_there = directory is not None and os.path.isdir(
        os.path.join(directory, name.split("/")[0].split(":")[0])
    )
    try:
        builder = tfds.builder(name, data_dir=directory if prepared_there else None)
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"tensorflow-datasets has no {name!r} ({str(error).splitlines()[0]}). "
            "The names: https://www.tensorflow.org/datasets/catalog"
        ) from None
    if not builder.is_prepared():
        _prepare(builder, name, None if prepared_there else directory, quiet)
    info = builder.info
    if info.file_format.value != "tfrecord":
        raise DataError(
            f"{builder.data_path} holds {info.file_format.value} files, and needed is tfrecord. "
            f"Give a --source without {name}, so that it is prepared again, or convert it with "
            "python -m tensorflow_datasets.scripts.convert_format"
        )
    directory = os.fspath(builder.data_path)
    splits = {
        split: SourceSplit(
            split_info.num_examples,
            split_info.num_bytes,
            copied([os.fspath(path) for path in split_info.filepaths], split_info.shard_lengths),
        )
        for split, split_info in info.splits.items()
    }
    return Source(builder.name, splits, metadata_files(directory))


def _prepare(
    builder: "tfds.core.DatasetBuilder", name: str, manual_dir: str | None, quiet: bool
) -> None:
    import tensorflow_datasets as tfds

    # Where nothing can be downloaded, minutes of retries and hundreds of warnings would come first.
    unreachable = _unreachable_hosts(builder, manual_dir)
    if unreachable:
        raise DataError(
            f"{name} must be downloaded, and {', '.join(unreachable)} cannot be reached from here. "
            f"{_what_to_bring(builder, name)}"
        )
    if quiet:
        tfds.disable_progress_bar()
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    try:
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(manual_dir=manual_dir)
        )
    # Each data set has its own code there, and its own ways to fail.
    except Exception as error:
        raise DataError(
            f"tensorflow-datasets could not prepare {name} "
            f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]}). "
            f"{_what_to_bring(builder, name)}"
        ) from error


def _missing_urls(builder: "tfds.core.DatasetBuilder", manual_dir: str | None) -> list[str]:
    """What would be downloaded: every file but those at hand."""
    return [
        url
        for url, info in builder.url_infos.items()
        if not (manual_dir and os.path.isfile(os.path.join(manual_dir, info.filename or "")))
    ]


def _unreachable_hosts(builder: "tfds.core.DatasetBuilder", manual_dir: str | None) -> list[str]:
    if urllib.request.getproxies():
        return []  # The proxy resolves names, not this machine.
    hosts = {urllib.parse.urlsplit(url).hostname for url in _missing_urls(builder, manual_dir)}
    unreachable = []
    for host in sorted(host for host in hosts if host):
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            unreachable.append(host)
    return unreachable


def _what_to_bring(builder: "tfds.core.DatasetBuilder", name: str) -> str:
    urls = list(builder.url_infos)
    bring = "the files that its page in the TFDS catalog names"
    if urls:
        more = f" and {len(urls) - 8} more" if len(urls) > 8 else ""
        bring = ", ".join(urls[:8]) + more
    instructions = (builder.MANUAL_DOWNLOAD_INSTRUCTIONS or "").strip()
    return (
        f"Bring {bring} into a directory DIR (under the names they have there), then: "
        f"python -m data.prepare tfds:{name} --source=DIR"
        + (f"\nIts own instructions: {instructions}" if instructions else "")
        + f"\nOr bring {builder.data_path}, prepared on a machine that has the network."
    )
