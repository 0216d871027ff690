"""The record that `parse` cannot read is named, with what differs from others."""

import dataclasses
from pathlib import Path

import pytest
import tensorflow as tf

from data.disk_reader import DiskReader
from data.order import Order
from data.reader import Batch, Reader
from data.system.files import DataError
from data.tfrecord.crc import framed
from data.tfrecord.examples import Value, example_bytes
from data.tfrecord.split import Split, open_split
from trainer.inputs import Inputs, data_errors_explained
from trainer.unparsed_records import unparsed

GOOD: dict[str, Value] = {"x": [0.5] * 4, "label": 1, "name": b"abcd"}


def parse(serialized: tf.Tensor) -> Batch:
    columns = {
        "x": tf.io.FixedLenFeature([4], tf.float32),
        "label": tf.io.FixedLenFeature([], tf.int64),
        "name": tf.io.FixedLenFeature([], tf.string),
    }
    example = tf.io.parse_example(serialized, columns)
    return example["x"], (example["label"], tf.io.decode_raw(example["name"], tf.int32))


def parse_with_default(serialized: tf.Tensor) -> Batch:
    """As the message says."""
    feature = tf.io.FixedLenFeature([4], tf.float32, default_value=[0.0] * 4)
    x = tf.io.parse_example(serialized, {"x": feature})["x"]
    return x, x[:, 0]


def opened(directory: Path, bad: bytes, number: int) -> Split:
    """Two files of 1,500 records; `bad` is a record of the second one."""
    for file in range(2):
        listed = [example_bytes(GOOD)] * 1500
        if file:
            listed[number] = bad
        path = directory / f"train-0000{file}-of-00002"
        path.write_bytes(b"".join(map(framed, listed)))
    return open_split(str(directory), "train")


def reader_of(split: Split) -> Reader:
    order = Order(split.shard_lengths, split.chunk_examples, 50, 10, 4, seed=0, shuffle=False)
    return Reader(split, order, parse)


def with_feature(**changed: Value) -> bytes:
    return example_bytes({**GOOD, **changed})


def without(name: str) -> bytes:
    return example_bytes({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    ("bad", "number", "said"),
    [
        (
            without("x"),
            1137,
            r"record 1137 has no feature 'x'\. It has: label, name\. Other records have it as 4 "
            r"value\(s\) of float32\. .*FixedLenFeature\(\[4\], tf.float32, default_value=\[0.0\] ",
        ),
        (
            without("label"),
            0,
            r"record 0 has no feature 'label'\. It has: name, x\. .*\(\[\], tf.int64, default_",
        ),
        (without("name"), 1, r"record 1 has no feature 'name'\. .*tf.string, default_value=\"\"\)"),
        (example_bytes({}), 7, r"record 7 has no feature '.*'\. It has: none\."),
        (
            with_feature(x=[0.5] * 5),
            1499,
            r"record 1499 stores feature 'x' as 5 value\(s\) of float32: .* before it has 4 value",
        ),
        (
            with_feature(label=2.5),
            3,
            r"record 3 stores feature 'label' as 1 value\(s\) of float32: .*1 value\(s\) of int64",
        ),
        (b"\xff\xff no Example", 1100, r"record 1100 \(13 bytes\) is no tf.train.Example"),
        (with_feature(name=b"abcde"), 5, r"record 5 is the first that cannot be parsed\. It has:"),
    ],
)
def test_record_that_cannot_be_parsed_is_named_with_what_differs(
    bad: bytes, number: int, said: str, tmp_path: Path
) -> None:
    reader = reader_of(opened(tmp_path, bad, number))
    said = rf"(?s)does not suit .*\n  .*/train-00001-of-00002: {said}"
    with pytest.raises(DataError, match=said), data_errors_explained(Inputs(reader, reader)):
        list(DiskReader(reader).batches(0, range(10), 60))


def test_advice_for_a_missing_feature_works(tmp_path: Path) -> None:
    reader = reader_of(opened(tmp_path, without("x"), 1137))
    reader = dataclasses.replace(reader, parse=parse_with_default)
    labels = [label for _, label in DiskReader(reader).batches(0, range(10), 60)]
    assert int(tf.math.count_nonzero(tf.concat(labels, 0) == 0)) == 1


def test_error_of_something_else_reads_no_record(tmp_path: Path) -> None:
    reader = reader_of(opened(tmp_path, without("x"), 0))
    assert unparsed("indices[3] = 17 is not in [0, 10)", [reader]) == ""
