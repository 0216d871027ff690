"""A folder of class folders of images: DIR/CLASS/IMAGE.png, or DIR/train/CLASS/... and DIR/test/.

The encoded bytes are kept as they are. Classes are the names of the folders, sorted. Before
anything is written the head of every image is read, for its format and size; held in memory are the
paths.
"""

import dataclasses
import functools
import os
import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from data.files import DataError
from data.sources import (
    SPLIT_NAMES,
    Options,
    Source,
    SourceSplit,
    check_chosen,
    refuse_fraction,
    required,
    test_chooser,
)
from data.sources.examples import example_bytes, feature_files, image, label

_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg"}
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
# By colour type: grey, -, RGB, palette, grey and alpha, -, RGBA. A palette is of RGB colours.
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_JPEG, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
# Start of frame: baseline, progressive and the rarer kinds; C4, C8 and CC mean other things.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_IGNORED = ("Thumbs.db", "desktop.ini")


@dataclasses.dataclass(frozen=True)
class _Image:
    """An image on disk. `name`: CLASS/FILE."""

    path: str
    name: str
    class_number: int


def source(name: str, directory: str | None, options: Options) -> Source:
    """The PNG and JPEG files below `directory`, with the names of their classes.

    Split by folders train/, test/ (and val/, ...) where there is train/; otherwise each image is a
    test image with probability `test_fraction`, by its name and `seed`.

    Raises:
        DataError: there are no class folders, an empty one, a file that is no whole PNG or JPEG, or
            a class that only the test split has.
    """
    directory = required(directory, name, "a folder of class folders of PNG or JPEG files")
    folders = _folders(directory)
    if "train" in folders:
        refuse_fraction(options, f"{directory} has train/, so its folders are the splits")
        unknown = [folder for folder in folders if folder not in SPLIT_NAMES]
        if unknown:
            raise DataError(
                f"{directory} has train/, so its folders are splits ({', '.join(SPLIT_NAMES)}); "
                f"{unknown[0]} is none. Move it away, or give the directory of the classes alone."
            )
        classes = _folders(os.path.join(directory, "train"))
        found = {split: _images(os.path.join(directory, split), classes) for split in folders}
    else:
        classes = folders
        is_test = test_chooser(options)
        images = _images(directory, classes)
        found = {
            "train": [item for item in images if not is_test(item.name)],
            "test": [item for item in images if is_test(item.name)],
        }
    if not classes:
        raise DataError(
            f"{directory} has no class folders. Needed is DIR/CLASS/IMAGE.png, or "
            "DIR/train/CLASS/IMAGE.png and DIR/test/CLASS/IMAGE.png"
        )
    formats, sizes, channels = set(), set(), set()
    num_bytes = {}
    for split, images in found.items():
        num_bytes[split] = 0
        for item in images:
            file_format, height, width, depth = _head(item.path)
            formats.add(file_format)
            sizes.add((height, width))
            channels.add(depth)
            num_bytes[split] += os.path.getsize(item.path) + 80
    # Last, because a file that is no image is the greater trouble.
    if "train" not in folders:
        check_chosen(options, {split: len(items) for split, items in found.items()}, directory)
    height, width = sizes.pop() if len(sizes) == 1 else (-1, -1)
    # Where they differ all are decoded as RGB; grey with alpha too, which few models take.
    depth = channels.pop() if len(channels) == 1 and channels <= {1, 3, 4} else 3
    encoding = formats.pop() if len(formats) == 1 else ""
    nodes = {"image": image((height, width, depth), encoding), "label": label(len(classes))}
    return Source(
        name,
        {
            split: SourceSplit(len(images), num_bytes[split], functools.partial(_examples, images))
            for split, images in found.items()
        },
        feature_files(nodes, {"label": classes}),
    )


def _examples(images: Sequence[_Image], first: int, last: int) -> Iterator[bytes]:
    for item in images[first:last]:
        with open(item.path, "rb") as file:
            content = file.read()
        if content.startswith(_PNG):
            is_whole = _PNG_END in content
        else:
            # Behind the head, because a preview in it is an image too, with an end of its own.
            with open(item.path, "rb") as file:
                _head_of_jpeg(file, item.path)
                is_whole = content.find(_JPEG_END, file.tell()) >= 0
        if not is_whole:
            raise DataError(f"{item.path} is cut short: copy it again, or remove it.")
        yield example_bytes({"image": content, "label": item.class_number})


def _images(directory: str, classes: Sequence[str]) -> list[_Image]:
    """Every image of a directory of class folders, by class and name."""
    unknown = set(_folders(directory)) - set(classes)
    if unknown:
        raise DataError(
            f"{directory} has class {min(unknown)!r}, of which there is nothing to train on: "
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
            if os.path.splitext(file)[1].lower() not in _FORMATS or not os.path.isfile(path):
                raise DataError(
                    f"{path} is none of {', '.join(_FORMATS)}, which a class folder may hold: "
                    "convert it, or remove it."
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
    """What desktops leave in folders."""
    return name.startswith(".") or name in _IGNORED


def _head(path: str) -> tuple[str, int, int, int]:
    """Format, height, width and channels of an image, by its first bytes, not by its name.

    Raises:
        DataError: it is no PNG or JPEG.
    """
    with open(path, "rb") as file:
        begin = file.read(26)
        if begin.startswith(_PNG) and begin[12:16] == b"IHDR" and len(begin) == 26:
            width, height, _, colour = struct.unpack_from(">IIBB", begin, 16)
            if colour in _PNG_CHANNELS:
                return "png", height, width, _PNG_CHANNELS[colour]
        if begin.startswith(_JPEG):
            file.seek(0)
            return ("jpeg", *_head_of_jpeg(file, path))
    raise DataError(
        f"{path} is neither PNG nor JPEG: it begins with {begin[:8].hex(' ') or 'nothing'}. "
        "Convert it, or remove it."
    )


def _head_of_jpeg(file: BinaryIO, path: str) -> tuple[int, int, int]:
    """Height, width and channels as they are decoded; ITU T.81, annex B.

    Leaves the file behind its frame header.
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
            # The four of CMYK are decoded to RGB.
            return height, width, min(channels, 3)
        file.seek(struct.unpack(">H", length)[0] - 2, os.SEEK_CUR)
