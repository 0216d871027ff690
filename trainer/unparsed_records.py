"""Finds the record that a `parse` function cannot parse, and says what to type."""

import itertools
import re
import time
from collections.abc import Sequence

import tensorflow as tf
from google.protobuf.message import DecodeError

from data.features import ExampleParse
from data.reader import Reader
from data.system.compat.autograph import autograph
from data.tfrecord.framing import BadRecord, read_records

_BATCH = 1024
_SECS = 20.0  # Much less than --stall_timeout_secs, after which a task is considered dead.
_NO_EXAMPLE = "Could not parse example input"
_OF_PARSE = re.compile(
    rf"Key: .+?(?:, Index: \d+)?\.  |Feature: .+? \(data type|{_NO_EXAMPLE}|"
    r"Error in user-defined function passed to"  # Of a dataset.
)
_FEATURE = re.compile(r"Key: (.+?)(?:, Index: \d+)?\.  |Feature: (.+?) \(data type")


def message_of(error: tf.errors.OpError | UnicodeDecodeError) -> str:
    """TensorFlow's message without the bytes of a record, which may not be text."""
    if isinstance(error, UnicodeDecodeError):
        message = error.object.decode(errors="replace")
    else:
        message = str(error.message)
    return message.partition(", value: ")[0] if _NO_EXAMPLE in message else message


def unparsed(message: str, readers: Sequence[Reader]) -> str:
    """Names the first record that cannot be parsed, its features, and how to read the wrong one.

    `message` is TensorFlow's. Empty if the error is about something else. Records are parsed in the
    order of the files until one fails, for _SECS at most.
    """
    if not _OF_PARSE.search(message):
        return ""
    deadline = time.monotonic() + _SECS
    return next(filter(None, (_first_of(reader, deadline) for reader in readers)), "")


def _first_of(reader: Reader, deadline: float) -> str:
    signature = [tf.TensorSpec([None], tf.string)]
    parse = tf.function(autograph(reader.parse), input_signature=signature, autograph=False)

    def fault_of(records: Sequence[bytes]) -> str:
        try:
            parse(tf.constant(records))
        except (tf.errors.InvalidArgumentError, UnicodeDecodeError) as error:
            return message_of(error)
        return ""

    parsed = b""
    try:
        for shard in reader.split.shards:
            begin = int(shard.offsets[0])
            records = read_records(shard.path, begin, shard.end, shard.first_record)
            numbered = enumerate(records, shard.first_record)
            while batch := list(itertools.islice(numbered, _BATCH)):
                if time.monotonic() > deadline:
                    return ""
                if fault_of([record for _, record in batch]):
                    for number, record in batch:
                        if fault := fault_of([record]):
                            what = _described(fault, record, parsed, reader)
                            return f"\n  {shard.path}: record {number} {what}"
                        parsed = record
                parsed = batch[-1][1]
    except BadRecord:
        pass
    return ""


def _described(fault: str, record: bytes, parsed: bytes, reader: Reader) -> str:
    """What is wrong with `record`; `parsed` is the record before it, or empty."""
    try:
        features = tf.train.Example.FromString(record).features.feature
        others = tf.train.Example.FromString(parsed).features.feature
    except DecodeError:
        return f"({len(record):,} bytes) is no tf.train.Example."
    if not (found := _FEATURE.search(fault)):
        return f"is the first that cannot be parsed. It has: {', '.join(sorted(features))}."
    name = found[1] or found[2]
    if name in features:
        said = f"stores feature {name!r} as {_stored(features[name])}."
        if name in others and _values(others[name]) != _values(features[name]):
            number, kind = _values(others[name])
            said += f" The record before it has {number} value(s) of {kind}: write them alike."
            if kind == _values(features[name])[1]:
                said += (
                    f" Or read it with tf.io.RaggedFeature(tf.{kind}), and pad it to one length, "
                    "here 20: x.to_tensor(shape=[None, 20])."
                )
        return said
    said = f"has no feature {name!r}. It has: {', '.join(sorted(features)) or 'none'}."
    if name in others and not isinstance(reader.parse, ExampleParse):
        number, kind = _values(others[name])
        value = {"int64": "0", "float32": "0.0"}.get(kind, '""')
        shape, default = ("[]", value) if number == 1 else (f"[{number}]", f"[{value}] * {number}")
        said += (
            f" Other records have it as {number} value(s) of {kind}. If it may be missing: "
            f"tf.io.FixedLenFeature({shape}, tf.{kind}, default_value={default})."
        )
    return said


def _values(feature: tf.train.Feature) -> tuple[int, str]:
    """The number of values and their dtype."""
    kind = feature.WhichOneof("kind")
    number = len(getattr(feature, kind).value) if kind else 0
    return number, {"int64_list": "int64", "float_list": "float32"}.get(kind, "string")


def _stored(feature: tf.train.Feature) -> str:
    """How a record stores a feature, and how to read it."""
    number, dtype = _values(feature)
    shape = "[]" if number == 1 else f"[{number}]"
    advice = (
        f"{number} value(s) of {dtype}: read it with tf.io.FixedLenFeature({shape}, tf.{dtype})"
    )
    if dtype == "string":
        num_bytes = len(feature.bytes_list.value[0]) if number else 0
        advice += (
            f". If its {num_bytes:,} bytes are numbers, then tf.io.decode_raw(value, tf.float32), "
            "or with another dtype of features.json. "
            "The default parse does this for the records of data.prepare: leave `parse` out"
        )
    return advice
