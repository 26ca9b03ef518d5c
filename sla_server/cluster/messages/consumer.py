"""Consumers: each message is handed out once, in order, ``credit`` of a destination at most (C1, C9, C11).

A ``Consumer`` has a ``DestinationFeed`` for each destination that its selector matches, also those created
later. A feed asks the engine for as many messages as its credit leaves (``PullLedger``), so a consumer that
does not acknowledge is sent no more, and no other is kept waiting by it: the engine gives a queue's messages
to those who ask.

*Resuming.* The engine remembers, under the consumer's name, what was acknowledged. What was handed out and
not acknowledged comes again, after ``ack_wait_s`` or when the feed ends; as long as the session lives, it
keeps the engine from that. An acknowledgement is repeated until it is confirmed. What comes again all the
same is recognised by its identity: handed out already, it is dropped; acknowledged already, it is
acknowledged again and dropped (``Seen``).

*Dead messages* (C12). What was handed out ``max_deliveries`` times without an acknowledgement, has expired,
or is rejected by its receiver, is stored in ``_DMQ`` with its origin and the reason, and then taken from its
destination. The copy has an identity of its own, made of the message's, so a crash between the two leaves one
copy.

Lock ``_changed`` of a consumer guards its messages that are ready; all else belongs to the link's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import nats.aio.msg
import nats.errors
import nats.js.api
import nats.js.errors
import structlog

from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.messages import names
from sla_server.cluster.messages.catalogue import Catalogue, Destination, DestinationKind
from sla_server.cluster.messages.credit import PullLedger
from sla_server.cluster.messages.errors import BadSettings, MessagesError, NotConfirmed, SessionClosed
from sla_server.cluster.messages.link import ANSWER_S, EngineLink
from sla_server.cluster.messages.producer import IDENTITY

log = structlog.get_logger("messages")
EXPIRES: Final = "Sla-Expires-Unix-Us"
ORIGIN: Final = "Sla-Origin"
REASON: Final = "Sla-Reason"
CREDIT: Final = 100
ACK_WAIT_S: Final = 10.0
MAX_DELIVERIES: Final = 10
ACK_LIMIT_S: Final = 60.0
SEEN: Final = 10_000
"""Identities that a feed remembers; what comes again after a failover is at most its credit."""
_PULL_S: Final = 5.0
_SHARED_PENDING: Final = 100_000  # of a queue: each of its consumers has credit of its own
_CREATE_S: Final = 60.0
StoreDead = Callable[["Received", str], None]


class Seen:
    """Identities that were acknowledged, the last ``limit`` of them. Pure."""

    def __init__(self, limit: int = SEEN) -> None:
        self._limit = limit
        self._known: OrderedDict[str, None] = OrderedDict()

    def add(self, identity: str) -> None:
        """One was acknowledged."""
        self._known[identity] = None
        self._known.move_to_end(identity)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)

    def __contains__(self, identity: str) -> bool:
        return identity in self._known


class Received:
    """A message handed out, until ``acknowledge``, ``give_back`` or ``reject`` ends it. Any thread.

    Attributes:
        identity: who made it, and its number; the same however often it comes.
        deliveries: how often it was handed out, this time included.
    """

    def __init__(self, feed: DestinationFeed, message: nats.aio.msg.Msg, identity: str) -> None:
        self._feed = feed
        self.identity = identity
        self.destination = feed.destination.name
        self.data = message.data
        self.headers: Mapping[str, str] = message.headers or {}
        self.deliveries = message.metadata.num_delivered
        self.sequence = message.metadata.sequence.stream
        self.reply = message.reply

    def acknowledge(self, limit_s: float = ACK_LIMIT_S) -> None:
        """It is done with; it does not come again.

        Raises:
            NotConfirmed: it may come again, to another session.
            SessionClosed: the session ends; likewise.
        """
        self._feed.run(self._feed.acknowledge(self, limit_s))

    def give_back(self) -> None:
        """Let it be handed out again, here or elsewhere."""
        self._feed.run(self._feed.give_back(self))

    def reject(self, reason: str) -> None:
        """It cannot be used: to ``_DMQ`` with it.

        Raises:
            NotConfirmed: perhaps it is there; it comes again, and may be rejected again.
        """
        self._feed.to_dead_messages(self, reason)


class DestinationFeed:
    """Messages of one destination for one consumer. The link's thread, but for two methods that say so."""

    def __init__(
        self, consumer: Consumer, link: EngineLink, destination: Destination, store_dead: StoreDead
    ) -> None:
        self.destination = destination
        self.acknowledged = 0
        self.last_acknowledged = ""
        self.doubles = 0
        self._consumer = consumer
        self._link = link
        self._store_dead = store_dead
        self._ledger = PullLedger(consumer.credit)
        self._held: dict[str, Received] = {}
        self._seen = Seen()
        self._repeats: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._engine_name = engine_name(destination, consumer.name)
        self._task = asyncio.create_task(self._run())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it in the link's thread, and wait."""
        self._link.run(work)

    def to_dead_messages(self, received: Received, reason: str) -> None:
        """Store a copy in ``_DMQ``, then take the message from its destination."""
        self._store_dead(received, reason)
        self.run(self.acknowledge(received, ACK_LIMIT_S))

    async def acknowledge(self, received: Received, limit_s: float) -> None:
        """Repeat it until the engine confirms; nothing for what is acknowledged or given back."""
        if self._held.get(received.identity) is not received:
            return

        async def attempt() -> None:
            await self._link.client.request(received.reply, b"+ACK", timeout=ANSWER_S)

        await self._link.retry(attempt, f"acknowledgement of {received.identity}", limit_s)
        if self._release(received):
            self.acknowledged += 1
            self.last_acknowledged = received.identity
            self._seen.add(received.identity)

    async def give_back(self, received: Received) -> None:
        """One attempt: what is lost of it comes again after ``ack_wait_s``."""
        if self._release(received):
            await self._link.client.publish(received.reply, b"-NAK")

    async def close(self) -> None:
        """Ask for nothing more, and give back what is held."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for received in list(self._held.values()):
            await self.give_back(received)

    def _release(self, received: Received) -> bool:
        if self._held.get(received.identity) is not received:
            return False
        del self._held[received.identity]
        self._ledger.release()
        self._room.set()
        return True

    async def _run(self) -> None:
        client = self._link.client
        inbox = client.new_inbox()
        alive_at_s = time.monotonic()
        await self._link.retry(self._make_consumer, f"consumer of {self.destination.name!r}", _CREATE_S)

        async def came(message: nats.aio.msg.Msg) -> None:
            if message.subject.startswith(inbox):  # a status: this request brings no more
                self._ledger.end(int(message.subject.rpartition(".")[2]))
                self._room.set()
            else:
                self._deliver(message)

        subscription = await client.subscribe(f"{inbox}.*", cb=came)
        asked_at_s = 0.0
        try:
            while True:
                now_s = time.monotonic()
                if self._ledger.requested and now_s > asked_at_s + _PULL_S + ANSWER_S:
                    # No status came: the node with the request is gone, and the consumer, if new, may be.
                    self._ledger.end(self._ledger.last_request)
                    await self._link.retry(self._make_consumer, "a consumer", _CREATE_S)
                if now_s > alive_at_s + self._consumer.ack_wait_s / 3:
                    alive_at_s = now_s
                    for received in list(self._held.values()):
                        await client.publish(received.reply, b"+WPI")
                if (request := self._ledger.request()) is not None:
                    number, count = request
                    asked_at_s = now_s
                    wanted = {"batch": count, "expires": int(_PULL_S * 1e9)}
                    await client.publish(
                        f"$JS.API.CONSUMER.MSG.NEXT.{self.destination.stream}.{self._engine_name}",
                        json.dumps(wanted).encode(),
                        reply=f"{inbox}.{number}",
                    )
                self._room.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._room.wait(), min(1.0, self._consumer.ack_wait_s / 3))
        except (OSError, nats.errors.Error) as exc:
            log.warning("consumer-ends", destination=self.destination.name, problem=str(exc))
        finally:
            await subscription.unsubscribe()

    async def _make_consumer(self) -> None:
        is_queue = self.destination.kind is DestinationKind.QUEUE
        await self._link.stream.add_consumer(
            self.destination.stream,
            nats.js.api.ConsumerConfig(
                durable_name=self._engine_name,
                filter_subject=self.destination.subject,
                ack_policy=nats.js.api.AckPolicy.EXPLICIT,
                ack_wait=self._consumer.ack_wait_s,
                max_ack_pending=_SHARED_PENDING if is_queue else 2 * self._consumer.credit,
                max_deliver=-1,
            ),
        )
        self._consumer.add_ready_feed()

    def _deliver(self, message: nats.aio.msg.Msg) -> None:
        headers = message.headers or {}
        identity = headers.get(IDENTITY) or f"{self.destination.stream}:{message.metadata.sequence.stream}"
        self._ledger.deliver()
        if identity in self._seen or identity in self._held:
            self.doubles += 1
            self._ledger.release()
            self._room.set()
            if identity in self._seen:
                self._acknowledge_again(message.reply)
            return
        received = Received(self, message, identity)
        self._held[identity] = received
        if not self._ledger.requested:
            self._room.set()
        self._consumer.add_ready(received)

    def _acknowledge_again(self, reply: str) -> None:
        task = asyncio.create_task(self._link.client.publish(reply, b"+ACK"))
        self._repeats.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._repeats.discard)


def engine_name(destination: Destination, consumer: str) -> str:
    """Consumers of a queue share one of the engine; each subscriber of a topic has its own."""
    who = "queue" if destination.kind is DestinationKind.QUEUE else names.encode(consumer)
    return f"{who}-{names.encode(destination.name)}"


class Consumer:
    """Receives what a selector matches; see the module. Any thread."""

    def __init__(
        self,
        link: EngineLink,
        catalogue: Catalogue,
        selector: names.Selector,
        name: str,
        store_dead: StoreDead,
        *,
        credit: int = CREDIT,
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
        self.credit = PullLedger(credit).credit
        self.ack_wait_s = ack_wait_s
        self._max_deliveries = max_deliveries
        self._link = link
        self._catalogue = catalogue
        self._selector = selector
        self._store_dead = store_dead
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
        except NotConfirmed as exc:
            log.warning("dead-message-kept", identity=received.identity, problem=str(exc))
            received.give_back()
        return True

    async def _open(self) -> None:
        self._end_listening = self._catalogue.listen(self._found)

    def _found(self, destination: Destination) -> None:
        if destination.name not in self._feeds and self._selector.matches(destination.name):
            self._feeds[destination.name] = DestinationFeed(self, self._link, destination, self._store_dead)

    async def _close(self) -> None:
        self._end_listening()
        self._end_listening = lambda: None
        await asyncio.gather(*(feed.close() for feed in self._feeds.values()))


def cause_of_death(headers: Mapping[str, str], deliveries: int, max_deliveries: int, now_unix_us: int) -> str:
    """Why a message is not handed out any more; "" if it is. Pure."""
    expires = headers.get(EXPIRES, "")
    if expires.isascii() and expires.isdigit() and int(expires) <= now_unix_us:
        return "expired"
    if deliveries > max_deliveries:
        return f"handed out {max_deliveries} times and never acknowledged"
    return ""


def run_handler(consumer: Consumer, received: Received, handler: Callable[[Received], None]) -> None:
    """In a thread of the pool: what returns is acknowledged, what raises comes again."""
    if consumer.remove_if_dead(received):
        return
    try:
        handler(received)
        received.acknowledge()
    except MessagesError as exc:
        log.warning("message-not-acknowledged", identity=received.identity, problem=str(exc))
    except Exception:
        log.exception("message-handler-failed", identity=received.identity, destination=received.destination)
        received.give_back()
