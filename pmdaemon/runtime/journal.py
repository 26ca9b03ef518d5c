"""Log lines as entries of systemd's journal: fields that ``journalctl`` selects by, instead of text alone.

systemd names in ``JOURNAL_STREAM`` the device and inode of the stream it gave a service as stderr. A process
whose stderr is that very stream sends entries to the journal's socket, in its native form; any other (a file,
a pipe, a terminal, ``2>`` in a unit) goes on writing lines. The fields of an entry:

    MESSAGE            the line without time, level and process
    PRIORITY           of syslog: 7 debug, 6 info, 4 warning, 3 error, 2 critical
    SYSLOG_IDENTIFIER  the process: sla-dbmanager, sla-supervisor, ...
    MESSAGE_ID         the same for all entries of one event, in every release (``message_id``)
    SLA_EVENT          the event: server-started, segment-damaged, ...
    SLA_...            each further value of the line, its key in capitals

Nothing here waits: a journal that does not take an entry has it counted as lost (``logs.LineSink``).
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

STREAM: Final = "JOURNAL_STREAM"
SOCKET: Final = "/run/systemd/journal/socket"
PREFIX: Final = "sla-"
PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
MOST_VALUE_BYTES: Final = 16 << 10  # of one field; a datagram holds some 200 KB
MOST_FIELDS: Final = 10  # of that length: what a line has beyond them is in MESSAGE alone
APART: Final = frozenset({"event", "level", "process", "timestamp"})
_GONE: Final = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN)
"""Of a journal that was started again, with another socket of this name: refused once, then not connected."""
_NAMESPACE: Final = uuid.UUID("5d0f2a86-8f0c-5a43-9d0b-6d2a4c8b7a10")  # any constant; releases must agree


class JournalEntry(str):
    """A line, with the fields from which the journal's entry is made."""

    fields: Mapping[str, Any]

    @classmethod
    def of(cls, text: str, fields: Mapping[str, Any]) -> JournalEntry:
        """A line and its fields."""
        made = cls(text)
        made.fields = fields
        return made


def message_id(event: str) -> str:
    """The MESSAGE_ID of an event, 32 hexadecimal digits."""
    return uuid.uuid5(_NAMESPACE, event).hex


def is_stream(descriptor: int) -> bool:
    """Whether the descriptor is the stream that systemd gave this service."""
    device, _, inode = os.environ.get(STREAM, "").partition(":")
    try:
        status = os.fstat(descriptor)
        return (int(device), int(inode)) == (status.st_dev, status.st_ino)
    except (OSError, ValueError):
        return False


def opened(descriptor: int) -> Callable[[bytes], int] | None:
    """How entries get to the journal; None where the descriptor is not its stream, or it has no socket."""
    if not is_stream(descriptor):
        return None
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        sender.connect(SOCKET)
    except OSError:
        sender.close()
        return None

    def send(data: bytes) -> int:
        try:
            return sender.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as exc:
            if exc.errno not in _GONE:
                raise
            sender.connect(SOCKET)
            return sender.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    return send


def encoded(process: str, line: str) -> bytes:
    """The datagram of a line; one without fields was printed, and is a notice without an event."""
    given = line.fields if isinstance(line, JournalEntry) else {}
    level, event = str(given.get("level", "")), str(given.get("event", ""))
    name = str(given.get("process", process))
    found: dict[str, str] = {
        "MESSAGE": line,
        "PRIORITY": str(PRIORITIES.get(level, 5)),
        "SYSLOG_IDENTIFIER": name if name.startswith(PREFIX) else f"{PREFIX}{name}",
    }
    if event:
        found["MESSAGE_ID"] = message_id(event)
        found["SLA_EVENT"] = event
    for key in [key for key in given if key not in APART][:MOST_FIELDS]:
        found[f"SLA_{re.sub('[^A-Z0-9_]', '_', str(key).upper())}"[:64]] = str(given[key])
    return b"".join(_field(key, value) for key, value in found.items())


def _field(name: str, text: str) -> bytes:
    """``NAME=value``; a value of several lines has its length before it."""
    value = text.encode(errors="backslashreplace")[:MOST_VALUE_BYTES]
    if b"\n" not in value:
        return name.encode() + b"=" + value + b"\n"
    return name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n"
