"""A model of a volume as a plain array of bytes, and clients that compare a server with it.

Theory of operation. Each connection owns a region of the volume and a seeded sequence of operations: requests
of all kinds and sizes, requests that must be refused, a cookie used twice, times in which it does not read,
and disconnects in the middle of a request. Requests are pipelined; one waits only while it touches bytes that
an unanswered change touches, because the protocol leaves their order open. So every byte has one permissible
value, or, where the protocol leaves it open, two:

    an acknowledged write or zeroing   the new value
    an acknowledged trim               the old value or zero
    a change whose connection ended before its answer came: the old or the new value; nothing is changed there
    any more, because the server may still be doing it
    a write that was not sent whole    the old value: nothing of it may be there

Nothing here depends on speed: sequences depend on the seed alone, and a wait has no limit but ``STUCK_S``
without any progress.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gateway_agent.nbd import protocol as p

STUCK_S = 60.0
CHANGES = (p.Cmd.WRITE, p.Cmd.TRIM, p.Cmd.WRITE_ZEROES)


@dataclass(frozen=True)
class Rules:
    """What a server answers to requests that it need not serve: by kind, the permissible error numbers.

    A kind that is not named is not sent.
    """

    refusals: dict[str, frozenset[int]]


GATEWAY = Rules(
    {
        "read beyond the end": frozenset({p.EINVAL}),
        "change beyond the end": frozenset({p.ENOSPC}),
        "command": frozenset({p.EINVAL}),
        "flag": frozenset({p.EINVAL}),
        "read too long": frozenset({p.EINVAL}),
        "unaligned": frozenset({p.EINVAL}),
    }
)
READ_ONLY = Rules(GATEWAY.refusals | dict.fromkeys(("change", "change beyond the end"), frozenset({p.EPERM})))
PEER = Rules(  # nbdkit and qemu-nbd themselves; see docs/formats/nbd.md for the differences
    {
        "read beyond the end": frozenset({p.EINVAL}),
        "change beyond the end": frozenset({p.EINVAL, p.ENOSPC}),
        "command": frozenset({p.EINVAL}),
        "flag": frozenset({p.EINVAL}),
    }
)


@dataclass(frozen=True)
class Request:
    """One request, with what may be answered to it."""

    cookie: int
    command: int
    offset: int
    length: int
    flags: int = 0
    payload: bytes = b""
    errors: frozenset[int] = frozenset({0})

    @property
    def raw(self) -> bytes:
        """What is sent."""
        return p.request(self.command, self.cookie, self.offset, self.length, self.flags) + self.payload

    @property
    def looks(self) -> bool:
        """Whether its answer says what is there."""
        return self.command in (p.Cmd.READ, p.Cmd.BLOCK_STATUS)

    def touches(self, other: Request) -> bool:
        """Whether their order matters."""
        if self.command == p.Cmd.FLUSH or other.command == p.Cmd.FLUSH:
            return False
        return (
            (self.command in CHANGES or other.command in CHANGES)
            and self.offset < other.offset + other.length
            and other.offset < self.offset + self.length
        )


class Region:
    """Bytes that one connection owns: what each may be. Offsets are those of the volume."""

    def __init__(self, begin: int, data: bytes) -> None:
        self.begin = begin
        self.end = begin + len(data)
        self._now = np.frombuffer(data, np.uint8).copy()
        self._other = self._now.copy()
        self._may_be_zero = np.zeros(len(data), bool)
        self._is_lost = np.zeros(len(data), bool)

    def _span(self, request: Request) -> slice:
        return slice(request.offset - self.begin, request.offset - self.begin + request.length)

    def may_change(self, request: Request) -> bool:
        """Whether nothing there is open since a disconnect."""
        return not self._is_lost[self._span(request)].any()

    def lose(self, request: Request) -> None:
        """Its outcome may stay open: no later change may touch it."""
        self._is_lost[self._span(request)] = True

    def changed(self, request: Request) -> None:
        """It was acknowledged."""
        span = self._span(request)
        if request.command == p.Cmd.TRIM:
            self._may_be_zero[span] = True
            return
        self._now[span] = np.frombuffer(request.payload, np.uint8) if request.payload else 0
        self._other[span] = self._now[span]
        self._may_be_zero[span] = False

    def perhaps_changed(self, request: Request) -> None:
        """It was sent whole and not answered."""
        span = self._span(request)
        if request.payload:
            self._other[span] = np.frombuffer(request.payload, np.uint8)
        else:
            self._may_be_zero[span] = True

    def check(self, offset: int, data: bytes) -> str:
        """What is wrong with bytes that were read; empty if nothing is."""
        got = np.frombuffer(data, np.uint8)
        span = slice(offset - self.begin, offset - self.begin + len(data))
        is_right = (got == self._now[span]) | (got == self._other[span])
        is_right |= (got == 0) & self._may_be_zero[span]
        if is_right.all():
            return ""
        first = int(np.argmin(is_right))
        found, wanted = data[first : first + 16].hex(), bytes(self._now[span][first : first + 16]).hex()
        return (
            f"{int((~is_right).sum())} bytes are wrong, the first at {offset + first}: {found}, not {wanted}"
        )


def describe(request: Request) -> str:
    """For the report of a failure."""
    return (
        f"command {request.command} flags {request.flags:#x} at {request.offset}, {request.length} bytes, "
        f"cookie {request.cookie:#x}"
    )
