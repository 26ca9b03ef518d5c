r"""The file system as the disk queue sees it: one file, six operations; several files as one.

    operation   contract
    allocate    the file has at least this size; new bytes read as zero, are written (not merely reserved)
                and, with the directory entry, durable on return; bytes that were there are kept, of more
                than ``kept_bytes`` only these: a killed process may have left the rest reserved only
    view        read-only window on the whole file; sees every write at once; valid until allocate or close
    write       bytes are in the window on return and durable after the next sync that succeeds; a crash
                before leaves any subset of the 512-byte sectors written
    sync        everything written before is durable on return; after a failure nothing is known
    release     the window's pages need not stay in this process's memory; its bytes are as they were
    close       lets go of the file; syncs nothing

A file that is alone can also be exchanged (``Replaceable``):

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
outlives a killed process while a tool reads its ``/proc/PID/smaps``, and its successor would find the file
"owned by another process" for that moment.

Downside: a file that is truncated while it is mapped, or whose disk stops reading a part of it, kills the
reader with SIGBUS; what cannot be read at the opening is an error.

``SpannedStorage`` joins several data files, perhaps on several disks, end to end:

    file k   offset 0      part header, 4096 bytes
             offset 4096   bytes [start, start + size) of the whole; sizes are multiples of 4096

    part header, little-endian: magic "SLADQP01", u32 number, u32 parts, u64 start, u64 size,
                                16 bytes span id (the same in all parts of a queue), u32 checksum

``view`` must be one window, though records lie across the borders: the files are mapped one behind another
into one reserved range of addresses (``mmap`` with MAP_FIXED, which Python's module does not offer).

What a crash while the parts are made can leave: parts without a header, or with the header of another try.
They hold nothing as long as the whole's own header (``format.FileHeader``, written last) is missing, and are
made again. With it, a part that is missing, exchanged or foreign is refused; nothing is changed then.

Downsides: a sync is one fdatasync for each file written to, one after another; the number of files is fixed
when the queue is made; the loss of one disk is the loss of the queue. Source: Q1, Q10; DESIGN.md 4.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self, runtime_checkable

from isal.isal_zlib import crc32

from pmdaemon.diskqueue.errors import QueueBusy, QueueNoSpace, QueueUnreadable
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.runtime.files import sync_directory

IOV_MAX: Final = 1024  # buffers a pwritev, Linux
ZERO_CHUNK_BYTES: Final = 1 << 20
CHECK_BYTES: Final = 8 << 20  # read at a time while it is opened: a tenth of a second of a slow disk
JOIN_BYTES: Final = 256 << 10  # below it one copy is cheaper than passing many small buffers
PART_START: Final = 4096
PART_MAGIC: Final = b"SLADQP01"
_PART: Final = struct.Struct("<8sIIQQ16s")
_CRC: Final = struct.Struct("<I")
_PROT_READ, _MAP_SHARED, _MAP_FIXED, _MAP_NORESERVE = 1, 1, 0x10, 0x4000
_MADV_POPULATE_READ: Final = 22
_EHWPOISON: Final = 133  # of Linux; Python has no name for it
_FAILED: Final = ctypes.c_void_p(-1).value


class Storage(Protocol):
    """One file; see the module's text for the contracts.

    Thread: ``view`` and ``release`` any, the others one at a time.
    """

    def allocate(self, size_bytes: int, kept_bytes: int | None = None) -> None:
        """Make the file at least this large, zero-filled from ``kept_bytes`` on, and durable."""

    def view(self) -> memoryview:
        """Read-only window on the file."""

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        """Lay the buffers down one behind another from ``offset`` on."""

    def sync(self) -> None:
        """Make everything written durable."""

    def release(self) -> None:
        """Let go of the memory of what was read."""

    def close(self) -> None:
        """Let go of the file."""


@runtime_checkable
class Replaceable(Storage, Protocol):
    """A file that another can take the place of; see the module's text.

    ``FileStorage`` is one, ``SpannedStorage`` is none (``resize`` asks); the tests' faulty disk is another.
    """

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
        QueueUnreadable: it cannot be opened, or the disk cannot read a part of it.
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
            self._check_readable()
        except BaseException as exc:
            os.close(self._fd)  # and with it the lock: the next try must not meet it
            if isinstance(exc, BlockingIOError):
                raise QueueBusy(str(path)) from exc
            raise

    def allocate(self, size_bytes: int, kept_bytes: int | None = None) -> None:
        """See ``Storage``. Raises QueueNoSpace when the file system has no room; what was there stays.

        What is to be given up is cut off: its blocks are freed, and the pages that show it are gone. Writing
        it again would not do: where the kernel could not write a block that was reserved only, ext4 keeps it
        marked as never written, whatever is written there later (``runtime.writeback``).
        """
        present_bytes = os.fstat(self._fd).st_size
        if kept_bytes is not None and kept_bytes < present_bytes:
            os.ftruncate(self._fd, kept_bytes)
            present_bytes = kept_bytes
            self._remap()
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
            chunk = buffers[first : first + IOV_MAX]
            wanted = sum(map(len, chunk))
            done = os.pwritev(self._fd, chunk, offset)
            if done < wanted:  # a signal or a limit cut it short: finish byte-wise
                rest = memoryview(b"".join(chunk))[done:]
                while rest:
                    count = os.pwrite(self._fd, rest, offset + wanted - len(rest))
                    rest = rest[count:]
            offset += wanted

    def sync(self) -> None:
        """See ``Storage``. Raises OSError; never call it again then."""
        os.fdatasync(self._fd)

    def release(self) -> None:
        """See ``Storage``."""
        _release(self._map)

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

    def _check_readable(self) -> None:
        """Have the kernel read all of it once: as an error, what would be a SIGBUS while we read it.

        Recovery reads it anyway. By pieces: a call keeps all that it reads mapped, and all other threads
        waiting (a process that does not beat for a minute is ended). A kernel before 5.14 does not know how.
        """
        if self._map is None:
            return
        try:
            for first in range(0, len(self._map), CHECK_BYTES):
                self._map.madvise(_MADV_POPULATE_READ, first, CHECK_BYTES)
                self._map.madvise(mmap.MADV_DONTNEED, first, CHECK_BYTES)
        except OSError as exc:
            if exc.errno in (errno.EFAULT, _EHWPOISON):
                raise QueueUnreadable(
                    str(self._path),
                    "the disk cannot read a part of it (the kernel's log names the place)",
                    "Copy what can be read of it to a sound disk (ddrescue), or move it away: an empty queue "
                    "is made then",
                ) from exc

    def _unmap(self) -> None:
        self._view = memoryview(b"")
        _close(self._map)
        self._map = None


def _close(mapping: mmap.mmap | None) -> None:
    """Unmap; while a reader still holds a slice of it, that happens when the reader lets go."""
    if mapping is not None:
        with contextlib.suppress(BufferError):
            mapping.close()


def _release(mapping: mmap.mmap | None) -> None:
    """The pages stay in the page cache as long as the kernel likes; they count as this process's no more."""
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def _is_at(path: Path, fd: int) -> bool:
    """Whether this open file still has that name."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


class SpanPart(NamedTuple):
    """What a part's header says."""

    number: int
    parts: int
    start: int
    size_bytes: int
    span_id: bytes

    def pack(self) -> bytes:
        """The header, ``PART_START`` bytes."""
        body = _PART.pack(PART_MAGIC, *self)
        return (body + _CRC.pack(crc32(body))).ljust(PART_START, b"\0")


def read_part(view: memoryview) -> SpanPart | None:
    """The header of a part; None if it is not whole."""
    body = bytes(view[: _PART.size])
    crc = bytes(view[_PART.size : _PART.size + _CRC.size])
    if len(crc) < _CRC.size or not body.startswith(PART_MAGIC) or _CRC.unpack(crc)[0] != crc32(body):
        return None
    return SpanPart(*_PART.unpack(body)[1:])


def open_data(settings: QueueSettings, *, read_only: bool = False) -> FileStorage | SpannedStorage:
    """The data file, or all of them as one.

    Raises:
        QueueBusy, QueueUnreadable: as the two classes.
    """
    if settings.more_paths:
        return SpannedStorage([settings.data_path, *settings.more_paths], read_only=read_only)
    storage = FileStorage(settings.data_path, read_only=read_only)
    part = read_part(storage.view())
    if part is not None:
        storage.close()
        problem = f"it is one of the {part.parts} data files of a queue"
        raise QueueUnreadable(str(settings.data_path), problem, "Name all of them, in order")
    return storage


class SpannedStorage:
    """See the module's text; contracts of ``storage.Storage``.

    Args:
        paths: in order; two at least.
        read_only: for tools beside a living owner.

    Raises:
        QueueBusy: another process owns one of them. QueueUnreadable: see the module's text.
    """

    def __init__(self, paths: Sequence[Path], *, read_only: bool = False) -> None:
        self._paths = [str(path) for path in paths]
        self._read_only = read_only
        self._files: list[FileStorage] = []
        self._parts: list[SpanPart] = []
        self._written: set[int] = set()
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")
        try:
            for path in paths:
                self._files.append(FileStorage(path, read_only=read_only))
            self._load()
        except BaseException:
            self.close()
            raise

    def allocate(self, size_bytes: int, kept_bytes: int | None = None) -> None:
        """See ``Storage``; the parts' sizes are fixed, and all of them kept, once they are made.

        Raises:
            QueueNoSpace: as ``FileStorage``. QueueUnreadable: a queue that exists was to become larger.
        """
        if self._parts:
            if size_bytes > len(self._view):
                raise QueueUnreadable(
                    self._paths[0],
                    f"its parts hold {len(self._view)} bytes, {size_bytes} are wanted",
                    "Name all files it was made with, in order",
                )
            if any(self._view[:PART_START]):
                for file in self._files:
                    file.allocate(len(file.view()))  # sizes and names: durable on return
                return
            # Never finished: a part's header may be in the cache only, since its sync failed. Give all up.
        count, span_id = len(self._files), secrets.token_bytes(16)
        share = -(-size_bytes // count)
        share += -share % mmap.PAGESIZE
        for number, file in enumerate(self._files):
            file.allocate(PART_START + share, 0)
            file.write(0, [SpanPart(number, count, number * share, share, span_id).pack()])
            file.sync()
        self._load()

    def view(self) -> memoryview:
        """See ``Storage``."""
        return self._view

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        """See ``Storage``."""
        share = self._parts[0].size_bytes
        number, size = offset // share, sum(map(len, buffers))
        if offset % share + size <= share:
            self._put(number, offset % share, buffers)
            return
        rest = memoryview(b"".join(buffers))
        while rest:
            number, at = divmod(offset, share)
            piece = rest[: share - at]
            self._put(number, at, [bytes(piece)])
            offset, rest = offset + len(piece), rest[len(piece) :]

    def _put(self, number: int, at: int, buffers: Sequence[bytes]) -> None:
        self._written.add(number)
        self._files[number].write(PART_START + at, buffers)

    def sync(self) -> None:
        """See ``Storage``."""
        # Forgotten only when all are durable; after a failure there is no further call.
        for number in sorted(self._written):
            self._files[number].sync()
        self._written.clear()

    def release(self) -> None:
        """See ``Storage``."""
        _release(self._map)

    def close(self) -> None:
        """See ``Storage``."""
        self._unmap()
        for file in self._files:
            file.close()

    def _load(self) -> None:
        """Read the parts' headers and map them together; empty if the queue was never finished."""
        found = [read_part(file.view()) for file in self._files]
        first = found[0]
        if first is None or any(part is None for part in found):
            if any(any(file.view()[PART_START : 4 * PART_START]) for file in self._files):
                missing = self._paths[[part is None for part in found].index(True)]
                raise self._refusal(f"{missing} is not a part of it")
            self._parts = []
            return
        parts = [part for part in found if part is not None]
        for number, part in enumerate(parts):
            expected = SpanPart(
                number, len(parts), number * first.size_bytes, first.size_bytes, first.span_id
            )
            if part != expected:
                if self._unfinished(parts):
                    return
                raise self._refusal(f"{self._paths[number]} is part {part.number + 1} of {part.parts}")
        if not self._read_only:
            for file, part in zip(self._files, parts, strict=True):
                if len(file.view()) < PART_START + part.size_bytes:
                    file.allocate(PART_START + part.size_bytes)  # it was truncated: zeros, found by the scan
        self._parts = parts
        self._remap()

    def _unfinished(self, parts: list[SpanPart]) -> bool:
        """Headers of two tries to make the queue, and nothing else in the files."""
        fits = all(part.number == number and part.parts == len(parts) for number, part in enumerate(parts))
        return fits and not any(any(file.view()[PART_START : 4 * PART_START]) for file in self._files)

    def _refusal(self, problem: str) -> QueueUnreadable:
        return QueueUnreadable(
            " + ".join(self._paths), problem, "Name the files it was made with, in the same order"
        )

    def _remap(self) -> None:
        self._unmap()
        total = sum(part.size_bytes for part in self._parts)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        mapping = mmap.mmap(-1, total, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        window = (ctypes.c_char * total).from_buffer(mapping)
        address = ctypes.addressof(window)
        del window
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        ]  # fmt: skip
        for file, part in zip(self._files, self._parts, strict=True):
            fd = file.reopened()
            place = libc.mmap(
                address + part.start, part.size_bytes, _PROT_READ, _MAP_SHARED | _MAP_FIXED, fd, PART_START,
            )  # fmt: skip
            os.close(fd)
            if place in (None, _FAILED):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), self._paths[part.number])
        self._map, self._view = mapping, memoryview(mapping).toreadonly()

    def _unmap(self) -> None:
        self._view = memoryview(b"")
        _close(self._map)
        self._map = None
