"""CRC-32C of many records at once, by arrays.

    whole_frames(frames)                # one call of google_crc32c for all of them

A record's data are followed by their CRC. For a thousand frames of one length, a thousand calls
take longer than the bytes themselves. But the CRC of all frames end to end follows from the CRCs
that are stored in them, because appending to a message is a linear map of its CRC, over GF(2):

    crc(a + b) = shift(crc(a), len(b)) ^ crc(b)

(M. Adler, crc32_combine of zlib). So what the CRC of all bytes should be is computed from the
stored CRCs, and compared with what it is. Damage of one record is found as surely as by that
record's own CRC: its error is moved by a bijection, and to zero only from zero.
"""

import functools

import google_crc32c
import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]
Uint32s = npt.NDArray[np.uint32]

HEADER_BYTES = 12
FOOTER_BYTES = 4
FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES  # Of a record's framing alone.

_ONES = np.uint32(0xFFFFFFFF)
_MASK = np.uint32(0xA282EAD8)
_BITS = 32


def masked(crcs: Uint32s) -> Uint32s:
    """CRCs as TFRecord files store them (tensorflow/core/lib/hash/crc32c.h)."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + _MASK


def unmasked(stored: Uint32s) -> Uint32s:
    """The CRCs that `masked` was given."""
    rotated = stored - _MASK
    return (rotated >> np.uint32(17)) | (rotated << np.uint32(15))


def framed(record: bytes) -> bytes:
    """A record as it lies in a TFRecord file."""
    length = len(record).to_bytes(8, "little")
    return b"".join((length, _stored(length), record, _stored(record)))


def _stored(message: bytes) -> bytes:
    crc = int(google_crc32c.value(message))
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return ((rotated + int(_MASK)) & 0xFFFFFFFF).to_bytes(4, "little")


def first_bad_header(block: bytes | memoryview, starts: Int64s) -> int | None:
    """The first of `starts` whose 8 bytes of length do not fit the 4 bytes of CRC after them."""
    data = np.frombuffer(block, np.uint8)
    headers = data[starts[:, None] + np.arange(HEADER_BYTES)]
    crc = np.full(len(headers), _ONES, np.uint32)
    for i in range(8):
        crc = _TABLE[(crc ^ headers[:, i]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    stored = np.ascontiguousarray(headers[:, 8:]).view("<u4").reshape(-1)
    bad = np.flatnonzero(masked(~crc) != stored)
    return int(bad[0]) if len(bad) else None


def whole_frames(frames: Uint8s) -> bool:
    """Whether all frames, uint8 [n, frame_bytes], are whole records of that length.

    A frame is 12 bytes of header, data, and 4 bytes of CRC.
    """
    num_frames, frame_bytes = frames.shape
    header = _header(frame_bytes - FRAME_BYTES)
    if not num_frames or (frames[:, :HEADER_BYTES] != header).any():
        return not num_frames
    data_bytes = frame_bytes - FRAME_BYTES
    crc_of_header = np.array([google_crc32c.value(header.tobytes())], np.uint32)
    stored = np.ascontiguousarray(frames[:, -FOOTER_BYTES:]).view("<u4").reshape(-1)
    # A register of 32 bits takes in 4 bytes by XOR, then moves on by 4.
    before = unmasked(stored) ^ _shifted(crc_of_header, data_bytes)
    crcs = _shifted(before ^ stored ^ _ONES, FOOTER_BYTES) ^ _ONES
    bits = np.unpackbits(crcs.astype("<u4").view(np.uint8), bitorder="little")
    images = _images(frame_bytes, 1 << (num_frames - 1).bit_length())
    # A product takes a third of the time of choosing by the bits.
    should_be = np.bitwise_xor.reduce(images[-num_frames:].reshape(-1) * bits)
    return int(should_be) == int(google_crc32c.value(frames))


@functools.lru_cache(maxsize=64)
def _header(data_bytes: int) -> Uint8s:
    """What stands before data of that length: uint8 [12]."""
    length = data_bytes.to_bytes(8, "little")
    return np.frombuffer(length + _stored(length), np.uint8)


def _shifted(crcs: Uint32s, num_bytes: int) -> Uint32s:
    """What each CRC becomes where `num_bytes` zero bytes are appended, but for their own CRC."""
    table = _shift_table(num_bytes)
    byte = np.uint32(0xFF)
    low = table[0][crcs & byte] ^ table[1][(crcs >> np.uint32(8)) & byte]
    high = table[2][(crcs >> np.uint32(16)) & byte] ^ table[3][crcs >> np.uint32(24)]
    shifted: Uint32s = low ^ high
    return shifted


@functools.lru_cache(maxsize=256)
def _shift_table(num_bytes: int) -> Uint32s:
    """The linear map of `_shifted` by each byte of a CRC: uint32 [4, 256]."""
    values = np.arange(256, dtype=np.uint32) << np.arange(0, _BITS, 8, dtype=np.uint32)[:, None]
    if num_bytes == 0:
        return values
    if num_bytes == 1:
        moved: Uint32s = _TABLE[values & np.uint32(0xFF)] ^ (values >> np.uint32(8))
        return moved
    half = _shifted(_shifted(values, num_bytes // 2), num_bytes // 2)
    return _shifted(half, 1) if num_bytes % 2 else half


@functools.lru_cache(maxsize=32)
def _images(frame_bytes: int, num_frames: int) -> Uint32s:
    """Where each bit goes of the CRC of the first, second, ... frame: uint32 [num_frames, 32].

    `num_frames` is a power of two. The last frame's stay where they are.
    """
    if num_frames == 1:
        return np.uint32(1) << np.arange(_BITS, dtype=np.uint32)[np.newaxis]
    later = _images(frame_bytes, num_frames // 2)
    return np.concatenate([_shifted(later, frame_bytes * (num_frames // 2)), later])


def _table() -> Uint32s:
    """Castagnoli's polynomial, reflected: RFC 3720, appendix B.4."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ (np.uint32(0x82F63B78) * (table & np.uint32(1)))
    return table


_TABLE = _table()
