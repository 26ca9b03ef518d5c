"""How either side says that a frame was not understood, or that the connection ends.

Both sides of a gateway's connection send these, and so does a data plane to its link. ERROR and BYE are read
leniently: what follows them is the end of the connection anyway.

Pure. Source: docs/formats/messages.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pmdaemon.runtime.excerpt import printable
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import Header, WireMessage, whole


@dataclass(frozen=True, slots=True)
class Unsupported(WireMessage):
    """The sender does not know a kind of frame that it received."""

    KIND: ClassVar = Kind.UNSUPPORTED
    kind: int

    @classmethod
    def parse(cls, header: Header) -> Unsupported:
        """Check a header.

        Raises:
            MalformedFrame: names the key and its value.
        """
        return cls(whole(header, "UNSUPPORTED", "kind", 0, 255))


@dataclass(frozen=True, slots=True)
class Error(WireMessage):
    """Why the sender closes the connection next."""

    KIND: ClassVar = Kind.ERROR
    code: str
    text: str

    @classmethod
    def parse(cls, header: Header) -> Error:
        """Read leniently: the session ends anyway."""
        return cls(printable(header.get("code", ""), 60), printable(header.get("text", ""), 2000))

    @property
    def farewell(self) -> str:
        """What the server said, for people."""
        return f"the server refused us ({self.code}): {self.text}"


@dataclass(frozen=True, slots=True)
class Bye(WireMessage):
    """The sender ends the session in an orderly way."""

    KIND: ClassVar = Kind.BYE
    reason: str

    @classmethod
    def parse(cls, header: Header) -> Bye:
        """Read leniently: the session ends anyway."""
        return cls(printable(header.get("reason", ""), 300))

    @property
    def farewell(self) -> str:
        """What the server said, for people."""
        return f"the server said goodbye: {self.reason}"
