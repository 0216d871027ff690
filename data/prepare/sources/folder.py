"""Folders of images by class: DIR/CLASS/IMAGE.png, or DIR/train/CLASS/... and DIR/test/CLASS/...

The encoded bytes are stored unchanged. Classes are the names of the folders, sorted. The header of
every image is read before anything is written, for its format and size. Memory holds the paths.
"""

import functools
import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from data.prepare.sources import Options, Source, SourceSplit, divided, refuse_fraction
from data.prepare.sources.examples import Classes, feature_files, image
from data.system.files import DataError
from data.tfrecord.examples import example_bytes
from data.tfrecord.shard_names import SPLIT_NAMES

_EXTENSIONS = (".png", ".jpg", ".jpeg")
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
# By colour type: grey, -, RGB, palette, grey and alpha, -, RGBA. A palette is of RGB colours.
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_JPEG, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
# Start of frame: baseline, progressive and the rarer kinds; C4, C8 and CC mean other things.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_IGNORED = ("Thumbs.db", "desktop.ini")


class _Image(NamedTuple):
    """An image on disk. `name`: CLASS/FILE."""

    path: str
    name: str
    class_number: int


class _Head(NamedTuple):
    """What the header of an image says."""

    encoding: str
    height: int
    width: int
    num_channels: int
    dtype: str


def source(name: str, path: str, options: Options) -> Source:
    """The PNG and JPEG files below directory `path`, with the names of their classes.

    Split by folders train/, test/ (and val/, ...) where there is train/; otherwise each image is a
    test image with probability `test_fraction`, by its name and `seed`.
    """
    folders = _folders(path)
    classes = folders
    if "train" in folders:
        refuse_fraction(options, f"{path} has train/, so its folders are the splits")
        if unknown := [folder for folder in folders if folder not in SPLIT_NAMES]:
            raise DataError(
                f"{path} has train/, so its folders are splits ({', '.join(SPLIT_NAMES)}); "
                f"{unknown[0]} is not one of them. Move it away, or give the directory of classes."
            )
        classes = _folders(os.path.join(path, "train"))
        splits = {split: _images(os.path.join(path, split), classes) for split in folders}
    else:
        splits = {"": _images(path, classes)}
    if not classes:
        raise DataError(
            f"{path} has no class folders. Needed is DIR/CLASS/IMAGE.png, or "
            "DIR/train/CLASS/IMAGE.png and DIR/test/CLASS/IMAGE.png"
        )
    paths = {_head(item.path): item.path for images in splits.values() for item in images}
    dtypes = {head.dtype: path for head, path in paths.items()}
    if len(dtypes) > 1:
        raise DataError(
            f"{dtypes['uint16']} has 16 bits for each value, and {dtypes['uint8']} has 8 or fewer. "
            "Convert the images to the same number of bits."
        )
    if "" in splits:  # Divided last, so that a file that is not an image is reported first.
        images = splits[""]
        masks = divided((item.name for item in images), options, path)
        splits = {split: list(itertools.compress(images, mask)) for split, mask in masks.items()}
    formats, heights, widths, depths, _ = map(set, zip(*paths, strict=True))
    size = (*heights, *widths) if len(heights) == len(widths) == 1 else (-1, -1)
    # Images with different channels are decoded as RGB; grey with alpha too, which few models take.
    depth = depths.pop() if len(depths) == 1 and depths <= {1, 3, 4} else 3
    encoding = formats.pop() if len(formats) == 1 else ""
    nodes = {"image": image((*size, depth), encoding, *dtypes)}
    return Source(
        name,
        {split: _split(images) for split, images in splits.items()},
        feature_files(nodes, {"label": Classes(len(classes), tuple(classes))}),
    )


def _split(images: Sequence[_Image]) -> SourceSplit:
    num_bytes = sum(os.path.getsize(item.path) + 80 for item in images)
    return SourceSplit(len(images), num_bytes, functools.partial(_examples, images))


def _examples(images: Sequence[_Image], first: int, last: int) -> Iterator[bytes]:
    for item in images[first:last]:
        with open(item.path, "rb") as file:
            content = file.read()
            if content.startswith(_PNG):
                is_complete = _PNG_END in content
            else:
                # Searched behind the header: a preview in the header has an end marker too.
                _head_of_jpeg(file, item.path)
                is_complete = content.find(_JPEG_END, file.tell()) >= 0
        if not is_complete:
            raise DataError(f"{item.path} is cut short: copy it again, or remove it.")
        yield example_bytes({"image": content, "label": item.class_number})


def _images(directory: str, classes: Sequence[str]) -> list[_Image]:
    if unknown := set(_folders(directory)) - set(classes):
        raise DataError(
            f"{directory} has class {min(unknown)!r}, which train does not have: "
            f"the classes of train are {', '.join(classes)}."
        )
    images = []
    for number, class_name in enumerate(classes):
        folder = os.path.join(directory, class_name)
        if not os.path.isdir(folder):
            continue
        files = [file for file in sorted(os.listdir(folder)) if not _is_ignored(file)]
        if not files:
            raise DataError(f"{folder} has no images: fill it, or remove it.")
        for file in files:
            path = os.path.join(folder, file)
            if os.path.splitext(file)[1].lower() not in _EXTENSIONS or not os.path.isfile(path):
                raise DataError(
                    f"{path} is not one of {', '.join(_EXTENSIONS)}, which a class folder may "
                    "hold: convert it, or remove it."
                )
            images.append(_Image(path, f"{class_name}/{file}", number))
    return images


def _folders(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not _is_ignored(e.name))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"--source={directory} is not a directory.") from None


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name in _IGNORED


def _head(path: str) -> _Head:
    with open(path, "rb") as file:
        begin = file.read(26)
        if begin.startswith(_PNG) and begin[12:16] == b"IHDR" and len(begin) == 26:
            width, height, num_bits, colour = struct.unpack_from(">IIBB", begin, 16)
            if colour in _PNG_CHANNELS:
                dtype = "uint16" if num_bits == 16 else "uint8"
                return _Head("png", height, width, _PNG_CHANNELS[colour], dtype)
        if begin.startswith(_JPEG):
            file.seek(0)
            return _Head("jpeg", *_head_of_jpeg(file, path), "uint8")
    raise DataError(
        f"{path} is neither PNG nor JPEG: it begins with {begin[:8].hex(' ') or 'nothing'}. "
        "Convert it, or remove it."
    )


def _head_of_jpeg(file: BinaryIO, path: str) -> tuple[int, int, int]:
    """Height, width and channels after decoding; ITU T.81, annex B.

    Leaves the file position behind the frame header.
    """
    file.seek(2)
    while True:
        marker = file.read(2)
        while marker == b"\xff\xff":  # Fill bytes.
            marker = b"\xff" + file.read(1)
        length = file.read(2)
        if len(marker) < 2 or marker[0] != 0xFF or len(length) < 2:
            raise DataError(f"{path} is a damaged JPEG file: copy it again, or remove it.")
        if marker[1] in _JPEG_FRAMES:
            frame = file.read(6).ljust(6, b"\0")
            _, height, width, channels = struct.unpack(">BHHB", frame)
            # CMYK (four channels) is decoded to RGB.
            return height, width, min(channels, 3)
        file.seek(struct.unpack(">H", length)[0] - 2, os.SEEK_CUR)
