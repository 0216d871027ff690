"""Data sets of tensorflow-datasets. Its records are copied unchanged."""

import logging
import os
import re
import socket
import sys
import urllib.parse
import urllib.request

import importlib_resources  # noqa: F401  # The builders of tensorflow-datasets need it.
import tensorflow_datasets as tfds

from data.prepare.sources import Options, Source, SourceSplit
from data.prepare.sources.rewrite import copied, metadata_files
from data.system.files import DataError


def source(name: str, path: str, options: Options) -> Source:
    """The data set that tensorflow-datasets calls `name` ("mnist", "cifar10", "mnist/3.0.1").

    A data set that is already prepared is read from its directory. Otherwise tensorflow-datasets
    prepares it in its own directory (TFDS_DATA_DIR, or ~/tensorflow_datasets), from the files in
    directory `path`, or by download if that is "". `path` may also hold prepared data sets.
    """
    is_prepared = path != "" and os.path.isdir(os.path.join(path, re.split("[/:]", name)[0]))
    try:
        builder = tfds.builder(name, data_dir=path if is_prepared else None)
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"tensorflow-datasets has no {name!r} ({str(error).splitlines()[0]}). "
            "The names: https://www.tensorflow.org/datasets/catalog"
        ) from None
    if not builder.is_prepared():
        _prepare(builder, name, "" if is_prepared else path)
    info = builder.info
    if info.file_format.value != "tfrecord":
        raise DataError(
            f"{builder.data_path} holds {info.file_format.value} files; needed is tfrecord. "
            f"Give a --source without {name}, so that it is prepared again, or convert it with "
            "python -m tensorflow_datasets.scripts.convert_format"
        )
    splits = {
        split: SourceSplit(
            split_info.num_examples,
            split_info.num_bytes,
            copied([os.fspath(path) for path in split_info.filepaths], split_info.shard_lengths),
        )
        for split, split_info in info.splits.items()
    }
    return Source(builder.name, splits, metadata_files(os.fspath(builder.data_path)))


def _prepare(builder: tfds.core.DatasetBuilder, name: str, manual_dir: str) -> None:
    # Checked first: a failed download takes minutes of retries and prints hundreds of warnings.
    if unreachable := _unreachable_hosts(builder, manual_dir):
        raise DataError(
            f"{name} must be downloaded, and {', '.join(unreachable)} cannot be reached from here. "
            f"{_what_to_bring(builder, name)}"
        )
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    try:
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(manual_dir=manual_dir or None)
        )
    # Each data set has its own code there, which can raise any error.
    except Exception as error:
        raise DataError(
            f"tensorflow-datasets could not prepare {name} "
            f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]}). "
            f"{_what_to_bring(builder, name)}"
        ) from error


def _unreachable_hosts(builder: tfds.core.DatasetBuilder, manual_dir: str) -> list[str]:
    """Hosts whose names cannot be resolved, of the files that are not in `manual_dir`."""
    if urllib.request.getproxies():
        return []  # The proxy resolves names, not this machine.
    hosts = {
        urllib.parse.urlsplit(url).hostname
        for url, info in builder.url_infos.items()
        if not (manual_dir and os.path.isfile(os.path.join(manual_dir, info.filename or "")))
    }
    unreachable = []
    for host in sorted(filter(None, hosts)):
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            unreachable.append(host)
    return unreachable


def _what_to_bring(builder: tfds.core.DatasetBuilder, name: str) -> str:
    urls = list(builder.url_infos)
    more = f" and {len(urls) - 8} more" if len(urls) > 8 else ""
    bring = ", ".join(urls[:8]) + more or "the files that its page in the TFDS catalog names"
    instructions = (builder.MANUAL_DOWNLOAD_INSTRUCTIONS or "").strip()
    return (
        f"Bring {bring} into a directory DIR (under the names they have there), then: "
        f"python -m data.prepare tfds:{name} --source=DIR"
        + (f"\nIts own instructions: {instructions}" if instructions else "")
        + f"\nOr bring {builder.data_path}, prepared on a machine that has the network."
    )
