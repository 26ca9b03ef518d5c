r"""Segments: the files of the spool, appended to and deleted whole.

    offset  size  field
    0       8     magic "SLASPL1\n"
    then records, one behind another, little-endian:
    0       4     crc32 of the frame
    4       4     length of the frame in bytes
    8       n     a CUT frame (docs/formats/wire.md)

Crash: a record is one ``write``. Killed within it, the file ends in a torn record: a length beyond the file's
end or a wrong crc. ``scan`` stops there. A link never appends to a segment it did not begin, so a torn record
is always the last of its file and nothing has to be cut off.

Downside accepted: no fsync. The bytes survive the death of the process, not a power cut of the host.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from pmdaemon.errors import WireError
from pmdaemon.wire import cut, frame
from pmdaemon.wire.kinds import Kind

MAGIC: Final = b"SLASPL1\n"
RECORD: Final = struct.Struct("<II")
SUFFIX: Final = ".spool"


class Place(NamedTuple):
    """Where a record's frame stands: segment number, offset and length of the frame in bytes."""

    segment: int
    offset: int
    length: int


class Found(NamedTuple):
    """One whole record met by a scan."""

    epoch: int
    seq: int
    header: dict[str, Any]
    place: Place


def path_of(directory: Path, number: int) -> Path:
    """File of segment ``number``; names sort in order of age."""
    return directory / f"{number:016d}{SUFFIX}"


def numbers(directory: Path) -> list[int]:
    """Numbers of all segments, oldest first."""
    names = (path.name.removesuffix(SUFFIX) for path in directory.glob(f"*{SUFFIX}"))
    return sorted(int(name) for name in names if name.isdigit())


def scan(directory: Path, number: int) -> tuple[list[Found], int]:
    """All whole records of a segment, in order, and the bytes behind them that are none.

    Raises:
        OSError: the file cannot be read.
    """
    data = path_of(directory, number).read_bytes()
    if data[: len(MAGIC)] != MAGIC:
        return [], len(data)
    found = list(_records(memoryview(data), number))
    end = found[-1].place.offset + found[-1].place.length if found else len(MAGIC)
    return found, len(data) - end


def _records(data: memoryview, number: int) -> Iterator[Found]:
    offset = len(MAGIC)
    while offset + RECORD.size <= len(data):
        crc, length = RECORD.unpack_from(data, offset)
        offset += RECORD.size
        raw = data[offset : offset + length]
        if len(raw) != length or zlib.crc32(raw) != crc:
            return
        try:
            parsed = frame.decode(raw)
            _, epoch, seq = cut.identity(parsed.header)
        except WireError:
            return
        if parsed.kind != Kind.CUT:
            return
        yield Found(epoch, seq, parsed.header, Place(number, offset, length))
        offset += length


def read(directory: Path, place: Place) -> bytes:
    """The frame at ``place``.

    Raises:
        OSError: the file cannot be read.
    """
    with path_of(directory, place.segment).open("rb", buffering=0) as stream:
        return os.pread(stream.fileno(), place.length, place.offset)


class SegmentWriter:
    """The segment that is being appended to; begins it."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path_of(directory, number), flags, 0o600)
        self.size_bytes = 0
        try:
            self._write(MAGIC)
        except OSError:
            os.close(self._fd)
            raise

    def append(self, raw: bytes) -> Place:
        """Write one record.

        Raises:
            OSError: it could not be written whole. A part may stand in the file: close this segment, begin
                another.
        """
        offset = self.size_bytes + RECORD.size
        self._write(RECORD.pack(zlib.crc32(raw), len(raw)) + raw)
        return Place(self.number, offset, len(raw))

    def _write(self, data: bytes) -> None:
        written = os.write(self._fd, data)
        if written != len(data):
            raise OSError(f"{written} of {len(data)} bytes written")
        self.size_bytes += written

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)
