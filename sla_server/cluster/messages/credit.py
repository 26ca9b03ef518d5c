"""Credit: how much may be under way before those who feed it must wait (C9). Pure.

Four things can be full, each with credit of its own: a consumer (messages handed out and not acknowledged:
``PullLedger``), a session's side of the client (``Window`` of all its sends), the part of it that goes to one
destination (``Window`` again), and the destination itself, which the engine counts and refuses for.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from sla_server.cluster.messages.errors import BadSettings


class BlockedBy(Enum):
    """Why a producer may not send now."""

    SESSION = "the session has as much unconfirmed as it may"
    PRODUCER = "as much is unconfirmed for this destination as may be"
    DESTINATION = "the destination is full"


class Window:
    """Messages and bytes that may be unconfirmed at once. Not thread-safe: its owner's lock guards it.

    A message larger than the limit passes when nothing else is under way, so that it is not refused for ever.
    """

    def __init__(self, limit_messages: int, limit_bytes: int) -> None:
        for field, value in (("limit_messages", limit_messages), ("limit_bytes", limit_bytes)):
            if value < 1:
                raise BadSettings(field, value, "it must be at least 1")
        self.limit_messages: Final = limit_messages
        self.limit_bytes: Final = limit_bytes
        self.messages = 0
        self.bytes = 0

    def has_room(self, size_bytes: int = 1) -> bool:
        """Whether one more of this size may be sent."""
        if not self.messages:
            return True
        return self.messages < self.limit_messages and self.bytes + size_bytes <= self.limit_bytes

    def take(self, size_bytes: int) -> None:
        """One more is under way."""
        self.messages += 1
        self.bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """One was confirmed or refused."""
        assert self.messages > 0
        assert self.bytes >= size_bytes
        self.messages -= 1
        self.bytes -= size_bytes


class PullLedger:
    """How many messages a consumer may still ask one destination for. Not thread-safe.

    Invariant: delivered and requested together never exceed the credit, so that what the engine sends always
    has room; a consumer that acknowledges nothing therefore receives ``credit`` messages and no more.
    """

    def __init__(self, credit: int) -> None:
        if credit < 1:
            raise BadSettings("credit", credit, "it must be at least 1")
        self.credit: Final = credit
        self.delivered = 0
        self.requested = 0
        self.last_request = 0

    def request(self) -> tuple[int, int] | None:
        """(number of the request, messages to ask for); None while one is under way or credit is used up."""
        if self.requested or self.delivered >= self.credit:
            return None
        self.requested = self.credit - self.delivered
        self.last_request += 1
        return self.last_request, self.requested

    def deliver(self) -> None:
        """A message came; it may be one of a request that has ended."""
        self.requested = max(0, self.requested - 1)
        self.delivered += 1

    def end(self, request: int) -> None:
        """The engine, or its silence, says that this request brings no more. Earlier ones do not matter."""
        if request == self.last_request:
            self.requested = 0

    def release(self) -> None:
        """A delivered message was acknowledged or given back."""
        assert self.delivered > 0
        self.delivered -= 1
