"""Consumers: each message is handed out once, ``credit`` of a destination at most (C1, C9, C11).

A ``Consumer`` has a ``DestinationFeed`` for each destination that its selector matches, also those created
later; ``feed`` says what becomes of messages there.

*Dead messages* (C12). What was handed out ``max_deliveries`` times without an acknowledgement, has expired,
or is rejected by its receiver, is stored in ``_DMQ`` with its origin and the reason, and then taken from its
destination. The copy has an identity of its own, made of the message's, so a crash between the two leaves one
copy.

Lock ``_changed`` of a consumer guards its messages that are ready; all else belongs to the link's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from pmdaemon.runtime.backoff import doubled
from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.errors import ClusterError
from sla_server.cluster.messages import names
from sla_server.cluster.messages.catalogue import Catalogue, Destination
from sla_server.cluster.messages.credit import BlockedBy, PullLedger, ReceiveShares
from sla_server.cluster.messages.errors import BadSettings, SessionClosed
from sla_server.cluster.messages.feed import PULL_S, DestinationFeed, Received, StoreDead, Visibility
from sla_server.cluster.messages.fragments import FIRST_IDENTITY, fragments_identity
from sla_server.cluster.messages.link import EngineLink, size_bytes
from sla_server.cluster.messages.producer import EXPIRES, IDENTITY, MOST_DIGITS
from sla_server.cluster.messages.transaction_records import MARK

log = structlog.get_logger("messages")
ORIGIN: Final = "Sla-Origin"
REASON: Final = "Sla-Reason"
CREDIT: Final = 100
CREDIT_BYTES: Final = 16 << 20
ACK_WAIT_S: Final = 20.0
"""Longer than a failover (12 s) and what passes before and after it until the engine hears of what is held
(``keep_s``). With less, what a living session holds may be handed to another one when a node dies."""
MAX_DELIVERIES: Final = 10
AGAIN_S: Final = (0.1, 60.0)
"""What a handler fails at comes again after the first; after twice as long each time, at most the last. Ten
times take two minutes, so that what it needs may come back before its messages are dead."""


class Consumer:
    """Receives what a selector matches; see the module. Any thread."""

    def __init__(
        self,
        link: EngineLink,
        catalogue: Catalogue,
        selector: names.Selector,
        name: str,
        store_dead: StoreDead,
        visibility: Visibility,
        shares: ReceiveShares,
        *,
        credit: int = CREDIT,
        credit_bytes: int = CREDIT_BYTES,
        ack_wait_s: float = ACK_WAIT_S,
        max_deliveries: int = MAX_DELIVERIES,
        handler: Callable[[Received], None] | None = None,
    ) -> None:
        names.check_name(name, "consumer")
        if ack_wait_s < 1:
            raise BadSettings(
                "ack_wait_s", ack_wait_s, "it must be at least 1 s, or what is held comes again"
            )
        if max_deliveries < 1:
            raise BadSettings("max_deliveries", max_deliveries, "it must be at least 1")
        self.name = name
        ledger = PullLedger(credit, credit_bytes)
        self.credit, self.credit_bytes = ledger.credit, ledger.credit_bytes
        self.ack_wait_s = ack_wait_s
        self._max_deliveries = max_deliveries
        self._link = link
        self._catalogue = catalogue
        self._selector = selector
        self._store_dead = store_dead
        self._visibility = visibility
        self._shares = shares
        self._handler = handler
        self._changed = threading.Condition()
        self._ready: deque[Received] = deque()
        self._ready_feeds = 0
        self._is_closed = False
        self._feeds: dict[str, DestinationFeed] = {}
        self._end_listening: Callable[[], None] = lambda: None
        link.run(self._open())

    @property
    def destinations(self) -> list[str]:
        """What it receives from, so far."""
        return sorted(self._feeds)

    @property
    def acknowledged(self) -> dict[str, tuple[int, str]]:
        """Destination -> how many messages were acknowledged, and the identity of the last (C1)."""
        return {name: (feed.acknowledged, feed.last_acknowledged) for name, feed in list(self._feeds.items())}

    @property
    def blocked_by(self) -> dict[str, BlockedBy]:
        """Destination -> which credit is used up, of those from which nothing more comes for that reason."""
        found = {name: feed.blocked_by for name, feed in list(self._feeds.items())}
        return {name: reason for name, reason in found.items() if reason is not None}

    @property
    def doubles(self) -> int:
        """Messages that came again and were dropped."""
        return sum(feed.doubles for feed in list(self._feeds.values()))

    def receive(self, limit_s: float) -> Received | None:
        """The next message, or None if there is none within ``limit_s``.

        Raises:
            SessionClosed: the consumer was closed.
        """
        deadline = Deadline(limit_s)
        while True:
            with self._changed:
                while not self._ready:
                    if self._is_closed:
                        raise SessionClosed(self.name)
                    if not self._changed.wait(deadline.left_s()):
                        return None
                received = self._ready.popleft()
            if not self.remove_if_dead(received):
                return received

    def wait_ready(self, destinations: int, limit_s: float) -> bool:
        """Whether so many destinations are subscribed to within ``limit_s``; a topic keeps nothing before."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ready_feeds >= destinations, limit_s)

    def close(self) -> None:
        """Receive nothing more; what is held comes again, here or elsewhere."""
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._link.run(self._close())

    def add_ready(self, received: Received) -> None:
        """The link's thread has one more."""
        if self._handler is not None:
            self._handler(received)
            return
        with self._changed:
            self._ready.append(received)
            self._changed.notify()

    def add_ready_feed(self) -> None:
        """The link's thread has subscribed to one more destination."""
        with self._changed:
            self._ready_feeds += 1
            self._changed.notify_all()

    def remove_if_dead(self, received: Received) -> bool:
        """Whether it was dead, and is in ``_DMQ`` now (or comes again, as that could not be confirmed)."""
        reason = cause_of_death(
            received.headers, received.deliveries, self._max_deliveries, time.time_ns() // 1000
        )
        if not reason or received.destination == names.DEAD_MESSAGES:
            return False
        try:
            received.reject(reason)
        except ClusterError as exc:  # no majority, or _DMQ is full: it stays where it is
            log.warning("dead-message-kept", identity=received.identity, problem=str(exc))
            received.give_back(PULL_S)
        return True

    async def _open(self) -> None:
        self._end_listening = self._catalogue.listen(self._found)

    def _found(self, destination: Destination) -> None:
        if destination.name not in self._feeds and self._selector.matches(destination.name):
            self._feeds[destination.name] = DestinationFeed(
                self, self._link, destination, self._store_dead, self._visibility, self._shares
            )

    async def _close(self) -> None:
        self._end_listening()
        self._end_listening = lambda: None
        await asyncio.gather(*(feed.close() for feed in self._feeds.values()))


def cause_of_death(headers: Mapping[str, str], deliveries: int, max_deliveries: int, now_unix_us: int) -> str:
    """Why a message is not handed out any more; "" if it is. Pure."""
    expires = headers.get(EXPIRES, "")
    is_time = expires.isascii() and expires.isdigit() and len(expires) <= MOST_DIGITS
    if is_time and int(expires) <= now_unix_us:
        return "expired"
    if deliveries > max_deliveries:
        return f"handed out {max_deliveries} times and never acknowledged"
    return ""


def headers_of_copy(received: Received, reason: str, limit_bytes: int) -> dict[str, str]:
    """Of the copy of a dead message in ``_DMQ``, which with its data has ``limit_bytes`` at most. Pure.

    A message may be as large as the engine takes it, and its copy must not stay away for that: then the
    reason is shorter, and a long identity a digest.
    """
    found = {
        key: value
        for key, value in received.headers.items()
        if not key.startswith("Nats-") and key != MARK  # the copy is visible whatever becomes of the mark
    }
    identity = f"dead:{received.destination}:{received.identity}"
    found |= {ORIGIN: received.destination, REASON: "", FIRST_IDENTITY: fragments_identity(received)}
    whole = " ".join(reason.split()).encode(errors="replace")
    room_bytes = limit_bytes - size_bytes(received.data, found | {IDENTITY: identity})
    if room_bytes < len(whole):
        digest = f"dead:{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
        room_bytes += len(identity.encode()) - len(digest)
        identity = digest
    found[REASON] = whole[: max(0, room_bytes)].decode(errors="ignore")
    return found | {IDENTITY: identity}


def run_handler(consumer: Consumer, received: Received, handler: Callable[[Received], None]) -> None:
    """In a thread of the pool: what returns is acknowledged, what raises comes again.

    What was given back meanwhile, as the consumer was closed, is not handled: it may be with another one.
    """
    if not received.is_held or consumer.remove_if_dead(received):
        return
    first_s, most_s = AGAIN_S
    again_s = doubled(first_s, received.deliveries - 1, most_s)
    try:
        handler(received)
    except Exception:
        log.exception("message-handler-failed", identity=received.identity, destination=received.destination)
        received.give_back(again_s)
        return
    try:
        received.acknowledge()
    except ClusterError as exc:
        log.warning("message-not-acknowledged", identity=received.identity, problem=str(exc))
        received.give_back(again_s)
