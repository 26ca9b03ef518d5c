"""A regular file or block device as a volume: its operations, each returning an error number, and its holes.

Every call may block as long as the file does. Thread: any; the descriptor is used with positions only.
``trim``, ``write_zeroes`` and ``cache`` do a first piece and say how far they came, so that none takes long.

Holes. SEEK_HOLE has no end: behind much data it goes on until the file has a hole, which in memory is a look
at every page. So ``holes``, for reads, only uses SEEK_DATA, once every ``HOLE_BYTES`` at most, and not at all
in a file that has all of its blocks (``may_have_holes``). ``block_status`` uses both, for some extents, in a
thread. It remembers the last stretch of data (``_data``), so that a client that asks for a large file
piece by piece does not make each piece a search to the end of its data. A hole that is taken for data is
read, and no mistake; data that are taken for a hole would be lost: so no hole is ever remembered.

A ``VolumeStorage`` is one opening of the file and keeps its size for ever. ``is_current`` says whether a
client that opens the file now would find the same. It lives as long as a session or the export holds it
(``hold``, ``release``).

Durability: ``flush`` and FUA return after the kernel says that the data are stable (fdatasync, RWF_DSYNC).
It says *once* that it could not write something, to whoever asks first by a descriptor, and forgets it then:
the next fdatasync succeeds though data are lost, perhaps another client's. So once a flush has failed all
later ones of this opening do, and the next client opens the file again (not the next connection of one that
has others: a flush there is for what came by these, too). FUA may be who asks first; so behind
each flush another descriptor is asked, by which nothing else is done. The flush itself is one of the
descriptor that writes: file systems of FUSE may wait for, and know the errors of, what came by the same one
only (sshfs). Flushes are done one at a time, each for all that wait for it (``_SharedSync``).

What the kernel could not write it goes on to show to readers. And ext4, where the file had no block before,
does not write it properly when it comes again: its sync succeeds, and after a power cut there are zeroes. So
behind each flush, and change with FUA, that fails the pages of the file are dropped (``runtime.writeback``):
what is read then is what is on the disk, and what is written then is written as if for the first time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from functools import partial
from typing import Final

import structlog

from gateway_agent.errors import BackingFileError
from gateway_agent.nbd import protocol as p
from pmdaemon.runtime.writeback import NOT_POSSIBLE, forget_pages, missed_error

SECTOR_BYTES: Final = 512
"""Clients that are block devices count in these: they would hide what is behind the last whole one."""
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_ZERO_RANGE: Final = 16
_ZEROES: Final = bytes(1 << 20)
_RANGE_BYTES: Final = 64 << 20  # given back, or made zero by the file itself, at a time: some milliseconds
_CACHE_BYTES: Final = 1 << 20  # the kernel reads about so much ahead for one call
HOLE_BYTES: Final = 64 << 10  # smaller holes of a read are read; a look for one costs as much as some 4 KiB

IN_USE: Final = (
    "this host uses the device itself (mounted, or a part of LVM, RAID or multipath): two that write to it "
    "destroy what is there"
)
Extent = tuple[int, int]
"""Length in bytes, and state as in a block status chunk."""
_DATA: Final = 0
_HOLE: Final = p.STATE_HOLE | p.STATE_ZERO

_FLAGS: Final = (
    p.TX_HAS_FLAGS | p.TX_SEND_FLUSH | p.TX_SEND_FUA | p.TX_SEND_DF | p.TX_SEND_CACHE
    | p.TX_CAN_MULTI_CONN  # a flush is one of the file, whatever connection it comes by
)  # fmt: skip

log = structlog.get_logger("storage")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _fallocate(fd: int, mode: int, offset: int, length: int) -> int:
    """Error number of fallocate(2)."""
    return 0 if _libc.fallocate(fd, mode, offset, length) == 0 else ctypes.get_errno()


def _check_kind(mode: int) -> None:
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise ValueError("it is neither a regular file nor a block device")


def is_in_use(path: str) -> bool:
    """Whether this host uses a block device itself: as file system, swap, or a part of LVM, RAID, multipath.

    The kernel gives such a one to no other exclusive user; programs that only open it are not seen.
    """
    try:
        if not stat.S_ISBLK(os.stat(path).st_mode):
            return False
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as exc:
        return exc.errno == errno.EBUSY
    return False


class _SharedSync:
    """Flushes of one opening of a file: one fdatasync for all that came before it began; see the module.

    ``_changed`` guards all fields. ``begun`` and ``ended`` count calls; the thread that begins one makes it.

    Attributes:
        error: number for the wire of the first one that failed; 0 while none has.

    Args:
        fd: by which is written.
        asking_fd: another one of the same file, by which nothing is done.
    """

    def __init__(self, fd: int, asking_fd: int) -> None:
        self.error = 0
        self._fd = fd
        self._asking_fd = asking_fd
        self._changed = threading.Condition()
        self._begun = self._ended = 0

    def sync(self) -> int:
        """Returns 0 when all that was written before the call is stable. Any thread."""
        with self._changed:
            wanted = self._begun + 1
            while self._ended < wanted and self._begun > self._ended:
                self._changed.wait()
            if self._ended >= wanted or self.error:
                return self.error
            self._begun += 1
        error = p.EIO
        try:
            os.fdatasync(self._fd)
            missed = missed_error(self._asking_fd)
            error = p.wire_error(missed) if missed else 0
        except OSError as exc:
            error = p.wire_error(exc.errno or p.EIO)
        finally:
            if error:
                forget_pages(self._fd)
            with self._changed:
                self.error = self.error or error
                self._ended = self._begun
                self._changed.notify_all()
        return self.error


class VolumeStorage:
    """See the module docstring.

    Attributes:
        facts: size and flags.
        may_have_holes: whether a read should look for some.
        preadv: that of the file; what it does not read whole at once is for ``read``.
        tells_cached: whether a read with ``RWF_NOWAIT`` says what would have to wait for the storage.
        jobs_waiting: how many are with the workers; thread: the loop's.

    Args:
        volume: for error texts.
        path: file or block device.
        read_only: open it so.

    Raises:
        BackingFileError: it cannot be opened, is neither file nor block device, or has a size that cannot be
            served.
    """

    def __init__(self, volume: str, path: str, *, read_only: bool) -> None:
        self._path = path
        self._holders = 1
        self._impossible: set[int] = set()  # modes of fallocate that this file does not know
        self._data = (0, 0)  # offsets between which there are data, as far as known
        try:
            _check_kind(os.stat(path).st_mode)  # before: the open of a pipe would wait for its other end
            self._fd = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
        except OSError as exc:
            raise BackingFileError(volume, path, exc.strerror or str(exc)) from exc
        except ValueError as exc:
            raise BackingFileError(volume, path, str(exc)) from exc
        try:
            size_bytes = self._size_bytes()
            self._asking_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as exc:
            os.close(self._fd)
            raise BackingFileError(volume, path, str(exc)) from exc
        self._sync = _SharedSync(self._fd, self._asking_fd)
        self.facts = p.ExportFacts(size_bytes, _FLAGS | (p.TX_READ_ONLY if read_only else p.TX_CHANGES))
        self.preadv = partial(os.preadv, self._fd)
        self.tells_cached = self._tells_cached()
        self.jobs_waiting = 0
        opened = os.fstat(self._fd)
        self._is_device = stat.S_ISBLK(opened.st_mode)
        self.may_have_holes = not self._is_device and opened.st_blocks * SECTOR_BYTES < size_bytes

    def _size_bytes(self) -> int:
        _check_kind(os.fstat(self._fd).st_mode)
        size_bytes = os.lseek(self._fd, 0, os.SEEK_END)  # block devices have no size in fstat
        if not size_bytes or size_bytes % SECTOR_BYTES:
            raise ValueError(
                f"its size of {size_bytes} bytes is not a multiple of {SECTOR_BYTES} above 0; "
                "make it so with truncate -s"
            )
        return size_bytes

    def _tells_cached(self) -> bool:
        try:
            os.preadv(self._fd, [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError:  # a file system that does not know it, as tmpfs
            return False
        return True

    def read(self, into: memoryview, offset: int) -> int:
        """Fill ``into``; a file that has become shorter is EIO."""
        done = 0
        try:
            while done < len(into):
                count = os.preadv(self._fd, [into[done:]], offset + done)
                if not count:
                    return p.EIO
                done += count
        except OSError as exc:
            return p.wire_error(exc.errno or p.EIO)
        return 0

    def write(self, data: memoryview | bytes, offset: int, *, fua: bool) -> int:
        """Write all of ``data``; stable on return if ``fua``."""
        view, flags = memoryview(data), os.RWF_DSYNC if fua else 0
        try:
            count = os.pwritev(self._fd, (view,), offset, flags)
            if count == len(view):
                return 0
            view, offset = view[count:], offset + count
            while view:
                count = os.pwritev(self._fd, [view], offset, flags)
                view, offset = view[count:], offset + count
        except OSError as exc:
            if fua:
                forget_pages(self._fd)
            return p.wire_error(exc.errno or p.EIO)
        return 0

    def flush(self) -> int:
        """Make everything written so far stable; never again once it has failed, see the module."""
        has_failed = bool(self._sync.error)
        error = self._sync.sync()
        if error and not has_failed:
            effect = "flushes of its clients fail until they have closed all connections and connect again"
            log.error("flush-failed", path=self._path, error=os.strerror(error), effect=effect)
        return error

    def cache(self, offset: int, length: int) -> tuple[int, int]:
        """Have a first piece of the range read ahead. Returns as ``trim``."""
        piece = min(_CACHE_BYTES, length)
        try:
            if piece:  # 0 would mean up to the end
                os.posix_fadvise(self._fd, offset, piece, os.POSIX_FADV_WILLNEED)
        except OSError as exc:
            return p.wire_error(exc.errno or p.EIO), piece
        return 0, piece

    def trim(self, offset: int, length: int) -> tuple[int, int]:
        """Give a first piece of the range back if the file can; a hint, so that one that cannot is no error.

        Returns:
            Error number, and the bytes dealt with.
        """
        return self._by_the_file(_PUNCH_HOLE | _KEEP_SIZE, offset, length) or (0, length)

    def write_zeroes(self, offset: int, length: int, *, may_punch: bool, fast: bool) -> tuple[int, int]:
        """Make a first piece of the range read as zeroes, as a hole if it may be one. Returns as ``trim``.

        With ``fast`` it is ENOTSUP, and nothing is changed, if zeroes would have to be written.
        """
        is_odd = (offset | length) % SECTOR_BYTES
        if fast and self._is_device and (is_odd or not may_punch):
            return p.ENOTSUP, 0  # the kernel may write them, and does not say so
        done = self._by_the_file((_PUNCH_HOLE if may_punch else _ZERO_RANGE) | _KEEP_SIZE, offset, length)
        if done is not None:
            return done
        if fast:
            return p.ENOTSUP, 0
        piece = min(len(_ZEROES), length)
        return self.write(memoryview(_ZEROES)[:piece], offset, fua=False), piece

    def _by_the_file(self, mode: int, offset: int, length: int) -> tuple[int, int] | None:
        """What fallocate made of a first piece; None when this file does not know that."""
        piece = min(_RANGE_BYTES, length)
        if not piece:
            return 0, 0
        error = 95 if mode in self._impossible else _fallocate(self._fd, mode, offset, piece)
        if error in NOT_POSSIBLE:
            if error != p.EINVAL:
                self._impossible.add(mode)
            return None
        if mode & _PUNCH_HOLE:
            self.may_have_holes, self._data = not self._is_device, (0, 0)
        return p.wire_error(error), piece

    def holes(self, offset: int, length: int) -> list[tuple[int, int]]:
        """Offsets (begin, end) of holes of at least ``HOLE_BYTES`` within a range, in order.

        They may begin later than the file's own, at a multiple of ``HOLE_BYTES``.
        """
        found: list[tuple[int, int]] = []
        at, end = offset, offset + length
        while self.may_have_holes and end - at >= HOLE_BYTES:
            data_from = min(self._next_data(at), end)
            if data_from - at >= HOLE_BYTES:
                found.append((at, data_from))
                at = data_from
            else:
                at = (at // HOLE_BYTES + 1) * HOLE_BYTES
        return found

    def block_status(self, offset: int, length: int, most: int) -> list[Extent]:
        """Consecutive extents from ``offset`` on, at most ``most``, so perhaps not of the whole range."""
        found: list[Extent] = []
        at, end = offset, offset + length
        while at < end and len(found) < most:
            until, state = self._extent(at)
            until = min(until, end)
            found.append((until - at, state))
            at = until
        return found

    def _extent(self, at: int) -> tuple[int, int]:
        """Where what is at an offset ends, and its state."""
        data_from, data_until = self._data
        if data_from <= at < data_until:
            return data_until, _DATA
        if (until := self._next_data(at)) > at:
            return until, _HOLE
        try:
            until = os.lseek(self._fd, at, os.SEEK_HOLE)
        except OSError:
            until = self.facts.size_bytes
        until = max(until, at + SECTOR_BYTES)  # another may punch a hole just here, just now
        self._data = at, until
        return until, _DATA

    def _next_data(self, at: int) -> int:
        """Where the next data begin; ``at`` itself also if that cannot be known."""
        try:
            return os.lseek(self._fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno != errno.ENXIO:  # a device, or a file system that does not know
                return at
        # A hole up to the end of the file. Where the file became shorter is no hole: reads fail there.
        return max(at, os.fstat(self._fd).st_size)

    @property
    def flush_has_failed(self) -> bool:
        """Whether something that was written may be lost."""
        return bool(self._sync.error)

    def is_same_file(self, other: VolumeStorage) -> bool:
        """Whether both are openings of one file, for the same use."""
        return self.facts == other.facts and os.path.sameopenfile(self._fd, other._fd)

    def is_current(self) -> bool:
        """Whether the path still names this file, with this size, and no flush of it has failed.

        Raises:
            OSError: it names nothing whose state can be read.
        """
        if self.flush_has_failed:
            return False
        opened, named = os.fstat(self._fd), os.stat(self._path)
        is_same = (opened.st_dev, opened.st_ino, opened.st_rdev) == (
            named.st_dev,
            named.st_ino,
            named.st_rdev,
        )
        return is_same and os.lseek(self._fd, 0, os.SEEK_END) == self.facts.size_bytes

    def hold(self) -> None:
        """One more user."""
        self._holders += 1

    def release(self) -> None:
        """One user less; the last one closes the file."""
        self._holders -= 1
        if not self._holders:
            os.close(self._asking_fd)
            os.close(self._fd)
