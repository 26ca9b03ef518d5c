r"""The data file: its header, its records, and the search for records in raw bytes.

    offset  size  part
    0       4096  file header, first copy; NUL-padded
    4096    4096  file header, second copy
    8192    Q     the ring: records at multiples of 256 bytes, offsets below count from here

    record  offset  size  field
            0       4     signature FC 58 84 85
            4       4     checksum (crc32) over file salt, header from byte 8 on, destination and data
            8       8     sequence number, 1, 2, 3, ... never used again
            16      8     own offset in the ring
            24      8     floor: every record with a smaller sequence number was deleted when this was written
            32      8     date, microseconds UTC
            40      4     length of data
            44      4     lap: how often the ring had begun anew
            48      2     type, the user's
            50      2     length of destination
            52      4     flags, 0
            56      ...   destination, data, zeros up to the next multiple of 256

All numbers little-endian. Why the checksum covers salt and own offset: a queued copy of a queue file holds
intact records, which must not be taken for ours when the search steps through the bytes of a damaged one.
The floor bounds what can come back after a crash: without it, an index that was lost would revive
everything that still stands in the ring. Source: Q1, Q7; docs/formats/diskqueue.md.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from pmdaemon.diskqueue.collector import collector_rests

SIGNATURE: Final = b"\xfc\x58\x84\x85"
_SIGNATURE_WORD: Final = int.from_bytes(SIGNATURE, "little")
UNIT_BYTES: Final = 256
DATA_START: Final = 8192
COPY_STEP: Final = 4096
MAGIC: Final = b"SLADQD01"
FRONT: Final = struct.Struct("<4sI")
BODY: Final = struct.Struct("<QQQqIIHHI")
WHOLE: Final = struct.Struct("<IIQQQqIIHHI")
HEADER_BYTES: Final = WHOLE.size
assert HEADER_BYTES == 56  # the format's
RECORD_OVERHEAD_BYTES: Final = (
    HEADER_BYTES + UNIT_BYTES
)  # most that a record takes beside destination and data
PADDING: Final = tuple(bytes(count) for count in range(UNIT_BYTES))

_FILE: Final = struct.Struct("<8sIIQ16s8sq")
_CRC: Final = struct.Struct("<I")

# signature, crc, seq, offset, floor, date_us, length, lap, kind, destination length, flags
Found = tuple[int, int, int, int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a data file says about itself; written once.

    Attributes:
        ring_bytes: Q, a multiple of 256.
        salt: 16 random bytes, in every checksum.
        queue_id: 8 random bytes, the queue's name for others.
        created_us: wall clock.
    """

    ring_bytes: int
    salt: bytes
    queue_id: bytes
    created_us: int

    @property
    def seed(self) -> int:
        """Where the checksums of this file begin: crc32 of the salt."""
        return zlib.crc32(self.salt)

    def pack(self) -> bytes:
        """One copy, 4096 bytes."""
        body = _FILE.pack(MAGIC, 1, UNIT_BYTES, self.ring_bytes, self.salt, self.queue_id, self.created_us)
        return (body + _CRC.pack(zlib.crc32(body))).ljust(COPY_STEP, b"\0")


def read_file_header(view: memoryview) -> tuple[FileHeader | None, int]:
    """(the header, how many of its two copies are intact); (None, 0) when none is."""
    found: FileHeader | None = None
    intact = 0
    for start in (0, COPY_STEP):
        copy = bytes(view[start : start + _FILE.size + _CRC.size])
        if len(copy) < _FILE.size + _CRC.size or not copy.startswith(MAGIC):
            continue
        body = copy[: _FILE.size]
        if zlib.crc32(body) != _CRC.unpack(copy[_FILE.size :])[0]:
            continue
        _magic, _version, _unit, ring_bytes, salt, queue_id, created_us = _FILE.unpack(body)
        found = found or FileHeader(ring_bytes, salt, queue_id, created_us)
        intact += 1
    return found, intact


def span_bytes(content_bytes: int) -> int:
    """Bytes that a record with so many bytes of destination and data occupies."""
    return -(-(HEADER_BYTES + content_bytes) // UNIT_BYTES) * UNIT_BYTES


def check(ring: memoryview, seed: int, offset: int) -> Found | None:
    """The header of the intact record at ``offset``, or None. Bounds are checked before each access."""
    if offset < 0 or offset + HEADER_BYTES > len(ring):
        return None
    found: Found = WHOLE.unpack_from(ring, offset)
    end = offset + HEADER_BYTES + found[6] + found[9]
    if found[0] != _SIGNATURE_WORD or found[3] != offset or end > len(ring):
        return None
    return found if zlib.crc32(ring[offset + 8 : end], seed) == found[1] else None


@dataclass(slots=True)
class Scan:
    """What stands in a ring.

    Attributes:
        intact: headers of intact records in the order of their offsets.
        broken: offsets that carry a signature but no intact record, outside of intact ones.
    """

    intact: list[Found]
    broken: list[int]


@collector_rests()
def scan(ring: memoryview, seed: int) -> Scan:
    """Find every intact record: steps of 256 bytes, an intact record's length is skipped.

    Only blocks that begin with the signature are looked at; numpy finds them (an empty GB in 0.1 s). Taking
    the other fields by columns, or copying the headers together to unpack them in one C loop, was measured to
    be slower than one unpack a record. Source: Q7.
    """
    words = np.frombuffer(ring[: len(ring) // 4 * 4], dtype="<u4")[:: UNIT_BYTES // 4]
    places = np.flatnonzero(words == _SIGNATURE_WORD) * UNIT_BYTES
    del words  # it would keep the mapping exported
    return _checked(ring, seed, places.tolist())


def _checked(ring: memoryview, seed: int, places: list[int]) -> Scan:
    """Which of the blocks that begin with a signature begin a record."""
    intact: list[Found] = []
    broken: list[int] = []
    behind = 0
    last, size, unpack, crc32 = len(ring) - HEADER_BYTES, len(ring), WHOLE.unpack_from, zlib.crc32
    found_one = intact.append
    for offset in places:
        if offset < behind:
            continue
        if offset > last:  # a header cut off by the file's end
            broken.append(offset)
            continue
        found: Found = unpack(ring, offset)
        end = offset + HEADER_BYTES + found[6] + found[9]
        if found[3] == offset and end <= size and crc32(ring[offset + 8 : end], seed) == found[1]:
            found_one(found)
            behind = end
        else:
            broken.append(offset)
    return Scan(intact, broken)


def content(ring: memoryview, found: Found) -> tuple[bytes, bytes]:
    """(destination, data) of an intact record."""
    start = found[3] + HEADER_BYTES
    middle = start + found[9]
    return bytes(ring[start:middle]), bytes(ring[middle : middle + found[6]])
