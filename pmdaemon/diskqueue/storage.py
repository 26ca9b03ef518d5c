"""The file system as the disk queue sees it: one file, five operations.

    operation   contract
    allocate    the file has at least this size; new bytes read as zero, are written (not merely reserved)
                and, with the directory entry, durable on return; bytes that were there are kept
    view        read-only window on the whole file; sees every write at once; valid until allocate or close
    write       bytes are in the window on return and durable after the next sync that succeeds; a crash
                before leaves any subset of the 512-byte sectors written
    sync        everything written before is durable on return; after a failure nothing is known
    close       lets go of the file; syncs nothing

A file that stands alone can also be exchanged (``Replaceable``):

    aside       an empty file beside it, NAME.new, for its successor; one that an earlier try left is gone
    replace     the successor, synced before, takes the name; a crash leaves one or the other, never none;
                durable on return; the former file is closed
    remove      the file, a successor that is not wanted any more, is gone and closed

``FileStorage`` is the real one; the tests' ``FaultStorage`` keeps the same contract in memory and breaks it
on request. Why each call is what it is (measured before the project, ext4): a sync of rewritten zero-filled
blocks costs 96 us, of blocks only reserved 150 us (each first write converts an extent in the journal), so
``allocate`` writes zeros; ``pwritev`` with ``fdatasync`` was 2 to 6 times faster than stores through a
mapping with msync; ``mmap.flush`` holds the interpreter lock while the disk works, ``os.fdatasync`` does not.

An owner holds an exclusive lock on the file (``flock``), which the kernel releases however the owner dies:
when the last reference to the locked descriptor is gone. So that descriptor is never mapped. A mapping
outlives a killed process while somebody reads its ``/proc/PID/smaps``, and its successor would find the file
"owned by another process" for that moment.

Downside: a file that somebody truncates while it is mapped kills the reader with SIGBUS.
Source: Q1, Q10; DESIGN.md 4.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol, Self, runtime_checkable

from pmdaemon.diskqueue.errors import QueueBusy, QueueNoSpace, QueueUnreadable
from pmdaemon.runtime.files import sync_directory

IOV_MAX: Final = 1024  # buffers a pwritev, Linux
ZERO_CHUNK_BYTES: Final = 1 << 20
JOIN_BYTES: Final = 256 << 10  # below it one copy is cheaper than passing many small buffers


class Storage(Protocol):
    """One file; see the module's text for the contracts. Thread: ``view`` any, the others one at a time."""

    def allocate(self, size_bytes: int) -> None:
        """Make the file at least this large, zero-filled and durable."""

    def view(self) -> memoryview:
        """Read-only window on the file."""

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        """Lay the buffers down one behind another from ``offset`` on."""

    def sync(self) -> None:
        """Make everything written durable."""

    def close(self) -> None:
        """Let go of the file."""


@runtime_checkable
class Replaceable(Storage, Protocol):
    """A file that another can take the place of; see the module's text."""

    def aside(self) -> Self:
        """A new, empty file beside this one."""

    def replace(self, successor: Self) -> None:
        """Let the successor have this file's name, and close this one."""

    def remove(self) -> None:
        """Delete and close it."""


class FileStorage:
    """A real file.

    Args:
        path: of the file; with ``read_only`` it must exist.
        read_only: map only, take no lock: for tools beside a living owner.

    Raises:
        QueueBusy: another process owns it.
        QueueUnreadable: it cannot be opened.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise QueueUnreadable(
                str(path), f"cannot be opened: {exc.strerror}", "Check the path and its permissions"
            ) from exc
        try:
            if not read_only:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_at(path, self._fd):  # its owner has just replaced it
                    raise BlockingIOError
            self._remap()
        except BaseException as exc:
            os.close(self._fd)  # and with it the lock: who tries again must not meet it
            if isinstance(exc, BlockingIOError):
                raise QueueBusy(str(path)) from exc
            raise

    def allocate(self, size_bytes: int) -> None:
        """See ``Storage``. Raises QueueNoSpace when the file system has no room; what was there stays."""
        present_bytes = os.fstat(self._fd).st_size
        try:
            os.posix_fallocate(self._fd, 0, size_bytes)
            zeros = bytes(ZERO_CHUNK_BYTES)
            for offset in range(present_bytes, size_bytes, ZERO_CHUNK_BYTES):
                self.write(offset, [zeros[: min(ZERO_CHUNK_BYTES, size_bytes - offset)]])
            os.fsync(self._fd)
            sync_directory(self._path.parent)
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, present_bytes)
            if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise QueueNoSpace(str(self._path), size_bytes, exc.strerror or "no room") from exc
            raise
        self._remap()

    def view(self) -> memoryview:
        """See ``Storage``."""
        return self._view

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        """See ``Storage``. Raises OSError; then it is unknown which part was written."""
        if len(buffers) > 1 and sum(map(len, buffers)) <= JOIN_BYTES:
            data = b"".join(buffers)
            if os.pwrite(self._fd, data, offset) == len(data):
                return
            buffers = [data]  # cut short: from the beginning, by the careful way
        for first in range(0, len(buffers), IOV_MAX):
            some = buffers[first : first + IOV_MAX]
            wanted = sum(map(len, some))
            done = os.pwritev(self._fd, some, offset)
            if done < wanted:  # a signal or a limit cut it short: finish byte-wise
                rest = memoryview(b"".join(some))[done:]
                while rest:
                    count = os.pwrite(self._fd, rest, offset + wanted - len(rest))
                    rest = rest[count:]
            offset += wanted

    def sync(self) -> None:
        """See ``Storage``. Raises OSError; never call it again then."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """See ``Storage``. Slices of ``view`` still held keep the mapping, not the descriptor, alive."""
        self._unmap()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def aside(self) -> FileStorage:
        """See ``Storage``."""
        path = self._path.with_name(self._path.name + ".new")
        path.unlink(missing_ok=True)
        return FileStorage(path)

    def replace(self, successor: FileStorage) -> None:
        """See ``Storage``."""
        successor._path.rename(self._path)
        successor._path = self._path
        sync_directory(self._path.parent)
        self.close()

    def remove(self) -> None:
        """See ``Storage``."""
        self._path.unlink()
        self.close()

    def reopened(self) -> int:
        """A descriptor to map the file with, apart from the one that holds the lock; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def _remap(self) -> None:
        self._unmap()
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes:
            fd = self.reopened()
            try:
                self._map = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ)
            finally:
                os.close(fd)
            self._view = memoryview(self._map)

    def _unmap(self) -> None:
        self._view = memoryview(b"")
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a reader still holds a slice; unmapped when it lets go
                self._map.close()
            self._map = None


def _is_at(path: Path, fd: int) -> bool:
    """Whether this open file still has that name."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False
