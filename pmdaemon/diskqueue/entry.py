"""The index file: its header and its entries; the in-memory entry.

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

Slot number 2**32-1 means none. Source: Q2; docs/formats/diskqueue.md.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from pmdaemon.diskqueue.owner import LockOwner

ENTRY_BYTES: Final = 128
INDEX_START: Final = 8192
COPY_STEP: Final = 4096
NONE: Final = 0xFFFFFFFF
UNUSED, FREE, IN_USE = 0, 1, 2
MAGIC: Final = b"SLADQI01"

_ENTRY: Final = struct.Struct("<HHQQIIIIQIIIQ")
_HEADER: Final = struct.Struct("<8sIIQ16s8sQIIIIIIqQQQQQ")
_SPARE: Final = (0, 0)  # earlier releases counted here what a full queue had dropped
_CRC: Final = struct.Struct("<I")
_PAD: Final = bytes(ENTRY_BYTES - _ENTRY.size - _CRC.size)
_NEVER: Final = bytes(_ENTRY.size)
_RAW: Final = struct.Struct(f"<I{_ENTRY.size}s{len(_PAD)}s")


class Work:
    """The rare part of an entry: what consumers did to it. Times: ``last_retry_us`` UTC, others monotonic."""

    __slots__ = ("last_retry_us", "not_before_ns", "owner", "retries")

    def __init__(self) -> None:
        self.owner: LockOwner | None = None
        self.retries = 0
        self.last_retry_us = 0
        self.not_before_ns = 0


class IndexEntry:
    """One live record in memory: where it lies, and its neighbours in the in-use list."""

    __slots__ = ("crc", "destination", "durable", "end", "kind", "length", "next", "offset", "prev", "seq",
                 "slot", "work")  # fmt: skip

    def __init__(
        self, seq: int, offset: int, end: int, length: int, kind: int, destination: bytes, crc: int,
        slot: int, prev: IndexEntry | None = None,
    ) -> None:  # fmt: skip
        self.seq = seq
        self.offset = offset
        self.end = end
        self.length = length
        self.kind = kind
        self.destination = destination
        self.crc = crc
        self.slot = slot
        self.durable = False
        self.work: Work | None = None
        self.prev = prev
        self.next: IndexEntry | None = None

    def working(self) -> Work:
        """Its consumers' part, made when first needed."""
        if self.work is None:
            self.work = Work()
        return self.work


class Slot(NamedTuple):
    """One entry as read from the file."""

    status: int
    kind: int
    seq: int
    offset: int
    span: int
    length: int
    crc: int
    owner_pid: int
    owner_start: int
    retries: int
    prev: int
    next: int
    last_retry_us: int


def _sealed(seed: int, slot: int, body: bytes) -> bytes:
    return _CRC.pack(zlib.crc32(body, zlib.crc32(_CRC.pack(slot), seed))) + body + _PAD


def pack_entry(entry: IndexEntry, seed: int) -> bytes:
    """An entry in use, 128 bytes."""
    return _sealed(seed, entry.slot, _ENTRY.pack(*entry_fields(entry)))


def pack_free(slot: int, next_free: int, seed: int) -> bytes:
    """A free entry, 128 bytes."""
    return _sealed(seed, slot, _ENTRY.pack(*free_fields(next_free)))


def entry_fields(entry: IndexEntry) -> tuple[int, ...]:
    """The fields of ``Slot`` for an entry in use."""
    work = entry.work
    owner = work.owner if work else None
    return (
        IN_USE,
        entry.kind,
        entry.seq,
        entry.offset,
        entry.end - entry.offset,
        entry.length,
        entry.crc,
        owner.pid if owner else 0,
        owner.start_ticks if owner else 0,
        work.retries if work else 0,
        entry.prev.slot if entry.prev else NONE,
        entry.next.slot if entry.next else NONE,
        work.last_retry_us if work else 0,
    )


def free_fields(next_free: int) -> tuple[int, ...]:
    """The fields of ``Slot`` for a free entry."""
    return (FREE, 0, 0, 0, 0, 0, 0, 0, 0, 0, NONE, next_free, 0)


def read_slots(view: memoryview, count: int, seed: int) -> list[Slot | None]:
    """The entries of the first slots; a damaged one is None. All must lie within the file."""
    slots: list[Slot | None] = []
    raw = bytes(view[INDEX_START : INDEX_START + count * ENTRY_BYTES])
    for number, (crc, body, pad) in enumerate(_RAW.iter_unpack(raw)):
        if zlib.crc32(body, zlib.crc32(_CRC.pack(number), seed)) == crc and pad == _PAD:
            slots.append(Slot._make(_ENTRY.unpack(body)))
        elif crc == 0 and body == _NEVER and pad == _PAD:
            slots.append(Slot(UNUSED, *(0,) * 12))
        else:
            slots.append(None)
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
            MAGIC, 1, ENTRY_BYTES, self.generation, self.salt, self.queue_id, self.ring_bytes, self.capacity,
            self.in_use, self.head, self.tail, self.free, self.used, self.synced_us, self.synced_seq,
            self.next_seq, self.floor, *_SPARE,
        )  # fmt: skip
        return (body + _CRC.pack(zlib.crc32(body))).ljust(512, b"\0")

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
        if len(copy) < _HEADER.size + _CRC.size or not copy.startswith(MAGIC):
            continue
        body = copy[: _HEADER.size]
        if zlib.crc32(body) != _CRC.unpack(copy[_HEADER.size :])[0]:
            continue
        header = IndexHeader(*_HEADER.unpack(body)[3 : -len(_SPARE)])
        if best is None or header.generation > best.generation:
            best = header
    return best
