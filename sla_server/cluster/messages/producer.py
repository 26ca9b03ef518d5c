"""Producers: what is sent stays in order and is stored once (C1, C6, C9).

All producers of one session and destination share an ``Outbox``. Sending puts a message there, if the windows
of the session and of the destination have room, and a task in the link's thread stores them in order. Without
the engine's batches it stores one after the other, since what is sent together may arrive in another order
when a leader changes; with batches it stores up to ``BATCH`` at once: a batch is stored whole and in order,
or not at all.

What has no answer is sent again under the same identity (``Nats-Msg-Id``), to whichever node answers: the
engine stores an identity once in ``DUPLICATES_S``, and a send gives up before that. Invariants:

    1. the head of the outbox is confirmed, refused or given up before the one behind it is stored
    2. a message is stored at most once, also when its send was given up and is repeated with its identity
    3. a refused message (full, too large) was not stored, and the next one is tried on its own. One of which
       a try had no answer is not refused as "full": that try may still be on its way

Lock ``_lock`` of the session's ``SendWindows`` guards all windows, queues and ``_full``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

import nats.errors
import nats.js.errors
import structlog

from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.messages.batch import store_batch
from sla_server.cluster.messages.catalogue import DUPLICATES_S, Catalogue, Destination
from sla_server.cluster.messages.credit import BlockedBy, Unit, Window
from sla_server.cluster.messages.errors import (
    BadSettings,
    DestinationFull,
    MessagesError,
    NotConfirmed,
    PayloadTooLarge,
    SessionClosed,
)
from sla_server.cluster.messages.identifiers import IdentifierSource
from sla_server.cluster.messages.link import NOT_SENT, EngineLink, Trouble, classify, size_bytes

log = structlog.get_logger("messages")
IDENTITY: Final = "Nats-Msg-Id"
OWN_HEADERS: Final = "Sla-"
EXPIRES: Final = "Sla-Expires-Unix-Us"
MOST_EXPIRES_S: Final = 10 * 365 * 86_400.0
BATCH: Final = 64
SEND_LIMIT_S: Final = 60.0
"""Five times the longest failover (12 s), a tenth of the time for which identities are known."""
TOGETHER_S: Final = 6.0  # three tries
FULL_FOR_S: Final = 1.0
"""So long a destination that has refused is taken for full; the next message asks it again."""
MOST_DIGITS: Final = 18
"""Of a number in a header, which any program with an account may have written: below 2^63, and int() refuses
thousands of digits with an error of its own."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # as HTTP has them
_IDENTITY: Final = re.compile(r"[A-Za-z0-9_.:-]{1,255}")  # also a part of subjects: no wildcards, no blanks


@dataclasses.dataclass
class Outgoing:
    """A message on its way; ``done`` has its result.

    Attributes:
        is_open: a try of it had no answer (``EngineLink.store``).
        is_copy: of a message that was stored before (``EngineLink.copy_limit_bytes``).
        size_bytes: with its headers, which are in memory and at the destination as the payload is.
    """

    identity: str
    data: bytes
    headers: dict[str, str]
    deadline: Deadline
    limit_s: float
    is_open: bool = False
    is_copy: bool = False
    done: concurrent.futures.Future[str] = dataclasses.field(default_factory=concurrent.futures.Future)
    size_bytes: int = 0

    def __post_init__(self) -> None:
        self.size_bytes = size_bytes(self.data, self.headers)
        # As if it ran: a caller that cancels it would else end the outbox, which has to set its result.
        self.done.set_running_or_notify_cancel()


class SendWindows:
    """What a session may have unconfirmed, over all destinations; and the lock of all outboxes."""

    def __init__(self, limit_messages: int, limit_bytes: int) -> None:
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.window = Window(limit_messages, limit_bytes)


class Outbox:
    """Messages of a session for one destination, in order."""

    def __init__(
        self, link: EngineLink, catalogue: Catalogue, destination: Destination, windows: SendWindows
    ) -> None:
        self.destination = destination
        self.confirmed = 0
        self.last_confirmed = ""
        self._link = link
        self._has_batches = catalogue.has_batches
        self._windows = windows
        self._window = Window(windows.window.limit_messages, windows.window.limit_bytes)
        self._waiting: deque[Outgoing] = deque()
        self._full: tuple[Deadline, str] | None = None
        self._is_closed = False
        self._wake = asyncio.Event()
        link.start(self._run())

    def blocked_by(self, size_bytes: int = 1) -> BlockedBy | None:
        """What a message of this size would wait for."""
        with self._windows.lock:
            return self._blocked_by(size_bytes)

    def add(self, message: Outgoing, *, wait: bool) -> BlockedBy | None:
        """Put ``message`` behind the others, or say why not; with ``wait`` when there is room.

        Raises:
            DestinationFull: it has refused a moment ago, and ``wait`` asks for a result.
            NotConfirmed: there was no room until the message's deadline.
            SessionClosed: the session ends.
        """
        with self._windows.room:
            while (reason := self._blocked_by(message.size_bytes)) is not None:
                if self._is_closed:
                    raise SessionClosed(self.destination.name)
                if not wait:
                    return reason
                is_full = reason in (BlockedBy.DESTINATION, BlockedBy.DESTINATION_BYTES)
                if is_full and self._full is not None:
                    raise DestinationFull(self.destination.name, self._full[1])
                if not self._windows.room.wait(message.deadline.left_s()):
                    raise NotConfirmed(f"message {message.identity}", message.limit_s, reason.value)
            if self._is_closed:
                raise SessionClosed(self.destination.name)
            self._window.take(message.size_bytes)
            self._windows.window.take(message.size_bytes)
            self._waiting.append(message)
        self._link.call_soon(self._wake.set)
        return None

    def flush(self, limit_s: float) -> None:
        """Wait until all that was added before is confirmed or refused.

        Raises:
            NotConfirmed: not within ``limit_s``.
        """
        with self._windows.lock:
            last = self._waiting[-1].done if self._waiting else None
        if last is not None and not concurrent.futures.wait([last], limit_s).done:
            raise NotConfirmed(f"what was sent before to {self.destination.name!r}", limit_s, "no answer")

    def close(self) -> None:
        """Let those who wait know that nothing more is sent."""
        with self._windows.room:
            self._is_closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._windows.room.notify_all()
        for message in left:
            if not message.done.done():
                message.done.set_exception(SessionClosed(self.destination.name))

    def _blocked_by(self, size_bytes: int) -> BlockedBy | None:
        if self._full is not None and not self._full[0].passed:
            has_bytes = "bytes" in self._full[1]  # as the engine says it
            return BlockedBy.DESTINATION_BYTES if has_bytes else BlockedBy.DESTINATION
        if (unit := self._windows.window.full_of(size_bytes)) is not None:
            return BlockedBy.SESSION if unit is Unit.MESSAGES else BlockedBy.SESSION_BYTES
        if (unit := self._window.full_of(size_bytes)) is not None:
            return BlockedBy.PRODUCER if unit is Unit.MESSAGES else BlockedBy.PRODUCER_BYTES
        return None

    async def _run(self) -> None:
        while not self._is_closed:
            with self._windows.lock:
                group = [message for message, _place in zip(self._waiting, range(BATCH), strict=False)]
            if not group:
                await self._wake.wait()
                self._wake.clear()
                continue
            if len(group) > 1 and self._has_batches and await self._store_together(group):
                continue
            await self._store_one(group[0])

    async def _store_together(self, group: list[Outgoing]) -> bool:
        """Whether the group is known to be stored; if not, each is sent alone."""
        # After a while alone: each then has the rest of its own time, and a stuck one is seen.
        limit_s = min(TOGETHER_S, *(message.deadline.left_s() for message in group))
        rows = [(self.destination.subject, message.data, message.headers) for message in group]

        async def attempt() -> None:
            try:
                await store_batch(self._link, rows)
            except (nats.js.errors.APIError, *NOT_SENT):
                raise
            except BaseException:  # also that it took too long
                for message in group:
                    message.is_open = True
                raise

        try:
            await self._link.retry(attempt, "a batch of messages", limit_s)
        except Exception as exc:
            if not isinstance(exc, nats.errors.Error | MessagesError):
                log.exception("batch-not-stored", destination=self.destination.name)
            return False
        for message in group:
            self._finish(message, None)
        return True

    async def _store_one(self, message: Outgoing) -> None:
        what = f"message {message.identity} to {self.destination.name!r}"
        try:
            await self._link.store(
                self.destination.subject,
                message.data,
                message.headers,
                stream=self.destination.stream,
                what=what,
                limit_s=message.deadline.left_s(),
                is_open=message.is_open,
                is_copy=message.is_copy,
            )
            self._finish(message, None)
        except MessagesError as exc:
            self._finish(message, exc)
        except nats.errors.MaxPayloadError:
            self._finish(message, PayloadTooLarge(message.size_bytes, self._link.limit_bytes))
        except nats.js.errors.APIError as exc:
            if classify(exc) is Trouble.FULL:
                self._finish(message, DestinationFull(self.destination.name, exc.description or "no room"))
            else:
                self._finish(message, NotConfirmed(what, message.limit_s, exc.description or str(exc)))
        except Exception as exc:
            # Whatever it is: with its task, the outbox would end for good, and every send would hang.
            if not isinstance(exc, nats.errors.Error):
                log.exception("message-not-stored", message=what)
            self._finish(message, NotConfirmed(what, message.limit_s, str(exc) or type(exc).__name__))

    def _finish(self, message: Outgoing, problem: MessagesError | None) -> None:
        with self._windows.room:
            if not self._waiting or self._waiting[0] is not message:
                return  # the session was closed meanwhile, and the message is answered
            self._waiting.popleft()
            self._window.give(message.size_bytes)
            self._windows.window.give(message.size_bytes)
            is_full = isinstance(problem, DestinationFull)
            self._full = (
                (Deadline(FULL_FOR_S), problem.reason) if isinstance(problem, DestinationFull) else None
            )
            if not is_full and problem is None:
                self.confirmed += 1
                self.last_confirmed = message.identity
            self._windows.room.notify_all()
        if problem is None:
            message.done.set_result(message.identity)
        else:
            message.done.set_exception(problem)


class Producer:
    """Sends to one destination, in order of the calls. Any thread."""

    def __init__(self, outbox: Outbox, identifiers: IdentifierSource) -> None:
        self._outbox = outbox
        self._identifiers = identifiers

    @property
    def is_blocked(self) -> bool:
        """Whether a message would have to wait, or be refused, now."""
        return self.blocked_by is not None

    @property
    def blocked_by(self) -> BlockedBy | None:
        """Which window it would wait for."""
        return self._outbox.blocked_by()

    @property
    def confirmed(self) -> tuple[int, str]:
        """How many messages of the session this destination has stored, and the identity of the last (C1)."""
        return self._outbox.confirmed, self._outbox.last_confirmed

    def send(
        self,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        identity: str = "",
        limit_s: float = SEND_LIMIT_S,
        expires_s: float | None = None,
    ) -> str:
        """Store a message; returns its identity.

        Durability: the primary and a majority of the copies have it on return.

        Args:
            data: the payload.
            headers: of the caller; names that begin with ``Sla-`` or ``Nats-`` are reserved.
            identity: of a message whose send was not confirmed, to repeat it; at most ``DUPLICATES_S`` later.
                Or that a message has elsewhere, to hand it on. It is known by destination.
            limit_s: for an answer, waiting for room included.
            expires_s: so long after this call it is handed out; later it goes to ``_DMQ``. By the clocks of
                both machines.

        Raises:
            DestinationFull: not stored.
            PayloadTooLarge: not stored.
            NotConfirmed: perhaps stored; repeat it with its identity.
            SessionClosed: the session ends.
        """
        return self.submit(data, headers, identity=identity, limit_s=limit_s, expires_s=expires_s).result()

    def submit(
        self,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        identity: str = "",
        limit_s: float = SEND_LIMIT_S,
        expires_s: float | None = None,
    ) -> concurrent.futures.Future[str]:
        """Like ``send``, but does not wait for the answer: the future has it. Waits for room."""
        message = self._outgoing(data, headers, identity, limit_s, expires_s)
        self._outbox.add(message, wait=True)
        return message.done

    def try_send(
        self,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        limit_s: float = SEND_LIMIT_S,
        expires_s: float | None = None,
    ) -> concurrent.futures.Future[str] | BlockedBy:
        """Like ``submit``, but never waits: says what is full instead."""
        message = self._outgoing(data, headers, "", limit_s, expires_s)
        return self._outbox.add(message, wait=False) or message.done

    def _outgoing(
        self,
        data: bytes,
        headers: Mapping[str, str] | None,
        identity: str,
        limit_s: float,
        expires_s: float | None,
    ) -> Outgoing:
        if not 0 < limit_s < DUPLICATES_S:
            raise BadSettings("limit_s", limit_s, f"it must be above 0 and below {DUPLICATES_S:g} s")
        if identity and not _IDENTITY.fullmatch(identity):
            raise BadSettings("identity", identity, "it has 1 to 255 letters, digits, and - _ . : only")
        identity = identity or str(self._identifiers.make())
        known_as = self._outbox.destination.engine_identity(identity)
        own = checked_headers(headers) | expiry(expires_s) | {IDENTITY: known_as}
        return Outgoing(identity, bytes(data), own, Deadline(limit_s), limit_s)


def expiry(expires_s: float | None) -> dict[str, str]:
    """The header of a message that expires so many seconds from now; none of one that does not.

    Raises:
        BadSettings: it is out of range.
    """
    if expires_s is None:
        return {}
    if not 0 < expires_s <= MOST_EXPIRES_S:
        raise BadSettings("expires_s", expires_s, f"it must be above 0 and at most {MOST_EXPIRES_S:.0f} s")
    return {EXPIRES: str(time.time_ns() // 1000 + int(expires_s * 1e6))}


def is_utf8(text: str) -> bool:
    """Whether it can be written at all: text from the system may have lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """A caller's headers.

    Raises:
        BadSettings: a name is reserved or none, or a value has a line end or is no text.
    """
    for name, value in (headers or {}).items():
        if name.lower().startswith(("nats-", OWN_HEADERS.lower())):
            raise BadSettings("headers", name, "names that begin with Nats- or Sla- are reserved")
        if not name or any(char in name + value for char in "\r\n"):
            raise BadSettings("headers", name, "a name and its value have no line ends")
        if not _HEADER_NAME.fullmatch(name) or not is_utf8(value):
            raise BadSettings("headers", name, "a name is one as in HTTP, and a value is text")
    return dict(headers or {})
