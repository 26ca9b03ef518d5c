"""Thresholds between the server and an agent: what its streams are counted against.

What each side says is checked here for the other, as in ``agent``.

Pure. Source: docs/formats/messages.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import cut
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import Header, Key, WireMessage, count, maps, whole

ENTRIES_FORM: Final = '[{volume: str, client: str (glob), io: "any" | "read" | "write", threshold_us: int}]'


@dataclass(frozen=True, slots=True)
class Thresholds(WireMessage):
    """A complete threshold set, to be counted against from the next cut on.

    All that this gateway's volumes ask for, at most 56,000 bytes; sent after each registration, and when it
    changes. ``version`` (63 bits) follows from the entries, so a set that is in force already is only
    acknowledged.
    """

    KIND: ClassVar = Kind.THRESHOLDS
    version: int
    entries: Annotated[tuple[Header, ...], Key(form=ENTRIES_FORM)]

    @classmethod
    def parse(cls, header: Header) -> Thresholds:
        """Check a header.

        Raises:
            MalformedFrame: names the entry or key, and its value.
        """
        entries = maps("THRESHOLDS", header, "entries")
        for entry in entries:
            if not isinstance(entry.get("volume"), str) or not isinstance(entry.get("client"), str):
                raise MalformedFrame(f"THRESHOLDS entry {excerpt(entry)} lacks volume or client")
            if not isinstance(entry.get("io"), str) or entry["io"] not in cut.IO_KINDS:
                raise MalformedFrame(
                    f"THRESHOLDS entry of {excerpt(entry['volume'])} has io {excerpt(entry.get('io'))}"
                )
            whole(entry, "THRESHOLDS", "threshold_us", 1, (1 << 32) - 1)
        keys = ("volume", "client", "io", "threshold_us")
        kept = tuple({key: entry[key] for key in keys} for entry in entries)
        return cls(whole(header, "THRESHOLDS", "version", 0, (1 << 63) - 1), kept)


@dataclass(frozen=True, slots=True)
class ThresholdsAck(WireMessage):
    """The agent counts against this version."""

    KIND: ClassVar = Kind.THRESHOLDS_ACK
    version: int

    @classmethod
    def parse(cls, header: Header) -> ThresholdsAck:
        """Check a header.

        Raises:
            MalformedFrame: names the key and its value.
        """
        return cls(count(header, "version"))
