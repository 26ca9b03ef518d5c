"""A disk in memory that breaks: forgets what was not synced, tears at any sector, fails any call, fills up.

``FaultDisk`` holds named files; ``open(name)`` gives a ``FaultStorage`` with the operations of
``storage.py``. Operations that change something (all but view and close) are counted over all files.

    crash_at = n      the n-th such operation is not carried out; it and all later ones raise ``Crashed``
    fail_at = {n: e}  the n-th raises OSError(e); a write is half done then, a sync has forgotten its pages
    limit_bytes       allocate beyond it raises QueueNoSpace
    after_kill()      the disk as the next process finds it: the cache is whole, the platter is behind
    after_crash(rng)  the disk as found after a power loss: a coin says which unsynced sectors are new

Model of a sync that fails: its pages are dropped and count as clean (as Linux does): readers go on to see
them, in this process and in the next, and a second sync that "succeeds" makes nothing durable. Code that
retries, or that trusts what it reads after a restart, loses data here as it would there. With ``rng`` some of
the sectors of a failed sync have been written all the same.

A process that is killed in ``allocate`` leaves blocks that are reserved only. Where a sync fails for such a
block (seen with ext4) the kernel takes it for written, so what is written there later reaches no platter,
though the sync says so, until the file is cut off before it or the power was lost.

Names are modelled likewise: ``files`` is what processes see, ``named`` what the platter's directory holds. A
new name or a rename becomes durable with the next ``allocate`` or ``replace`` that succeeds.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Mapping, Sequence
from typing import Final

from pmdaemon.diskqueue.errors import QueueNoSpace

SECTOR_BYTES: Final = 512


class Crashed(BaseException):
    """The machine is gone. Not an Exception: nothing but a test may handle it."""


def _sectors(size_bytes: int) -> int:
    return -(-size_bytes // SECTOR_BYTES)


class FaultStorage:
    """One file of a FaultDisk: ``cached`` is what readers see, ``durable`` what the platter holds.

    ``reserved`` are sectors that were never written; ``lost`` those of them that stay so whatever is written.
    """

    def __init__(self, disk: FaultDisk, durable: bytes, name: str) -> None:
        self._disk = disk
        self.name = name
        self.durable = bytearray(durable)
        self.cached = bytearray(durable)
        self.dirty: set[int] = set()
        self.reserved: set[int] = set()
        self.lost: set[int] = set()

    def allocate(self, size_bytes: int, kept_bytes: int | None = None) -> None:
        """See ``Storage``; a crash or failure in it leaves the new size, reserved only."""
        before = len(self.cached) if kept_bytes is None else min(kept_bytes, len(self.cached))
        grown = set(range(_sectors(before), _sectors(size_bytes)))
        try:
            code = self._disk.count()
        except Crashed:
            self._cut(before)
            self._grow(size_bytes)
            self.reserved |= grown
            raise
        self._cut(before)
        if size_bytes > max(before, self._disk.limit_bytes):
            raise QueueNoSpace("on a test disk", size_bytes, "the disk is full")
        self._grow(size_bytes)
        if code:
            self.reserved |= grown
            self._drop()
            self._make_durable()
            raise OSError(code, "allocate failed by the test")
        self._make_durable()
        self._disk.named = dict(self._disk.files)

    def _cut(self, size_bytes: int) -> None:
        self.cached, self.durable = self.cached[:size_bytes], self.durable[:size_bytes]
        for sectors in (self.dirty, self.reserved, self.lost):
            sectors -= {sector for sector in sectors if sector >= _sectors(size_bytes)}

    def _grow(self, size_bytes: int) -> None:
        self.cached += bytes(max(0, size_bytes - len(self.cached)))
        self.durable += bytes(len(self.cached) - len(self.durable))

    def view(self) -> memoryview:
        """See ``Storage``."""
        return memoryview(self.cached).toreadonly()

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        """See ``Storage``; a failing write leaves its first half."""
        data = b"".join(buffers)
        end = offset + len(data)
        assert 0 <= offset <= end <= len(self.cached), "a write outside of the allocated file"
        code = self._disk.count()
        if code:
            data = data[: len(data) // 2]
            end = offset + len(data)
        self.cached[offset:end] = data
        if data:
            self.dirty.update(range(offset // SECTOR_BYTES, (end - 1) // SECTOR_BYTES + 1))
        if code:
            raise OSError(code, "write failed by the test")

    def sync(self) -> None:
        """See ``Storage``; a failing sync drops its pages."""
        code = self._disk.count()
        if code:
            self._drop()
        self._make_durable()
        self._disk.syncs += 1
        if code:
            raise OSError(code, "sync failed by the test")

    def _drop(self) -> None:
        """What is dirty counts as written, and is not, but for some that were."""
        rng = self._disk.rng
        dropped = {sector for sector in sorted(self.dirty) if rng is None or rng.random() >= 0.5}
        self.lost |= dropped & self.reserved
        self.dirty -= dropped

    def _make_durable(self) -> None:
        """What is dirty reaches the platter."""
        self.durable += bytes(len(self.cached) - len(self.durable))
        self.dirty -= self.lost
        self.reserved -= self.dirty
        for sector in self.dirty:
            part = slice(sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES)
            self.durable[part] = self.cached[part]
        self.dirty.clear()

    def release(self) -> None:
        """See ``Storage``."""

    def close(self) -> None:
        """See ``Storage``."""

    def aside(self) -> FaultStorage:
        """See ``Storage``."""
        if code := self._disk.count():
            raise OSError(code, "directory failed by the test")
        name = self.name + ".new"
        self._disk.files[name] = FaultStorage(self._disk, b"", name)
        return self._disk.files[name]

    def replace(self, successor: FaultStorage) -> None:
        """See ``Storage``; a crash in it leaves both names as they were, a failure a rename not durable."""
        code = self._disk.count()
        self._disk.files[self.name] = self._disk.files.pop(successor.name)
        successor.name = self.name
        if code:
            raise OSError(code, "directory failed by the test")
        self._disk.named = dict(self._disk.files)

    def remove(self) -> None:
        """See ``Storage``."""
        if code := self._disk.count():
            raise OSError(code, "directory failed by the test")
        del self._disk.files[self.name]

    def found_later(self, rng: random.Random) -> bytes:
        """The durable bytes with each unsynced sector old or new."""
        return bytes(self.after_crash(self._disk, self.name, rng).durable)

    def after_crash(self, disk: FaultDisk, name: str, rng: random.Random) -> FaultStorage:
        """The file as that disk has it, by this name, when the power is back."""
        found, written = bytearray(self.durable), set[int]()
        for sector in sorted(self.dirty - self.lost):
            if rng.random() < 0.5:
                part = slice(sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES)
                found += bytes(max(0, min(part.stop, len(self.cached)) - len(found)))
                found[part] = self.cached[part]
                written.add(sector)
        later = FaultStorage(disk, bytes(found), name)
        later.reserved = self.reserved - written
        return later


class FaultDisk:
    """Named files that break together.

    Args:
        files: contents to begin with.
        crash_at: number of the operation that does not happen, counted from 1; 0 for never.
        fail_at: operation number -> errno.
        limit_bytes: largest file.
    """

    def __init__(
        self,
        files: Mapping[str, bytes] | None = None,
        crash_at: int = 0,
        fail_at: Mapping[int, int] | None = None,
        limit_bytes: int = 1 << 40,
    ) -> None:
        self.files = {name: FaultStorage(self, data, name) for name, data in (files or {}).items()}
        self.named = dict(self.files)
        self.crash_at = crash_at
        self.fail_at = dict(fail_at or {})
        self.limit_bytes = limit_bytes
        self.rng: random.Random | None = None
        self.operations = 0
        self.syncs = 0

    def open(self, name: str) -> FaultStorage:
        """The file of that name, empty if it is new."""
        return self.files.setdefault(name, FaultStorage(self, b"", name))

    def count(self) -> int:
        """Count one operation; returns the errno it must fail with, or 0.

        Raises:
            Crashed: the crash is due or past.
        """
        self.operations += 1
        if self.crash_at and self.operations >= self.crash_at:
            raise Crashed
        return self.fail_at.get(self.operations, 0)

    def fail_next(self, code: int = errno.EIO) -> None:
        """Let the next operation fail."""
        self.fail_at[self.operations + 1] = code

    def after_crash(self, rng: random.Random) -> FaultDisk:
        """The disk after power came back."""
        names = self.files
        if self.files != self.named and rng.random() < 0.5:
            names = self.named
        later = FaultDisk()
        later.files = {name: file.after_crash(later, name, rng) for name, file in names.items()}
        later.named = dict(later.files)
        return later

    def after_kill(self) -> FaultDisk:
        """The disk after only the process died: the page cache is whole, but nothing unsynced is durable."""
        later = FaultDisk()
        copies: dict[int, FaultStorage] = {}
        for file in (*self.files.values(), *self.named.values()):
            if id(file) not in copies:
                copy = copies[id(file)] = FaultStorage(later, bytes(file.cached), file.name)
                copy.durable = bytearray(file.durable)
                copy.dirty, copy.reserved, copy.lost = set(file.dirty), set(file.reserved), set(file.lost)
        later.files = {name: copies[id(file)] for name, file in self.files.items()}
        later.named = {name: copies[id(file)] for name, file in self.named.items()}
        return later
