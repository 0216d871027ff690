"""Records of one layout are cut into the values that tf.io.parse_example finds in them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from data.disk_reader import DiskReader
from data.features import ExampleParse, image_raw_parse
from data.order import Order
from data.reader import Reader
from data.tfrecord.examples import Value, example_bytes
from data.tfrecord.fixed_layout import Column, Layout, find_layout
from tests.shards import write_shards
from tests.unit.test_split import flip

INT64 = st.integers(-(2**63), 2**63 - 1)
# Of one byte as varints, so that records are often of one length.
SMALL = st.integers(0, 127)
FLOAT = st.floats(width=32)
KINDS: list[Literal["bytes", "int64", "float"]] = ["bytes", "int64", "float"]


@st.composite
def columns_and_examples(draw: st.DrawFn) -> tuple[dict[str, Column], list[dict[str, Value]]]:
    """Some columns, and examples that have them and a feature that is not asked for."""
    columns = {}
    values: dict[str, st.SearchStrategy[Value]] = {
        "unasked": st.lists(SMALL, min_size=1, max_size=2)
    }
    for name in draw(
        st.lists(st.sampled_from(["a", "b", "long/name", "é"]), min_size=1, unique=True)
    ):
        kind = draw(st.sampled_from(KINDS))
        count = draw(st.integers(1, 3))
        if kind == "bytes":
            columns[name] = Column(kind, num_bytes=count)
            values[name] = st.binary(min_size=count, max_size=count)
            continue
        columns[name] = Column(kind, draw(st.sampled_from([(count,), (1, count)])))
        if kind == "float":
            values[name] = st.lists(FLOAT, min_size=count, max_size=count)
        else:
            item = draw(st.sampled_from([SMALL, INT64]))
            values[name] = st.lists(item, min_size=count, max_size=count)
    return columns, draw(st.lists(st.fixed_dictionaries(values), min_size=1, max_size=6))


def parsed(columns: dict[str, Column], serialized: list[bytes]) -> dict[str, np.ndarray]:
    """What tf.io.parse_example finds; strings as rows of bytes."""
    spec = {name: column.on_disk() for name, column in columns.items()}
    found = {key: value.numpy() for key, value in tf.io.parse_example(serialized, spec).items()}
    for name, column in columns.items():
        if column.kind == "bytes":
            found[name] = np.array([list(value) for value in found[name]], np.uint8)
    return found


def rows_of(serialized: list[bytes]) -> np.ndarray:
    return np.array([list(record) for record in serialized], np.uint8)


@given(drawn=columns_and_examples())
def test_slices_are_what_parse_example_finds_in_every_record_that_fits(
    drawn: tuple[dict[str, Column], list[dict[str, Value]]],
) -> None:
    columns, examples = drawn
    serialized = [example_bytes(example) for example in examples]
    layout = find_layout(serialized[0], columns)
    if layout is None:
        return
    similar = [record for record in serialized if len(record) == len(serialized[0])]
    fitting = [record for record in similar if layout.fits(rows_of([record]))]
    assert serialized[0] in fitting
    assert layout.fits(rows_of(similar)) == (len(fitting) == len(similar))
    sliced = layout.slice(tf.constant(rows_of(fitting)))
    for name, value in parsed(columns, fitting).items():
        assert sliced[name].dtype == value.dtype
        assert sliced[name].numpy().tobytes() == value.tobytes(), name
        assert sliced[name].shape == value.shape


def example_of(image: bytes, label: int) -> bytes:
    return example_bytes({"image": image, "label": label, "weights": [1.0, 2.0]})


COLUMNS = {
    "image": Column("bytes", num_bytes=8),
    "label": Column("int64"),
    "weights": Column("float", (2,)),
}


def layout_of(record: bytes) -> Layout:
    layout = find_layout(record, COLUMNS)
    assert layout is not None
    return layout


@given(data=st.data())
def test_changed_record_fits_only_if_parse_example_finds_the_slices(data: st.DataObject) -> None:
    # Any byte may change to any other: tags, lengths, names and the top bits of varints too.
    record = bytearray(example_of(b"abcdefgh", data.draw(st.sampled_from([3, 300, -1]))))
    layout = layout_of(bytes(record))
    for _ in range(data.draw(st.integers(1, 3))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    rows = rows_of([bytes(record)])
    if layout.fits(rows):
        sliced = layout.slice(tf.constant(rows))
        for name, value in parsed(COLUMNS, [bytes(record)]).items():
            assert sliced[name].numpy().tobytes() == value.tobytes()


@pytest.mark.parametrize("position", ["tag", "length", "name", "varint"])
def test_record_that_is_laid_out_otherwise_does_not_fit(position: str) -> None:
    record = example_of(b"abcdefgh", 300)
    layout = layout_of(record)
    at = {
        "tag": 0,
        "length": 1,
        "name": record.index(b"image"),
        "varint": record.index(b"\xac\x02"),  # 300: its first byte says that another follows.
    }[position]
    changed = bytearray(record)
    changed[at] ^= 0x80
    assert layout.fits(rows_of([record, record]))
    assert not layout.fits(rows_of([record, bytes(changed)]))
    assert not layout.fits(rows_of([record + b"\0"]))


def test_there_is_no_layout_where_parse_example_would_refuse_or_values_vary_in_length() -> None:
    record = example_of(b"abcdefgh", 3)
    for name, column in {
        "missing": Column("int64"),
        "label": Column("float"),
        "weights": Column("float", (3,)),
        "image": Column("bytes"),  # Of any length.
    }.items():
        assert find_layout(record, {**COLUMNS, name: column}) is None
    assert find_layout(record, {**COLUMNS, "image": Column("bytes", num_bytes=9)}) is None
    mixed = example_bytes({"label": [1, 300]})
    assert find_layout(mixed, {"label": Column("int64", (2,))}) is None
    for damaged in (b"", b"\x0a", record[:-1], record + b"\x0a\x00", b"no example"):
        assert find_layout(damaged, COLUMNS) is None
    once = example_bytes({"x": 3})
    twice = b"\x0a" + bytes([2 * (len(once) - 2)]) + once[2:] * 2
    tf.train.Example.FromString(twice)  # It is one, and the last of each name counts.
    assert find_layout(once, {"x": Column("int64")}) is not None
    assert find_layout(twice, {"x": Column("int64")}) is None
    unpacked = b"\x0a\x0d\x0a\x0b\x0a\x01x\x12\x06\x1a\x04\x08\x01\x08\x02"
    assert tf.train.Example.FromString(unpacked).features.feature["x"].int64_list.value == [1, 2]
    assert find_layout(unpacked, {"x": Column("int64", (2,))}) is None


def reader_of(directory: Path, examples: list[bytes], parse: ExampleParse) -> Reader:
    split = write_shards(examples, str(directory), "toy", "train", 2, len(examples))
    order = Order(split.shard_lengths, split.chunk_examples, 20, 5, 3, seed=1, shuffle=True)
    return Reader(split, order, parse)


def forms(reader: Reader, num_batches: int) -> list[str]:
    """In which form each group was read."""
    groups = DiskReader(reader)._blocks(0, num_batches, range(5), lambda *_: {})
    names = ("frames", "serialized", "unread")
    return [next(n for n in names if n in group and group[n].size) for group in groups]


def images_of(count: int, label: int = 5) -> list[bytes]:
    random = np.random.default_rng(0)
    return [
        example_bytes({"image_raw": random.bytes(12), "label": label, "pixels": 12})
        for _ in range(count)
    ]


def test_reader_slices_records_of_one_layout_and_parses_others_alike(tmp_path: Path) -> None:
    parse = image_raw_parse((2, 3, 2))
    similar = images_of(200)
    # Of the same length, but with its features in another order.
    fields = [similar[0][:2], *_entries(similar[0])]
    other = b"".join([fields[0], *reversed(fields[1:])])
    assert len(other) == len(similar[0])
    assert tf.train.Example.FromString(other) == tf.train.Example.FromString(similar[0])
    longer = example_bytes({"image_raw": bytes(12), "label": 500, "pixels": 12})
    for name, examples, expected in (
        ("similar", similar, {"frames"}),
        ("one-other", [*similar[:150], other, *similar[151:]], {"frames", "serialized"}),
        ("one-longer", [*similar[:150], longer, *similar[151:]], {"serialized"}),
    ):
        reader = reader_of(tmp_path / name, examples, parse)
        assert set(forms(reader, 12)) == expected, name
        plain = dataclasses.replace(reader, parse=lambda serialized: parse(serialized))
        assert set(forms(plain, 12)) == {"serialized"}
        batches = [DiskReader(r).batches(0, range(5), 12) for r in (reader, plain)]
        for found, wanted in zip(*batches, strict=True):
            for one, two in zip(found, wanted, strict=True):
                assert one.dtype == two.dtype
                assert one.shape == two.shape
                assert one.numpy().tobytes() == two.numpy().tobytes()


def _entries(record: bytes) -> list[bytes]:
    """The map entries of an example of less than 128 bytes."""
    entries, at = [], 2
    while at < len(record):
        end = at + 2 + record[at + 1]
        entries.append(record[at:end])
        at = end
    return entries


def test_label_out_of_range_is_refused_in_slices_too(tmp_path: Path) -> None:
    stock = image_raw_parse((2, 3, 2))

    def decode(raw: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        known = tf.reduce_all(raw["label"] < 10)
        with tf.control_dependencies([tf.debugging.Assert(known, ["label is not below 10"])]):
            return stock.decode(raw)

    parse = dataclasses.replace(stock, decode=decode)
    wrong = example_bytes({"image_raw": bytes(12), "label": 11, "pixels": 12})
    reader = reader_of(tmp_path, [*images_of(150), wrong, *images_of(49)], parse)
    assert set(forms(reader, 10)) == {"frames"}
    with pytest.raises(tf.errors.InvalidArgumentError, match="label is not below 10"):
        list(DiskReader(reader).batches(0, range(5), 10))


@pytest.mark.parametrize("where", ["length", "crc of length", "data", "crc"])
def test_damaged_record_of_the_layout_is_found(tmp_path: Path, where: str) -> None:
    reader = reader_of(tmp_path, images_of(200), image_raw_parse((2, 3, 2)))
    shard = reader.split.shards[1]
    offset = int(shard.offsets[3])
    at = {"length": 0, "crc of length": 9, "data": 30, "crc": shard.frame_bytes - 1}[where]
    flip(shard.path, offset + at)
    with pytest.raises(tf.errors.DataLossError):
        list(DiskReader(reader).batches(0, range(5), 10))


@given(
    values=st.dictionaries(
        st.text(max_size=5),
        st.one_of(
            st.binary(max_size=300),
            INT64,
            st.floats(),
            st.lists(INT64, max_size=4),
            st.lists(st.floats(allow_nan=False), max_size=4),
        ),
        max_size=5,
    )
)
def test_examples_are_written_as_protocol_buffers_are(values: dict[str, Value]) -> None:
    example = tf.train.Example()
    for name, value in values.items():
        feature = example.features.feature[name]
        listed = [value] if isinstance(value, (int, float)) else value
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        elif any(isinstance(item, float) for item in listed):
            feature.float_list.value.extend(listed)
        else:
            feature.int64_list.value.extend(listed)
    written = example_bytes(values)
    expected = example.SerializeToString(deterministic=True)
    # Where a name begins with another one, theirs has the longer one first.
    assert tf.train.Example.FromString(written).SerializeToString(deterministic=True) == expected
    assert len(written) == len(expected)


def test_integer_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        example_bytes({"x": 2**63})
