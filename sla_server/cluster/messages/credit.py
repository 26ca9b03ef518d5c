"""Credit: how much may be under way before those who feed it must wait, in messages and in bytes (C9). Pure.

Four things can be full, each with credit of its own: a consumer's part of one destination (messages handed
out and not acknowledged: ``PullLedger``), all that a session has received (``ReceiveShares`` divides that
among its ledgers), a session's side of the client (``Window`` of all its sends, and one of those to one
destination), and the destination itself, which the engine counts and refuses for.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from sla_server.cluster.messages.errors import BadSettings


class BlockedBy(Enum):
    """Which credit is used up."""

    SESSION = "the session has as many messages unconfirmed as it may"
    SESSION_BYTES = "the session has as many bytes unconfirmed as it may"
    PRODUCER = "as many messages are unconfirmed for this destination as may be"
    PRODUCER_BYTES = "as many bytes are unconfirmed for this destination as may be"
    DESTINATION = "the destination has as many messages as it may"
    DESTINATION_BYTES = "the destination has as many bytes as it may"
    CONSUMER = "as many messages are handed out and not acknowledged as may be"
    CONSUMER_BYTES = "as many bytes are handed out and not acknowledged as may be"


class Unit(Enum):
    """What a window counts."""

    MESSAGES = "messages"
    BYTES = "bytes"


class PullRequest(NamedTuple):
    """What to ask the engine for; ``bytes`` 0 has no limit."""

    number: int
    messages: int
    bytes: int


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
        return self.full_of(size_bytes) is None

    def full_of(self, size_bytes: int = 1) -> Unit | None:
        """Of what there is too much for one more of this size."""
        if not self.messages:
            return None
        if self.messages >= self.limit_messages:
            return Unit.MESSAGES
        return Unit.BYTES if self.bytes + size_bytes > self.limit_bytes else None

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
    """How much a consumer may still ask one destination for. Not thread-safe.

    Invariant: delivered and requested together never exceed the credit, in messages or bytes, so that what
    the engine sends always has room; a consumer that acknowledges nothing therefore receives ``credit``
    messages and no more. A message that is larger than all of ``credit_bytes`` comes when nothing else is in
    hand.
    """

    def __init__(self, credit: int, credit_bytes: int) -> None:
        for field, value in (("credit", credit), ("credit_bytes", credit_bytes)):
            if value < 1:
                raise BadSettings(field, value, "it must be at least 1")
        self._own: Final = (credit, credit_bytes)
        self.credit = credit
        self.credit_bytes = credit_bytes
        self.delivered = 0
        self.delivered_bytes = 0
        self.requested = 0
        self.last_request = 0
        self._is_too_large = False

    def share(self, messages: int, size_bytes: int) -> None:
        """What the session leaves it; what was delivered before stays."""
        self.credit = min(self._own[0], messages)
        self.credit_bytes = min(self._own[1], size_bytes)

    @property
    def full_of(self) -> Unit | None:
        """What the consumer has too much of in hand to be sent more."""
        if self.delivered >= self.credit:
            return Unit.MESSAGES
        is_full = self._is_too_large or self.delivered_bytes >= self.credit_bytes
        return Unit.BYTES if self.delivered and is_full else None

    @property
    def may_request(self) -> bool:
        """Whether no request is under way, and there is credit for one."""
        return not self.requested and self.full_of is None

    def request(self) -> PullRequest | None:
        """What to ask for; None while a request is under way or credit is used up."""
        if not self.may_request:
            return None
        self.last_request += 1
        is_too_large, self._is_too_large = self._is_too_large, False
        if is_too_large:  # and nothing is in hand
            self.requested = 1
            return PullRequest(self.last_request, 1, 0)
        self.requested = self.credit - self.delivered
        return PullRequest(self.last_request, self.requested, self.credit_bytes - self.delivered_bytes)

    def deliver(self, size_bytes: int = 0) -> None:
        """A message came; it may be one of a request that has ended."""
        self.requested = max(0, self.requested - 1)
        self.delivered += 1
        self.delivered_bytes += size_bytes

    def end(self, request: int, *, unserved: int | None = None, is_too_large: bool = False) -> None:
        """The engine, or its silence, says that this request brings no more. Earlier ones do not matter.

        Args:
            request: its number.
            unserved: how many messages of it were not sent. What was sent may still be on its way: the
                engine's word that the request has ended may overtake it. None: nothing more is waited for.
            is_too_large: the next message has more bytes than were left.
        """
        if request == self.last_request:
            self.requested = 0 if unserved is None else max(0, self.requested - unserved)
            self._is_too_large = is_too_large

    def release(self, size_bytes: int = 0) -> None:
        """A delivered message was acknowledged or given back."""
        assert self.delivered > 0
        assert self.delivered_bytes >= size_bytes
        self.delivered -= 1
        self.delivered_bytes -= size_bytes
        self._is_too_large = False


class ReceiveShares:
    """Divides what a session may have in hand among its ledgers, in equal shares. Not thread-safe.

    A share is at least one message and one byte: what comes then comes alone. What was delivered before a
    ledger was added counts until it is acknowledged, beyond the shares of today.
    """

    def __init__(self, limit_messages: int, limit_bytes: int) -> None:
        for field, value in (("received_messages", limit_messages), ("received_bytes", limit_bytes)):
            if value < 1:
                raise BadSettings(field, value, "it must be at least 1")
        self._limits: Final = (limit_messages, limit_bytes)
        self._ledgers: list[PullLedger] = []

    def add(self, ledger: PullLedger) -> None:
        """One more takes part."""
        self._ledgers.append(ledger)
        self._divide()

    def remove(self, ledger: PullLedger) -> None:
        """One has ended."""
        if ledger in self._ledgers:
            self._ledgers.remove(ledger)
            self._divide()

    def _divide(self) -> None:
        for ledger in self._ledgers:
            ledger.share(*(max(1, limit // len(self._ledgers)) for limit in self._limits))
