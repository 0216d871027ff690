"""CRCs of many records at once find what the CRC of each would find."""

import gc
import io
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from data.tfrecord import crc
from data.tfrecord.byte_ranges import Buffers


def frames_of(messages: list[bytes]) -> np.ndarray:
    """The frames that TensorFlow writes for messages of one length: uint8 [n, frame bytes]."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "frames"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for message in messages:
                writer.write(message)
        content = np.frombuffer(path.read_bytes(), np.uint8)
    return content.reshape(len(messages), -1).copy()


@st.composite
def equal_messages(draw: st.DrawFn) -> list[bytes]:
    size = draw(st.integers(0, 40))
    return draw(st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=20))


@given(messages=equal_messages(), data=st.data())
def test_frames_are_complete_as_written_and_not_with_any_bit_flipped(
    messages: list[bytes], data: st.DataObject
) -> None:
    frames = frames_of(messages)
    assert crc.are_complete(frames)
    order = data.draw(st.permutations(range(len(frames))))
    assert crc.are_complete(frames[order])
    bit = data.draw(st.integers(0, frames.size * 8 - 1))
    frames.reshape(-1)[bit // 8] ^= 1 << bit % 8
    assert not crc.are_complete(frames)


def test_damage_of_two_records_does_not_cancel_out() -> None:
    frames = frames_of([b"some data of a record"] * 300)
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = frames.copy()
        # The same change in two records, which would cancel out in a plain sum.
        change = random.integers(1, 256, dtype=np.uint8)
        for record in random.choice(300, 2, replace=False):
            damaged[record, 15] ^= change
        assert not crc.are_complete(damaged)


@given(values=st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_unmasking_undoes_masking(values: list[int]) -> None:
    crcs = np.array(values, np.uint32)
    assert np.array_equal(crc.unmasked(crc.masked(crcs)), crcs)


def test_headers_that_tensorflow_writes_are_good_ones() -> None:
    sizes = [0, 1, 300, 70_000]
    content = io.BytesIO()
    starts = []
    for size in sizes:
        starts.append(content.tell())
        content.write(frames_of([bytes(size)]).tobytes())
    block = bytearray(content.getvalue())
    assert crc.first_bad_header(bytes(block), np.array(starts)) is None
    block[starts[2] + 1] ^= 1
    assert crc.first_bad_header(bytes(block), np.array(starts)) == 2


def test_buffer_is_lent_again_only_when_no_view_of_it_is_left() -> None:
    buffers = Buffers()
    first = buffers.array((4, 8))
    view = first.reshape(32)[3:9]
    address = first.ctypes.data
    del first
    gc.collect()
    other = buffers.array((4, 8))
    assert other.ctypes.data != address, "a view of the first is still there"
    del view
    gc.collect()
    assert buffers.array((2, 16)).ctypes.data == address
    assert buffers.array((400, 16)).shape == (400, 16)


def test_tensorflow_holds_a_buffer_for_as_long_as_its_tensors_live() -> None:
    buffers = Buffers()
    addresses = []

    def generate():  # type: ignore[no-untyped-def]
        for number in range(40):
            array = buffers.array((1000,))
            addresses.append(array.ctypes.data)
            array[:] = number
            yield array

    dataset = tf.data.Dataset.from_generator(
        generate, output_signature=tf.TensorSpec([None], tf.uint8)
    )
    kept = list(dataset.prefetch(3).take(20))
    rest = [int(tensor[999]) for tensor in dataset.skip(20)]
    assert [int(tensor[0]) for tensor in kept] == [int(tensor[999]) for tensor in kept]
    assert [int(tensor[0]) for tensor in kept] == list(range(20))
    assert rest == list(range(20, 40))
    assert len(set(addresses)) < len(addresses), "some were used again"
