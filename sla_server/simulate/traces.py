"""Recorded I/O: two text formats, chosen by the first line.

    time,volume,client,kind,bytes      a header, then a request a line: seconds, two names, read|write, bytes
    938513000 4 264719034 16 0         no header: arrival in ns, device, sector, sectors of 512 bytes, 0 write
                                       or 1 read; the volume is ``dev-4``, there are no clients (``trace``)

Times may begin anywhere and are shifted so that the trace begins at 0; they must not fall. ``stretch`` makes
everything that much slower. Empty lines, lines that begin with # and a byte order mark are skipped. Pure but
for ``read_trace``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pmdaemon.wire.names import is_name
from sla_server.simulate.errors import SimulationError, TooManyIos
from sla_server.simulate.loads import MOST_SPAN_S

HEADER: Final = ("time", "volume", "client", "kind", "bytes")
SECTOR_BYTES: Final = 512
MOST_BYTES: Final = 1 << 30
MOST_TIME: Final = 1e19
"""Wall clock in ns, and room."""
MOST_DIGITS: Final = 18
"""Of a device's number; what has more is a damaged line."""
NO_CLIENT: Final = "trace"
"""Client of a request whose trace does not say whose it is."""
_FORMATS: Final = (
    "Expected 'time,volume,client,kind,bytes' (with that header), or 'ns device sector sectors type'"
)


@dataclass(frozen=True, slots=True)
class TracedIo:
    """One request of a trace: seconds from its beginning."""

    at_s: float
    volume: str
    client: str
    is_write: bool
    size_bytes: int


def read_trace(path: Path, stretch: float, most_ios: int) -> list[TracedIo]:
    """All requests of a file, in order.

    Args:
        path: the file.
        stretch: 1 as recorded, 100 a hundred times slower.
        most_ios: limit.

    Raises:
        SimulationError: names the line; or the file has more than ``most_ios``.
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        return parse_trace(lines, str(path), stretch, most_ios)


def parse_trace(lines: Iterable[str], path: str, stretch: float, most_ios: int) -> list[TracedIo]:
    """The requests of these lines; see ``read_trace``."""
    found: list[TracedIo] = []
    first_s = last_s = 0.0
    parser: Callable[[str, str, int], tuple[float, str, str, bool, int]] | None = None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if parser is None:
            parser = _csv if "," in text else _sectors
            if parser is _csv:
                if tuple(part.strip().lower() for part in text.split(",")) != HEADER:
                    raise _at(path, number, f"{text[:60]!r} is not the header", _FORMATS)
                continue
        at_s, volume, client, is_write, size = parser(text, path, number)
        if not found:
            first_s = last_s = at_s
        if at_s < last_s:
            problem = f"time {at_s:.9g} s is before that of the line before ({last_s:.9g} s)"
            raise _at(path, number, problem, "Sort the trace by time")
        last_s = at_s
        if (ends_s := (at_s - first_s) * stretch) > MOST_SPAN_S:
            problem = f"time {parts_of(text)[0][:30]} is {ends_s:.6g} s after the first request"
            most = f"{MOST_SPAN_S:,.0f} s (7 days)"
            fix = f"Cut the trace or lower --stretch: a simulation lasts {most} at most"
            raise _at(path, number, problem, fix)
        if len(found) >= most_ios:
            raise TooManyIos(len(found) + 1, most_ios, f"Cut {path} shorter, or raise the limit")
        found.append(TracedIo(ends_s, volume, client, is_write, size))
    if not found:
        raise _at(path, 1, "there is no request in the file", _FORMATS)
    return found


def parts_of(text: str) -> list[str]:
    """The values of a line of either format."""
    return [part.strip() for part in text.split(",")] if "," in text else text.split()


def _csv(text: str, path: str, number: int) -> tuple[float, str, str, bool, int]:
    parts = parts_of(text)
    if len(parts) != len(HEADER):
        raise _at(path, number, f"{len(parts)} values, {len(HEADER)} are needed", _FORMATS)
    at_s = _number(parts[0], "time", path, number)
    for name, value in zip(HEADER[1:3], parts[1:3], strict=True):
        if not is_name(value):
            fix = "Use 1 to 128 letters, digits and . _ : @ -"
            raise _at(path, number, f"{name} {value[:40]!r} is not a name", fix)
    if parts[3].lower() not in ("read", "write"):
        raise _at(path, number, f"kind {parts[3][:20]!r} is neither", "Write read or write")
    return at_s, parts[1], parts[2], parts[3].lower() == "write", _size(parts[4], 1, "bytes", path, number)


def _sectors(text: str, path: str, number: int) -> tuple[float, str, str, bool, int]:
    parts = parts_of(text)
    if len(parts) != 5:
        raise _at(path, number, f"{text[:60]!r} has {len(parts)} values, not 5", _FORMATS)
    at_s = _number(parts[0], "time", path, number) / 1e9
    if not _is_whole(parts[1]):
        problem = f"device {parts[1][:20]!r} is not a whole number of at most {MOST_DIGITS} digits"
        raise _at(path, number, problem, _FORMATS)
    if parts[4] not in ("0", "1"):
        raise _at(path, number, f"type {parts[4][:20]!r} is neither", "Write 0 for write or 1 for read")
    size = _size(parts[3], SECTOR_BYTES, "sectors", path, number)
    return at_s, f"dev-{int(parts[1])}", NO_CLIENT, parts[4] == "0", size


def _number(text: str, name: str, path: str, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _at(path, line, f"{name} {text[:30]!r} is not a number", _FORMATS) from None
    if not 0 <= value < MOST_TIME:
        problem = f"{name} {text[:30]!r} is not from 0 to {MOST_TIME:g}"
        raise _at(path, line, problem, "Write seconds, or ns in the format without a header")
    return value


def _size(text: str, unit: int, name: str, path: str, line: int) -> int:
    if not _is_whole(text) or not 0 < int(text) * unit <= MOST_BYTES:
        problem = f"{name} {text[:20]!r} is not a size"
        raise _at(path, line, problem, f"Write a whole number from 1 to {MOST_BYTES // unit:,}")
    return int(text) * unit


def _is_whole(text: str) -> bool:
    """Whether it is a whole number; ``isdigit`` alone is also true of digits that are none to ``int``."""
    return text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS


def _at(path: str, line: int, problem: str, fix: str) -> SimulationError:
    return SimulationError(f"{path}: line {line}", problem, fix)
