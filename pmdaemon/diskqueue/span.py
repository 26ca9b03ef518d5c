r"""One queue over several data files, perhaps on several disks: a ``Storage`` that joins them end to end.

    file k   offset 0      part header, 4096 bytes
             offset 4096   bytes [start, start + size) of the whole; sizes are multiples of 4096

    part header, little-endian: magic "SLADQP01", u32 number, u32 parts, u64 start, u64 size,
                                16 bytes span id (the same in all parts of a queue), u32 checksum

``view`` must be one window, though records lie across the borders: the files are mapped one behind another
into one reserved range of addresses (``mmap`` with MAP_FIXED, which Python's module does not offer).

What a crash while the parts are made can leave: parts without a header, or with the header of another try.
They hold nothing as long as the whole's own header (``record.FileHeader``, written last) is missing, and are
made again. With it, a part that is missing, exchanged or foreign is refused; nothing is changed then.

Downsides: a sync is one fdatasync for each file written to, one after another; the number of files is fixed
when the queue is made; the loss of one disk is the loss of the queue. Source: Q10.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from pmdaemon.diskqueue.errors import QueueUnreadable
from pmdaemon.diskqueue.settings import QueueSettings
from pmdaemon.diskqueue.storage import FileStorage

PART_START: Final = 4096
MAGIC: Final = b"SLADQP01"
_HEADER: Final = struct.Struct("<8sIIQQ16s")
_CRC: Final = struct.Struct("<I")
_PROT_READ, _MAP_SHARED, _MAP_FIXED, _MAP_NORESERVE = 1, 1, 0x10, 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value


class SpanPart(NamedTuple):
    """What a part's header says."""

    number: int
    parts: int
    start: int
    size_bytes: int
    span_id: bytes

    def pack(self) -> bytes:
        """The header, ``PART_START`` bytes."""
        body = _HEADER.pack(MAGIC, *self)
        return (body + _CRC.pack(zlib.crc32(body))).ljust(PART_START, b"\0")


def read_part(view: memoryview) -> SpanPart | None:
    """The header of a part; None if it is not whole."""
    body = bytes(view[: _HEADER.size])
    crc = bytes(view[_HEADER.size : _HEADER.size + _CRC.size])
    if len(crc) < _CRC.size or not body.startswith(MAGIC) or _CRC.unpack(crc)[0] != zlib.crc32(body):
        return None
    return SpanPart(*_HEADER.unpack(body)[1:])


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

    def allocate(self, size_bytes: int) -> None:
        """See ``Storage``; the parts' sizes are fixed when they are made.

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
            # Never finished: a part's header may be in the cache only, since its sync failed.
        count, span_id = len(self._files), secrets.token_bytes(16)
        share = -(-size_bytes // count)
        share += -share % mmap.PAGESIZE
        for number, file in enumerate(self._files):
            file.allocate(PART_START + share)
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
        # Forgotten only when all are durable; after a failure nobody calls again.
        for number in sorted(self._written):
            self._files[number].sync()
        self._written.clear()

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
                    file.allocate(
                        PART_START + part.size_bytes
                    )  # somebody cut it off: zeros, found by the scan
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
        whole = mmap.mmap(-1, total, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        window = (ctypes.c_char * total).from_buffer(whole)
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
        self._map, self._view = whole, memoryview(whole).toreadonly()

    def _unmap(self) -> None:
        self._view = memoryview(b"")
        if self._map is not None:
            with suppress(BufferError):  # a reader still holds a slice; unmapped when it lets go
                self._map.close()
            self._map = None
