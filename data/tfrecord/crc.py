"""CRC-32C of TFRecord frames: of many records at once, by array operations.

    are_complete(frames)                # one call of google_crc32c for all frames

For a thousand frames of one length, a call for each costs more than the work on the bytes. But the
CRC of the concatenated frames follows from the CRCs stored in them, because appending to a message
is a linear map of its CRC, over GF(2):

    crc(a + b) = shift(crc(a), len(b)) ^ crc(b)

(M. Adler, crc32_combine of zlib). So the expected CRC of all bytes is computed from the stored
CRCs, and compared with the actual one. A CRC error of one record always changes the total; errors
of several records cancel with a probability of 2**-32.
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
FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES  # The framing of a record, without its data.

_ONES = np.uint32(0xFFFFFFFF)
_MASK = np.uint32(0xA282EAD8)


def masked(crcs: Uint32s) -> Uint32s:
    """CRCs as TFRecord files store them (tensorflow/core/lib/hash/crc32c.h)."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + _MASK


def unmasked(stored: Uint32s) -> Uint32s:
    """The inverse of `masked`."""
    rotated = stored - _MASK
    return (rotated >> np.uint32(17)) | (rotated << np.uint32(15))


def framed(record: bytes) -> bytes:
    """A record with its framing, as TFRecord files store it."""
    length = len(record).to_bytes(8, "little")
    crcs = (stored(google_crc32c.value(part)) for part in (length, record))
    return b"".join((length, next(crcs), record, next(crcs)))


def stored(crc: int) -> bytes:
    """A CRC as TFRecord files store it."""
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return ((rotated + int(_MASK)) & 0xFFFFFFFF).to_bytes(4, "little")


def first_bad_header(block: bytes | memoryview, starts: Int64s) -> int | None:
    """The first index in `starts`, int64 [n], whose record's length does not fit its CRC, or None.

    A header is 8 bytes of length and 4 bytes of CRC.
    """
    data = np.frombuffer(block, np.uint8)
    headers = data[starts[:, None] + np.arange(HEADER_BYTES)]
    crc = np.full(len(headers), _ONES, np.uint32)
    for i in range(8):
        crc = _TABLE[(crc ^ headers[:, i]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    on_disk = np.ascontiguousarray(headers[:, 8:]).view("<u4").reshape(-1)
    bad = np.flatnonzero(masked(~crc) != on_disk)
    return int(bad[0]) if len(bad) else None


def are_complete(frames: Uint8s) -> bool:
    """Returns True if each frame, uint8 [n, frame_bytes], is one undamaged record."""
    num_frames, frame_bytes = frames.shape
    data_bytes = frame_bytes - FRAME_BYTES
    header = _header(data_bytes)
    if not num_frames or (frames[:, :HEADER_BYTES] != header).any():
        return not num_frames
    crc_of_header = np.array([google_crc32c.value(header.tobytes())], np.uint32)
    on_disk = np.ascontiguousarray(frames[:, -FOOTER_BYTES:]).view("<u4").reshape(-1)
    # Appending 4 bytes: XOR them to the register of 32 bits, then shift it by 4 bytes.
    before = unmasked(on_disk) ^ _shifted(crc_of_header, data_bytes)
    crcs = _shifted(before ^ on_disk ^ _ONES, FOOTER_BYTES) ^ _ONES
    bits = np.unpackbits(crcs.astype("<u4").view(np.uint8), bitorder="little")
    images = _images(frame_bytes, 1 << (num_frames - 1).bit_length())
    # Multiplying by the bits takes a third of the time of selecting by them.
    expected = np.bitwise_xor.reduce(images[-num_frames:].reshape(-1) * bits)
    return int(expected) == int(google_crc32c.value(frames))


@functools.lru_cache(maxsize=64)
def _header(data_bytes: int) -> Uint8s:
    length = data_bytes.to_bytes(8, "little")
    return np.frombuffer(length + stored(google_crc32c.value(length)), np.uint8)


def _shifted(crcs: Uint32s, num_bytes: int) -> Uint32s:
    """Each CRC after `num_bytes` zero bytes are appended, XOR the CRC of these bytes."""
    table, byte = _shift_table(num_bytes), np.uint32(0xFF)
    low = table[0][crcs & byte] ^ table[1][(crcs >> np.uint32(8)) & byte]
    high = table[2][(crcs >> np.uint32(16)) & byte] ^ table[3][crcs >> np.uint32(24)]
    shifted: Uint32s = low ^ high
    return shifted


@functools.lru_cache(maxsize=256)
def _shift_table(num_bytes: int) -> Uint32s:
    """The linear map of `_shifted`, tabulated by the bytes of a CRC: uint32 [4, 256]."""
    values = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    if num_bytes == 0:
        return values
    if num_bytes == 1:
        moved: Uint32s = _TABLE[values & np.uint32(0xFF)] ^ (values >> np.uint32(8))
        return moved
    half = _shifted(_shifted(values, num_bytes // 2), num_bytes // 2)
    return _shifted(half, 1) if num_bytes % 2 else half


@functools.lru_cache(maxsize=32)
def _images(frame_bytes: int, num_frames: int) -> Uint32s:
    """The image in the total CRC of each bit of each frame's CRC: uint32 [num_frames, 32].

    `num_frames` is a power of two. The map of the last frame is the identity.
    """
    if num_frames == 1:
        return np.uint32(1) << np.arange(32, dtype=np.uint32)[np.newaxis]
    later = _images(frame_bytes, num_frames // 2)
    return np.concatenate([_shifted(later, frame_bytes * (num_frames // 2)), later])


def _table() -> Uint32s:
    """Castagnoli's polynomial, reflected: RFC 3720, appendix B.4."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ (np.uint32(0x82F63B78) * (table & np.uint32(1)))
    return table


_TABLE = _table()
