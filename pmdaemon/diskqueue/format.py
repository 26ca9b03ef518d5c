r"""The two files of a queue: headers, records, index entries; the search for records in raw bytes.

The data file:

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
            44      4     lap: how often the ring had begun again
            48      2     type, the user's
            50      2     length of destination
            52      4     flags, 0
            56      ...   destination, data, zeros up to the next multiple of 256

All numbers little-endian. Why the checksum covers salt and own offset: a queued copy of a queue file holds
intact records, which must not be taken for ours when the search steps through the bytes of a damaged one.
The floor bounds what can come back after a crash: without it, an index that was lost would revive
everything that is still in the ring.

The index file:

    offset  size  part
    0       4096  header copy for even generations
    4096    4096  header copy for odd generations
    8192    n*128 entries; 128 divides the disk's block, so none spans two and each is written whole or not

    entry   0  u32 checksum (over salt, slot number, rest)   36  u32 owner's pid, 0 for unlocked
            4  u16 status: 0 never used, 1 free, 2 in use    40  u64 owner's start time, clock ticks
            6  u16 type                                      48  u32 retries
            8  u64 sequence number                           52  u32 previous slot in the in-use list
            16 u64 offset in the ring                        56  u32 next slot, in the in-use or free list
            24 u32 span, bytes occupied                      60  u64 last retry, microseconds UTC
            28 u32 length of data                            68  zeros up to 128
            32 u32 the record's checksum

Slot number 2**32-1 means none. Where there are many, headers and entries are rows of arrays
(``HEADER_FIELDS``, ``SLOT_FIELDS``): as objects, a million of them took ten times the memory.
Source: Q1, Q2, Q7; docs/formats/diskqueue.md.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from pmdaemon.diskqueue.consumer import LockOwner
from pmdaemon.diskqueue.slots import NO_SLOT
from pmdaemon.runtime.gc_tuning import collector_rests

SIGNATURE: Final = b"\xfc\x58\x84\x85"
_SIGNATURE_WORD: Final = int.from_bytes(SIGNATURE, "little")
UNIT_BYTES: Final = 256
DATA_START: Final = 8192
COPY_STEP: Final = 4096
DATA_MAGIC: Final = b"SLADQD01"
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
Rows = npt.NDArray[Any]
"""Rows of one of the two kinds below, or of ``LIVE_FIELDS``."""
HEADER_FIELDS: Final = np.dtype(
    [
        ("signature", "<u4"), ("crc", "<u4"), ("seq", "<u8"), ("offset", "<u8"), ("floor", "<u8"),
        ("date_us", "<i8"), ("length", "<u4"), ("lap", "<u4"), ("kind", "<u2"), ("destination", "<u2"),
        ("flags", "<u4"),
    ]
)  # fmt: skip
assert HEADER_FIELDS.itemsize == HEADER_BYTES
PIECE_BYTES: Final = 8 << 20
"""So much of the ring is searched at a time; its pages are let go of then."""


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
        return crc32(self.salt)

    def pack(self) -> bytes:
        """One copy, 4096 bytes."""
        body = _FILE.pack(
            DATA_MAGIC, 1, UNIT_BYTES, self.ring_bytes, self.salt, self.queue_id, self.created_us
        )
        return (body + _CRC.pack(crc32(body))).ljust(COPY_STEP, b"\0")


def read_file_header(view: memoryview) -> tuple[FileHeader | None, int]:
    """(the header, how many of its two copies are intact); (None, 0) when none is."""
    found: FileHeader | None = None
    intact = 0
    for start in (0, COPY_STEP):
        copy = bytes(view[start : start + _FILE.size + _CRC.size])
        if len(copy) < _FILE.size + _CRC.size or not copy.startswith(DATA_MAGIC):
            continue
        body = copy[: _FILE.size]
        if crc32(body) != _CRC.unpack(copy[_FILE.size :])[0]:
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
    return found if crc32(ring[offset + 8 : end], seed) == found[1] else None


def spans_of(headers: Rows) -> npt.NDArray[np.uint64]:
    """``span_bytes`` of each of these headers."""
    content_bytes: npt.NDArray[np.uint64] = headers["length"].astype(np.uint64) + headers["destination"]
    return (content_bytes + HEADER_BYTES + UNIT_BYTES - 1) // UNIT_BYTES * UNIT_BYTES


@dataclass(slots=True)
class Scan:
    """What is in a ring.

    Attributes:
        intact: headers of intact records in the order of their offsets, rows of ``HEADER_FIELDS``.
        broken: offsets that carry a signature but no intact record, outside of intact ones.
    """

    intact: Rows
    broken: array[int]


@collector_rests()
def scan(ring: memoryview, seed: int, release: Callable[[], None] = lambda: None) -> Scan:
    """Find every intact record: steps of 256 bytes, an intact record's length is skipped.

    Only blocks that begin with the signature are examined; numpy finds them (an empty GB in 0.1 s). Checking
    the other fields by columns, or copying the headers together to unpack them in one C loop, was measured to
    be slower than one unpack a record. ``release`` is called after each piece of the ring. Source: Q7.
    """
    headers, broken, behind = bytearray(), array("Q"), 0
    for first in range(0, len(ring) // 4 * 4, PIECE_BYTES):
        piece = ring[first : min(first + PIECE_BYTES, len(ring) // 4 * 4)]
        words = np.frombuffer(piece, dtype="<u4")[:: UNIT_BYTES // 4]
        places = np.flatnonzero(words == _SIGNATURE_WORD) * UNIT_BYTES + first
        del words, piece  # they would keep the mapping exported
        behind = _check_places(ring, seed, places.tolist(), behind, headers, broken)
        release()
    return Scan(np.frombuffer(headers, HEADER_FIELDS), broken)


def _check_places(
    ring: memoryview, seed: int, places: list[int], behind: int, headers: bytearray, broken: array[int]
) -> int:
    """Which of the blocks that begin with a signature begin a record; returns the end of the last one.

    ``behind``: what is before it lies within a record that was found.
    """
    last, size, unpack = len(ring) - HEADER_BYTES, len(ring), WHOLE.unpack_from
    for offset in places:
        if offset < behind:
            continue
        if offset > last:  # a header cut off by the file's end
            broken.append(offset)
            continue
        found: Found = unpack(ring, offset)
        end = offset + HEADER_BYTES + found[6] + found[9]
        if found[3] == offset and end <= size and crc32(ring[offset + 8 : end], seed) == found[1]:
            headers += ring[offset : offset + HEADER_BYTES]
            behind = end
        else:
            broken.append(offset)
    return behind


def content(ring: memoryview, found: Found) -> tuple[bytes, bytes]:
    """(destination, data) of an intact record."""
    start = found[3] + HEADER_BYTES
    middle = start + found[9]
    return bytes(ring[start:middle]), bytes(ring[middle : middle + found[6]])


# -- the index file

ENTRY_BYTES: Final = 128
INDEX_START: Final = 8192
NONE: Final = NO_SLOT
UNUSED, FREE, IN_USE = 0, 1, 2
DAMAGED: Final = 0xFFFF
"""In the place of the status of an entry that fails its checksum; in memory only."""
CHUNK_SLOTS: Final = 8192  # a MiB of the file at a time
INDEX_MAGIC: Final = b"SLADQI01"

_ENTRY: Final = struct.Struct("<HHQQIIIIQIIIQ")
_HEADER: Final = struct.Struct("<8sIIQ16s8sQIIIIIIqQQQQQ")
_SPARE: Final = (0, 0)  # earlier releases counted here what a full queue had dropped
SLOT_FIELDS: Final = np.dtype(
    [
        ("status", "<u2"), ("kind", "<u2"), ("seq", "<u8"), ("offset", "<u8"), ("span", "<u4"),
        ("length", "<u4"), ("crc", "<u4"), ("owner_pid", "<u4"), ("owner_start", "<u8"), ("retries", "<u4"),
        ("prev", "<u4"), ("next", "<u4"), ("last_retry_us", "<u8"),
    ]
)  # fmt: skip
assert SLOT_FIELDS.itemsize == _ENTRY.size
_PAD: Final = bytes(ENTRY_BYTES - _ENTRY.size - _CRC.size)
_NEVER: Final = bytes(_ENTRY.size)
_NOTHING: Final = (0,) * 12
_RAW: Final = struct.Struct(f"<I{_ENTRY.size}s{len(_PAD)}s")


class Work:
    """The rare part of a record: what consumers did to it. Times: ``last_retry_us`` UTC, others monotonic."""

    __slots__ = ("last_retry_us", "not_before_ns", "owner", "retries")

    def __init__(self) -> None:
        self.owner: LockOwner | None = None
        self.retries = 0
        self.last_retry_us = 0
        self.not_before_ns = 0


def _sealed(seed: int, slot: int, body: bytes) -> bytes:
    return _CRC.pack(crc32(body, crc32(_CRC.pack(slot), seed))) + body + _PAD


def pack_slot(slot: int, fields: tuple[int, ...], seed: int) -> bytes:
    """An entry with the fields of ``SLOT_FIELDS``, 128 bytes."""
    return _sealed(seed, slot, _ENTRY.pack(*fields))


def pack_free(slot: int, next_free: int, seed: int) -> bytes:
    """A free entry, 128 bytes."""
    return pack_slot(slot, free_fields(next_free), seed)


def free_fields(next_free: int) -> tuple[int, ...]:
    """The fields of ``SLOT_FIELDS`` for a free entry."""
    return (FREE, 0, 0, 0, 0, 0, 0, 0, 0, 0, NONE, next_free, 0)


def read_slots(view: memoryview, count: int, seed: int) -> Rows:
    """The entries of the first slots, rows of ``SLOT_FIELDS``. All must lie within the file."""
    slots = np.zeros(count, SLOT_FIELDS)
    for first in range(0, count, CHUNK_SLOTS):
        behind = min(first + CHUNK_SLOTS, count)
        raw = bytes(view[INDEX_START + first * ENTRY_BYTES : INDEX_START + behind * ENTRY_BYTES])
        whole = np.frombuffer(raw, np.uint8).reshape(-1, ENTRY_BYTES)
        fields = np.ascontiguousarray(whole[:, _CRC.size : _CRC.size + _ENTRY.size])
        slots[first:behind] = fields.view(SLOT_FIELDS)[:, 0]
        for number, (crc, body, pad) in enumerate(_RAW.iter_unpack(raw), first):
            is_written = crc32(body, crc32(_CRC.pack(number), seed)) == crc
            is_unused = crc == 0 and body == _NEVER
            if not (is_written or is_unused) or pad != _PAD:
                slots[number] = (DAMAGED, *_NOTHING)
    return slots


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The index's header; two copies, written in turn.

    Attributes:
        generation: counts the writes of the header; the larger intact one holds.
        ring_bytes, salt, queue_id: as in the data file, so that its header can be made again.
        capacity: entries in the file.
        in_use, head, tail, free: the two lists; slots.
        used: slots below it were used at least once, the others are all zero.
        synced_us: when the last index sync began, UTC.
        synced_seq: every record up to it is either in the index or was deleted.
        next_seq: the next record's number at that time, at least.
        floor: every record below was deleted.
    """

    generation: int
    salt: bytes
    queue_id: bytes
    ring_bytes: int
    capacity: int
    in_use: int = 0
    head: int = NONE
    tail: int = NONE
    free: int = NONE
    used: int = 0
    synced_us: int = 0
    synced_seq: int = 0
    next_seq: int = 1
    floor: int = 1

    def pack(self) -> bytes:
        """One copy; it fits one 512-byte sector."""
        body = _HEADER.pack(
            INDEX_MAGIC, 1, ENTRY_BYTES, self.generation, self.salt, self.queue_id, self.ring_bytes,
            self.capacity, self.in_use, self.head, self.tail, self.free, self.used, self.synced_us,
            self.synced_seq, self.next_seq, self.floor, *_SPARE,
        )  # fmt: skip
        return (body + _CRC.pack(crc32(body))).ljust(512, b"\0")

    @property
    def place(self) -> int:
        """Where this generation's copy goes."""
        return (self.generation % 2) * COPY_STEP

    def following(self, **changes: Any) -> IndexHeader:
        """The next generation."""
        return replace(self, generation=self.generation + 1, **changes)


def read_index_header(view: memoryview) -> IndexHeader | None:
    """The newest intact copy, or None."""
    best: IndexHeader | None = None
    for start in (0, COPY_STEP):
        copy = bytes(view[start : start + _HEADER.size + _CRC.size])
        if len(copy) < _HEADER.size + _CRC.size or not copy.startswith(INDEX_MAGIC):
            continue
        body = copy[: _HEADER.size]
        if crc32(body) != _CRC.unpack(copy[_HEADER.size :])[0]:
            continue
        header = IndexHeader(*_HEADER.unpack(body)[3 : -len(_SPARE)])
        if best is None or header.generation > best.generation:
            best = header
    return best
