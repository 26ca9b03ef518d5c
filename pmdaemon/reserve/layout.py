"""The file of a reserve: a page of words, then slots of one page each, all of it written when it is made.

    0       MAGIC    8 bytes
    8       SLOTS    word: how many slots
    16      TAKEN    word, the reader's: every record up to this number is durable elsewhere
    64      counters: 40 of 96 bytes, for events that found no free slot, one a kind
                COUNT (writer)  DELIVERED (reader)  FIRST_US  LAST_US  (words), name (64 bytes)
    4096    slots of 4096 bytes; record n lies in slot n % SLOTS
                NUMBER     word: n, or 0 while the slot is being written
                COUNT      word, the writer's: how many events the record is for
                DELIVERED  word, the reader's: how many of those were taken
                LAST_US    word: when the newest of them was noticed
                SIZE       word: bytes of payload
                CHECK      word: CRC-32 of the payload, begun with n
                payload    at most 4048 bytes

Words are 64 bits in the machine's order, and only stored whole through a memoryview of words. One process
writes, one reads; each word has one of them as its owner. x86-64 shows stores to others in their order, so
NUMBER, stored last, publishes a record. What a death of the writer leaves: a slot with NUMBER 0, which is no
record. The file lies on a disk: with the machine's memory lost, records that were not taken yet may be lost
or torn, unless the writer syncs each (the reserve of the initialization period).

No store needs the disk or memory: all pages exist, are written once with zeros, and are mapped and filled in
when the reserve is opened. A file system that writes elsewhere on each change (btrfs, ZFS) may still need
room when it writes back.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

from isal.isal_zlib import crc32

from pmdaemon.runtime.files import make_directory, sync_directory

MAGIC: Final = b"SLARSV01"
PAGE_BYTES: Final = 4096
WORD: Final = 8
SLOTS_WORD, TAKEN_WORD = 1, 2
COUNTERS_WORD: Final = 8
COUNTER_WORDS: Final = 12
COUNTERS: Final = 40
NAME_BYTES: Final = 64
SLOT_WORDS: Final = PAGE_BYTES // WORD
NUMBER, COUNT, DELIVERED, LAST_US, SIZE, CHECK = range(6)
PAYLOAD_AT: Final = 48
MOST_PAYLOAD: Final = PAGE_BYTES - PAYLOAD_AT
MOST_AHEAD: Final = 1 << 32
FIRST_US: Final = 2  # of a counter; LAST_US is 3 in both


class MappedReserve:
    """The mapped file. Each side keeps to its own words; see the module.

    Args:
        fd: of the file, open for reading and writing; may be closed afterwards.

    Raises:
        ValueError: it is no reserve, or cut short.
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size < 2 * PAGE_BYTES or size % PAGE_BYTES:
            raise ValueError(f"a reserve of {size} bytes")
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("Q")
        self.slots = size // PAGE_BYTES - 1
        if bytes(self.bytes[:WORD]) != MAGIC or self.words[SLOTS_WORD] != self.slots:
            self.close()
            raise ValueError("its first page is not that of a reserve")

    def slot(self, number: int) -> int:
        """Index of the first word of the record's slot."""
        return SLOT_WORDS * (1 + number % self.slots)

    def payload(self, number: int) -> bytes | None:
        """The payload of a record, or None if there is none of that number that is whole."""
        words, at = self.words, self.slot(number)
        size = words[at + SIZE]
        if words[at + NUMBER] != number or size > MOST_PAYLOAD:
            return None
        begin = at * WORD + PAYLOAD_AT
        data = bytes(self.bytes[begin : begin + size])
        return data if words[at + CHECK] == crc32(data, number & 0xFFFFFFFF) else None

    def newest(self) -> int:
        """The largest number of a whole record, or of one that was taken.

        The checksum knows the lower half of a number; one that the upper half sets far ahead is damage.
        """
        words, taken = self.words, self.words[TAKEN_WORD]
        numbers = (words[SLOT_WORDS * (1 + slot) + NUMBER] for slot in range(self.slots))
        likely = (number for number in numbers if taken < number < taken + MOST_AHEAD)
        return max((number for number in likely if self.payload(number) is not None), default=taken)

    def counter_name(self, index: int) -> str:
        """Kind of a counter, "" for one that is free."""
        begin = (COUNTERS_WORD + COUNTER_WORDS * index + 4) * WORD
        return bytes(self.bytes[begin : begin + NAME_BYTES]).rstrip(b"\0").decode("utf-8", "replace")

    def sync(self, number: int) -> None:
        """The slot of a record is on disk on return."""
        self._map.flush(self.slot(number) * WORD, PAGE_BYTES)

    def close(self) -> None:
        """Unmap."""
        for view in ("words", "bytes"):
            if hasattr(self, view):
                getattr(self, view).release()
        self._map.close()


def make_reserve(path: Path, slots: int) -> None:
    """Make the file, with every byte of it written, unless one of this size is there.

    Durability: file and name are on disk on return.

    Raises:
        OSError: no room, or the disk fails; an earlier file is as it was.
    """
    size = PAGE_BYTES * (1 + slots)
    if path.exists() and path.stat().st_size == size:
        return
    make_directory(path.parent, 0o700)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        head = MAGIC + slots.to_bytes(WORD, "little")
        os.pwrite(fd, head + bytes(size - len(head)), 0)
        os.fsync(fd)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    sync_directory(path.parent)
