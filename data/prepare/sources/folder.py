"""Folders of images by class: DIR/CLASS/IMAGE.png, or DIR/train/CLASS/... and DIR/test/CLASS/...

The encoded bytes are stored unchanged. Classes are the names of the folders, sorted. The header of
every image is read before anything is written, for its format and size. Memory holds the paths.

The images may be in a folder of the class folder: CLASS/images/IMAGE.jpg. Files of labels beside
images (.txt, .csv, .xml, .json) are left out. Folders without images may have texts: CLASS/*.txt.
"""

import functools
import itertools
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

from data.prepare.sources import (
    Options,
    Source,
    SourceSplit,
    check_utf8,
    divided,
    is_ignored,
    refuse_fraction,
    split_paths,
    typed_path,
)
from data.prepare.sources.examples import Classes, Node, feature_files, image, text
from data.system.files import DataError
from data.tfrecord.examples import example_bytes
from data.tfrecord.shard_names import SPLIT_NAMES, word_of

_EXTENSIONS = (".png", ".jpg", ".jpeg")
_TEXT = ".txt"
_SHOWN = 20
_LEFT_OUT = (_TEXT, ".csv", ".xml", ".json")
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
# By colour type: grey, -, RGB, palette, grey and alpha, -, RGBA. A palette is of RGB colours.
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_JPEG, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
# Start of frame: baseline, progressive and the rarer kinds; C4, C8 and CC mean other things.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class _File(NamedTuple):
    """An image or a text on disk. `name`: CLASS/FILE."""

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
    """The PNG and JPEG files below directory `path`, or its texts, with the names of their classes.

    Split by folders train/, test/ (and val/, ...) where there is train/; otherwise each file is a
    test example with probability `test_fraction`, by its name and `seed`.
    """
    folders = _folders(path)
    directories = split_paths(path)
    if "train" in directories:
        refuse_fraction(options, f"{path} has train/, so its folders are the splits")
        known = map(os.path.basename, directories.values())
        if unknown := sorted(set(folders).difference(known)):
            raise DataError(
                f"{path} has train/, so its folders are splits ({', '.join(SPLIT_NAMES)}); "
                f"{unknown[0]} is not one of them. Move it away, or give the directory of classes: "
                f"{typed_path(directories['train'])}"
            )
    else:
        directories = {"": path}
    train_dir = directories.get("train", path)
    classes = _folders(train_dir)
    if not classes:
        raise DataError(
            f"{path} has no class folders. Needed is DIR/CLASS/IMAGE.png, or "
            "DIR/train/CLASS/IMAGE.png and DIR/test/CLASS/IMAGE.png"
        )
    check_utf8(os.path.join(train_dir, name) for name in classes)
    found = {split: _files(where, classes, train_dir) for split, where in directories.items()}
    num_found = sum(map(len, found.values()))
    splits, is_text = _wanted(found)
    notes = [f"{path}: classes {', '.join(classes[:_SHOWN])}{', ...' * (len(classes) > _SHOWN)}"]
    if len(classes) == 1:
        notes.append(
            f"{path}: there is one class, so nothing to tell apart. Files of labels are not read: "
            "sort the files into a folder for each class"
        )
    for split, files in splits.items():
        there = {item.class_number for item in files}
        if alone := [name for number, name in enumerate(classes) if number not in there]:
            notes.append(f"{path}: split {split!r} has no example of class {', '.join(alone)}")
    if left_out := num_found - sum(map(len, splits.values())):
        notes.append(f"{path}: {left_out:,} file(s) beside the images are left out")
    if is_text:
        inputs = """--config.data.inputs="('text',)\""""
        notes.append(f"{path}: texts. Train with {inputs}, and keras.Input with dtype string")
    node = text() if is_text else _image_node(splits)
    if "" in splits:  # Divided last, so that a file that is not an image is reported first.
        files = splits[""]
        masks = divided((item.name for item in files), options, path)
        splits = {split: list(itertools.compress(files, mask)) for split, mask in masks.items()}
    return Source(
        name,
        {split: _split(files) for split, files in splits.items()},
        feature_files(
            {"text" if is_text else "image": node},
            {"label": Classes(len(classes), tuple(classes))},
        ),
        notes,
    )


def _wanted(found: Mapping[str, Sequence[_File]]) -> tuple[dict[str, list[_File]], bool]:
    """The images of each split, or its texts if there is no image; and True for texts.

    Raises DataError for a file that is neither, and for a class folder without any.
    """
    endings = {_ending(item) for files in found.values() for item in files}
    is_text = _TEXT in endings and not endings & {*_EXTENSIONS}
    wanted = (_TEXT,) if is_text else _EXTENSIONS
    splits = {}
    for split, files in found.items():
        splits[split] = [item for item in files if _ending(item) in wanted]
        with_images = {item.class_number for item in splits[split]}
        for item in files:
            if _ending(item) not in (wanted if is_text else (*wanted, *_LEFT_OUT)):
                raise DataError(
                    f"{item.path} is not one of {', '.join(wanted)}, which a class folder may "
                    "hold: convert it, or remove it."
                )
            if item.class_number not in with_images:
                raise DataError(
                    f"{os.path.dirname(item.path)} has no images: fill it, or remove it."
                )
    return splits, is_text


def _image_node(splits: Mapping[str, Sequence[_File]]) -> Node:
    """Describes the images, from the header of each."""
    paths = {_head(item.path): item.path for images in splits.values() for item in images}
    dtypes = {head.dtype: path for head, path in paths.items()}
    if len(dtypes) > 1:
        raise DataError(
            f"{dtypes['uint16']} has 16 bits for each value, and {dtypes['uint8']} has 8 or fewer. "
            "Convert the images to the same number of bits."
        )
    formats, heights, widths, depths, _ = map(set, zip(*paths, strict=True))
    size = (*heights, *widths) if len(heights) == len(widths) == 1 else (-1, -1)
    # Images with different channels are decoded as RGB; grey with alpha too, which few models take.
    depth = depths.pop() if len(depths) == 1 and depths <= {1, 3, 4} else 3
    return image((*size, depth), formats.pop() if len(formats) == 1 else "", *dtypes)


def _split(images: Sequence[_File]) -> SourceSplit:
    num_bytes = sum(os.path.getsize(item.path) + 80 for item in images)
    return SourceSplit(len(images), num_bytes, functools.partial(_examples, images))


def _examples(files: Sequence[_File], first: int, last: int) -> Iterator[bytes]:
    for item in files[first:last]:
        label = {"label": item.class_number}
        with open(item.path, "rb") as file:
            content = file.read()
            if _ending(item) == _TEXT:
                yield example_bytes({"text": _checked(content, item.path), **label})
                continue
            if content.startswith(_PNG):
                is_complete = _PNG_END in content
            else:
                # Searched behind the header: a preview in the header has an end marker too.
                _head_of_jpeg(file, item.path)
                is_complete = content.find(_JPEG_END, file.tell()) >= 0
        if not is_complete:
            raise DataError(f"{item.path} is cut short: copy it again, or remove it.")
        yield example_bytes({"image": content, **label})


def _checked(content: bytes, path: str) -> bytes:
    """Returns `content`, or raises DataError if it is not UTF-8."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: {error.reason} at offset {error.start:,}. Convert such files, "
            "from Latin-1 for example: iconv -f LATIN1 -t UTF-8 FILE > OTHER_FILE"
        ) from None
    return content


def _files(directory: str, classes: Sequence[str], train_dir: str) -> list[_File]:
    """The files of each class in the directory of a split, or in that without splits."""
    here = _folders(directory)
    unknown = sorted(set(here) - set(classes))
    if unknown or not here:
        what = f"class {unknown[0]!r}, which train does not have" if here else "no class folders"
        raise DataError(
            f"{directory} has {what}: the classes of train are {', '.join(classes[:_SHOWN])}. Sort "
            "its files into such folders; or take train alone, which is then divided: "
            f"{typed_path(train_dir)}"
        )
    files = []
    for number, class_name in enumerate(classes):
        if class_name not in here:
            continue
        folder = os.path.join(directory, class_name)
        folders, names = _listed(folder)
        paths = [os.path.join(folder, name) for name in names]
        if len(folders) == 1 and not any(name.lower().endswith(_EXTENSIONS) for name in names):
            folder = os.path.join(folder, folders[0])
            folders, names = _listed(folder)
            paths += [os.path.join(folder, name) for name in names]
        if folders and any(word_of("train", name) for name in classes):
            raise DataError(
                f"{directory} has {', '.join(classes[:3])}, which hold folders. If these are "
                "splits, rename them: train and test."
            )
        if folders:
            raise DataError(
                f"{folder} has folders ({', '.join(folders[:3])}), and a class folder holds "
                f"images. If these are classes or splits: {typed_path(folder)}"
            )
        if not paths:
            raise DataError(f"{folder} has no images: fill it, or remove it.")
        files += [_File(file, f"{class_name}/{os.path.basename(file)}", number) for file in paths]
    return files


def _ending(item: _File) -> str:
    return os.path.splitext(item.path)[1].lower()


def _folders(directory: str) -> list[str]:
    return _listed(directory)[0]


def _listed(directory: str) -> tuple[list[str], list[str]]:
    """The names of the folders and of the files in a directory, without hidden ones."""
    folders: list[str] = []
    names: list[str] = []
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if not is_ignored(entry.name):
                (folders if entry.is_dir() else names).append(entry.name)
    return folders, names


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
