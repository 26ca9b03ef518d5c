"""Messages between the event deliveries of two cooperating servers, over TLS with certificates on both sides.

Each server dials the other one, so there are two connections. On each of them the side that dialled is the
*origin*, whose events they are, and the other one the *keeper*, which stores them. The origin begins with
MIRROR_HELLO; the keeper says what it has delivered (MIRROR_DELIVERED, any number) and then MIRROR_WELCOME.
From there on the origin sends events and confirmations, the keeper what it has on disk, and each of the two
MIRROR_BEAT, so that silence means something. ERROR and BYE end the connection from either side.

A queue is named by its id, 16 hexadecimal digits drawn when it was made: an origin that has lost its disk
has other queues. The keeper's limits are those of ``MOST_*`` below. Pure.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from pmdaemon.errors import FrameTooLarge, MalformedFrame
from pmdaemon.runtime.excerpt import excerpt, printable
from pmdaemon.wire import frame
from pmdaemon.wire.frame import Frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import FoldedMessage, Header, Key, WireMessage, name, rows, whole

MIRROR_PROTO: Final = 1
MOST_EVENTS: Final = 512
"""Of one MIRROR_EVENTS."""
MOST_EVENT_BYTES: Final = 128 << 10
"""Of one event; the largest that a process can raise has half of it."""
MOST_QUEUES: Final = 4
MOST_RECIPIENTS: Final = 4096
MOST_IDENTITIES: Final = 500
"""Of one MIRROR_DELIVERED."""
MOST_OPENINGS: Final = 32
"""So many fit the first frame, which is read before the origin has said who it is."""
MOST_SEQ: Final = (1 << 63) - 1
MOST_OPEN: Final = 32_768
_QUEUE_ID: Final = re.compile(r"[0-9a-f]{16}")
_MOST_NAME: Final = 256


class MirroredQueue(NamedTuple):
    """One queue of the origin: ``name`` says what it is for, ``queue_id`` which one it is.

    ``newest_seq``: number of the newest record on its disk; a keeper that has newer ones knows that this disk
    was set back, and that the origin gives their numbers again.
    """

    name: str
    queue_id: str
    newest_seq: int = 0


class MirroredOpening(NamedTuple):
    """One time that the origin has opened its queues: a random id, and their newest numbers then, in order.

    A keeper that knows one which the origin no longer names knows that the disk of the origin was set back.
    """

    opening_id: str
    newest_seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MirrorHello(WireMessage):
    """First frame of an origin: who it is, whom it means, and its queues in the order of a replay.

    ``openings``: of these queues, the oldest first; a former release sends none.
    """

    KIND: ClassVar = Kind.MIRROR_HELLO
    proto: int
    name: str
    partner: str
    queues: Annotated[tuple[MirroredQueue, ...], Key(form="[[name, queue_id, newest_seq]]")]
    openings: Annotated[tuple[MirroredOpening, ...], Key(form="[[opening_id, [newest_seq]]]")] = ()

    @classmethod
    def parse(cls, header: Header) -> MirrorHello:
        """Check a header.

        Raises:
            WireError: names the key and its value.
        """
        queues = []
        for row in rows(header, "MIRROR_HELLO", "queues", MOST_QUEUES):
            if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str):
                raise MalformedFrame(
                    f"MIRROR_HELLO: key 'queues' has {excerpt(row)}, expected [name, id, newest number]"
                )
            newest = whole({"queues": row[2]}, "MIRROR_HELLO", "queues", 0, MOST_SEQ)
            queues.append(MirroredQueue(printable(row[0], 20), _queue_id(row[1], "MIRROR_HELLO"), newest))
        return cls(
            proto=whole(header, "MIRROR_HELLO", "proto", 1, 1 << 16),
            name=name(header, "MIRROR_HELLO", "name"),
            partner=name(header, "MIRROR_HELLO", "partner"),
            queues=tuple(queues),
            openings=_openings(header, len(queues)) if "openings" in header else (),
        )


@dataclass(frozen=True, slots=True)
class MirrorWelcome(WireMessage):
    """The keeper's answer: the newest number of each queue that it has on disk, and how many events it keeps.

    What it has delivered for the origin was said before (MIRROR_DELIVERED).
    """

    KIND: ClassVar = Kind.MIRROR_WELCOME
    proto: int
    name: str
    kept: Annotated[dict[str, int], Key(form="{queue_id: seq}")]
    most_events: int

    @classmethod
    def parse(cls, header: Header) -> MirrorWelcome:
        """Check a header.

        Raises:
            WireError: names the key and its value.
        """
        return cls(
            proto=whole(header, "MIRROR_WELCOME", "proto", 1, 1 << 16),
            name=name(header, "MIRROR_WELCOME", "name"),
            kept=_seqs(header, "MIRROR_WELCOME", "kept"),
            most_events=whole(header, "MIRROR_WELCOME", "most_events", 0, MOST_SEQ),
        )


@dataclass(frozen=True, slots=True)
class MirrorEvents(WireMessage):
    """Events of one queue in the order of their numbers. The blob has the records, one behind another."""

    KIND: ClassVar = Kind.MIRROR_EVENTS
    queue_id: Annotated[str, Key("queue")]
    seqs: Annotated[tuple[int, ...], Key(form="[int]")]
    sizes: Annotated[tuple[int, ...], Key(form="[int]")]
    records: Annotated[bytes, Key("(blob)", "bytes")] = b""

    @classmethod
    def of(cls, queue_id: str, records: Sequence[tuple[int, bytes]]) -> MirrorEvents:
        """The message for these (number, record)."""
        seqs, sizes = tuple(seq for seq, _ in records), tuple(len(data) for _, data in records)
        return cls(queue_id, seqs, sizes, b"".join(data for _, data in records))

    def header(self) -> Header:
        """The header as it goes on the wire."""
        return {"queue": self.queue_id, "seqs": list(self.seqs), "sizes": list(self.sizes)}

    def encode(self) -> bytes:
        """The frame.

        Raises:
            FrameTooLarge: there are too many.
        """
        return frame.encode(self.KIND, self.header(), self.records)

    def each(self) -> Iterator[tuple[int, bytes]]:
        """Number and record of each event."""
        start = 0
        for seq, size in zip(self.seqs, self.sizes, strict=True):
            yield seq, self.records[start : start + size]
            start += size

    @classmethod
    def parse(cls, received: Frame) -> MirrorEvents:
        """Check a frame.

        Raises:
            WireError: names the key and its value.
        """
        header = received.header
        queue_id = _queue_id(header.get("queue"), "MIRROR_EVENTS")
        seqs = _ascending(header, "MIRROR_EVENTS", "seqs", MOST_EVENTS)
        sizes = rows(header, "MIRROR_EVENTS", "sizes", MOST_EVENTS)
        if len(sizes) != len(seqs):
            raise MalformedFrame(f"MIRROR_EVENTS: {len(sizes)} sizes for {len(seqs)} numbers")
        for size in sizes:
            if type(size) is not int or not 0 < size <= MOST_EVENT_BYTES:
                raise MalformedFrame(
                    f"MIRROR_EVENTS: key 'sizes' has {excerpt(size)}, expected 1 to {MOST_EVENT_BYTES}"
                )
        if not sum(sizes) <= len(received.blob) < sum(sizes) + 8:
            raise MalformedFrame(f"MIRROR_EVENTS: a blob of {len(received.blob)} bytes for {sum(sizes)}")
        return cls(queue_id, tuple(seqs), tuple(sizes), bytes(received.blob))


@dataclass(frozen=True, slots=True)
class MirrorKept(WireMessage):
    """The keeper has the events of a queue up to ``seq`` on disk.

    ``full``: it had no room for what came behind that; the origin sends it again a second later.
    """

    KIND: ClassVar = Kind.MIRROR_KEPT
    queue_id: Annotated[str, Key("queue")]
    seq: int
    is_full: Annotated[bool, Key("full")] = False

    @classmethod
    def parse(cls, header: Header) -> MirrorKept:
        """Check a header.

        Raises:
            WireError: names the key and its value.
        """
        seq = whole(header, "MIRROR_KEPT", "seq", 0, MOST_SEQ)
        return cls(_queue_id(header.get("queue"), "MIRROR_KEPT"), seq, header.get("full") is True)


@dataclass(frozen=True, slots=True)
class MirrorConfirmed(FoldedMessage):
    """How far the origin's recipients have come. Folded above 64 KiB.

    ``queues`` gives the order of the numbers in ``cursors``: a recipient needs no event of a queue up to its
    number there. ``done``: no recipient needs an event up to there, so the keeper forgets them. The last
    queue holds what is due later, and is not emptied in order: of its events up to ``open_through`` those
    in ``open`` alone (numbers of 8 bytes, little-endian) are left.
    """

    KIND: ClassVar = Kind.MIRROR_CONFIRMED
    queues: Annotated[tuple[str, ...], Key(form="[queue_id]")]
    cursors: Annotated[dict[str, tuple[int, ...]], Key(form="{recipient: [seq]}")]
    done: Annotated[dict[str, int], Key(form="{queue_id: seq}")]
    open_seqs: Annotated[tuple[int, ...] | None, Key("open", "bytes", is_optional=True)] = None
    open_through: int = 0

    def header(self) -> Header:
        """The header as it goes on the wire."""
        found = WireMessage.header(self)
        if self.open_seqs is not None:
            found["open"] = struct.pack(f"<{len(self.open_seqs)}Q", *self.open_seqs)
        return found

    @classmethod
    def parse(cls, header: Header) -> MirrorConfirmed:
        """Check a header.

        Raises:
            WireError: names the key and its value.
        """
        what = "MIRROR_CONFIRMED"
        queues = [_queue_id(each, what) for each in rows(header, what, "queues", MOST_QUEUES)]
        cursors = header.get("cursors")
        if not isinstance(cursors, dict):
            raise MalformedFrame(f"{what}: key 'cursors' is {excerpt(cursors)}, expected a map")
        if len(cursors) > MOST_RECIPIENTS:
            raise FrameTooLarge(f"{what}: map 'cursors' (entries, not bytes)", len(cursors), MOST_RECIPIENTS)
        for recipient, seqs in cursors.items():
            is_good = isinstance(seqs, list) and len(seqs) == len(queues) and all(map(_is_seq, seqs))
            if not isinstance(recipient, str) or len(recipient) > _MOST_NAME or not is_good:
                raise MalformedFrame(
                    f"{what}: cursors of {excerpt(recipient)} are {excerpt(seqs)}, "
                    f"expected {len(queues)} numbers"
                )
        packed = header.get("open")
        if packed is not None and not (
            queues and isinstance(packed, bytes) and len(packed) <= 8 * MOST_OPEN and not len(packed) % 8
        ):
            raise MalformedFrame(f"{what}: key 'open' is {excerpt(packed)}, expected numbers of 8 bytes")
        return cls(
            tuple(queues),
            {recipient: tuple(seqs) for recipient, seqs in cursors.items()},
            _seqs(header, what, "done"),
            struct.unpack(f"<{len(packed) // 8}Q", packed) if packed is not None else None,
            whole(header, what, "open_through", 0, MOST_SEQ),
        )


@dataclass(frozen=True, slots=True)
class MirrorDelivered(WireMessage):
    """A recipient has confirmed these events of the origin to the keeper, which delivered them meanwhile."""

    KIND: ClassVar = Kind.MIRROR_DELIVERED
    recipient: str
    identities: Annotated[tuple[str, ...], Key("ids", "[str]")]

    @classmethod
    def parse(cls, header: Header) -> MirrorDelivered:
        """Check a header.

        Raises:
            WireError: names the key and its value.
        """
        recipient = header.get("recipient")
        if not isinstance(recipient, str) or not 0 < len(recipient) <= _MOST_NAME:
            raise MalformedFrame(f"MIRROR_DELIVERED: key 'recipient' is {excerpt(recipient)}")
        identities = rows(header, "MIRROR_DELIVERED", "ids", MOST_IDENTITIES)
        for each in identities:
            if not isinstance(each, str) or not 0 < len(each) <= _MOST_NAME + 20:
                raise MalformedFrame(f"MIRROR_DELIVERED: key 'ids' has {excerpt(each)}, expected identities")
        return cls(recipient, tuple(identities))


@dataclass(frozen=True, slots=True)
class MirrorBeat(WireMessage):
    """The sender is there. The keeper answers each one of the origin with one of its own."""

    KIND: ClassVar = Kind.MIRROR_BEAT

    @classmethod
    def parse(cls, _header: Header) -> MirrorBeat:
        """Nothing is in it."""
        return cls()


def _is_seq(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_SEQ


def _queue_id(value: Any, what: str) -> str:
    if not isinstance(value, str) or not _QUEUE_ID.fullmatch(value):
        raise MalformedFrame(f"{what}: queue {excerpt(value)}, expected 16 hexadecimal digits")
    return value


def _openings(header: Header, queues: int) -> tuple[MirroredOpening, ...]:
    found = []
    for row in rows(header, "MIRROR_HELLO", "openings", MOST_OPENINGS):
        seqs = row[1] if isinstance(row, list) and len(row) == 2 else None
        if not isinstance(seqs, list) or len(seqs) != queues or not all(map(_is_seq, seqs)):
            raise MalformedFrame(
                f"MIRROR_HELLO: key 'openings' has {excerpt(row)}, expected [id, {queues} numbers]"
            )
        found.append(MirroredOpening(_queue_id(row[0], "MIRROR_HELLO"), tuple(seqs)))
    return tuple(found)


def _seqs(header: Header, what: str, key: str) -> dict[str, int]:
    value = header.get(key)
    if not isinstance(value, dict) or len(value) > MOST_QUEUES or not all(map(_is_seq, value.values())):
        raise MalformedFrame(f"{what}: key {key!r} is {excerpt(value)}, expected numbers by queue")
    return {_queue_id(queue_id, what): seq for queue_id, seq in value.items()}


def _ascending(header: Header, what: str, key: str, most: int) -> list[int]:
    found = rows(header, what, key, most)
    before = 0
    for seq in found:
        if not _is_seq(seq) or seq <= before:
            raise MalformedFrame(f"{what}: key {key!r} has {excerpt(seq)} behind {before}")
        before = seq
    return found
