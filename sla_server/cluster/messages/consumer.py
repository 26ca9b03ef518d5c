"""Consumers: each message is handed out once, ``credit`` of a destination at most (C1, C9, C11).

A ``Consumer`` has a ``DestinationFeed`` for each destination that its selector matches, also those created
later. A feed asks the engine for as many messages as its credit leaves (``PullLedger``), so a consumer that
does not acknowledge is sent no more, and no other is kept waiting by it: the engine gives a queue's messages
to those who ask.

*Resuming.* The engine remembers, under the consumer's name, what was acknowledged. What was handed out and
not acknowledged comes again, after ``ack_wait_s`` or when the feed ends; as long as the session lives, it
keeps the engine from that. An acknowledgement is repeated until it is confirmed. What comes again all the
same is recognised by its identity: handed out already, it is dropped; acknowledged already, it is
acknowledged again and dropped (``Seen``).

*Order.* Messages of a destination come in the order in which they are stored, but for those that were under
way to a consumer when a node died: they come again after ``ack_wait_s``, behind what came meanwhile.

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

from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.errors import ClusterError
from sla_server.cluster.messages import names
from sla_server.cluster.messages.catalogue import Catalogue, Destination, DestinationKind
from sla_server.cluster.messages.credit import PullLedger
from sla_server.cluster.messages.errors import BadSettings, MessagesError, SessionClosed
from sla_server.cluster.messages.link import ANSWER_S, EngineLink
from sla_server.cluster.messages.producer import EXPIRES, IDENTITY

log = structlog.get_logger("messages")
ORIGIN: Final = "Sla-Origin"
REASON: Final = "Sla-Reason"
CREDIT: Final = 100
ACK_WAIT_S: Final = 10.0
MAX_DELIVERIES: Final = 10
ACK_LIMIT_S: Final = 60.0
SEEN: Final = 10_000
"""Identities that a feed remembers; what comes again after a failover is at most its credit."""
AGAIN_S: Final = (0.1, 60.0)
"""What a handler fails at comes again after the first; after twice as long each time, at most the last. Ten
times take two minutes, so that what it needs may come back before its messages are dead."""
_PULL_S: Final = 5.0
_SHARED_PENDING: Final = 100_000  # of a queue: each of its consumers has credit of its own
_CREATE_S: Final = 60.0
_NO_MORE: Final = ("404", "408")
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

    @property
    def is_held(self) -> bool:
        """Whether it is neither acknowledged nor given back."""
        return self._feed.holds(self)

    def give_back(self, after_s: float = 0.0) -> None:
        """Let it be handed out again, here or elsewhere, not before so many seconds."""
        self._feed.run(self._feed.give_back(self, after_s))

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
        self._pause = Backoff(0.1, _PULL_S)
        self._is_ready = False
        self._is_closed = False
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
        if not self.holds(received):
            if self._is_closed and received.identity not in self._seen:
                raise SessionClosed(self._consumer.name)  # it was given back
            return

        async def attempt() -> None:
            await self._link.client.request(received.reply, b"+ACK", timeout=ANSWER_S)

        await self._link.retry(attempt, f"acknowledgement of {received.identity}", limit_s)
        if self._release(received):
            self.acknowledged += 1
            self.last_acknowledged = received.identity
            self._seen.add(received.identity)

    async def give_back(self, received: Received, after_s: float = 0.0) -> None:
        """One attempt: what is lost of it comes again after ``ack_wait_s``."""
        if self._release(received):
            delay = b' {"delay": %d}' % int(after_s * 1e9) if after_s else b""
            with contextlib.suppress(OSError, nats.errors.Error):
                await self._link.client.publish(received.reply, b"-NAK" + delay)

    def holds(self, received: Received) -> bool:
        """Whether it is neither acknowledged nor given back. Any thread."""
        return self._held.get(received.identity) is received

    async def close(self) -> None:
        """Ask for nothing more, and give back what is held."""
        self._is_closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for received in list(self._held.values()):
            await self.give_back(received)

    def _release(self, received: Received) -> bool:
        if not self.holds(received):
            return False
        del self._held[received.identity]
        self._ledger.release()
        self._room.set()
        return True

    async def _run(self) -> None:
        """Go on for ever: a cluster may be without a majority for hours."""
        keeper = asyncio.create_task(self._keep_held())
        try:
            while True:
                try:
                    await self._pull()
                except (MessagesError, OSError, nats.errors.Error) as exc:
                    name = self.destination.name
                    log.warning("consumer-interrupted", destination=name, problem=str(exc))
                except Exception:
                    log.exception("consumer-interrupted", destination=self.destination.name)
                self._ledger.end(self._ledger.last_request)
                await asyncio.sleep(self._pause.failed())
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _keep_held(self) -> None:
        """Keep the engine from handing out again what is held here."""
        while True:
            await asyncio.sleep(self._consumer.ack_wait_s / 3)
            try:
                for received in list(self._held.values()):
                    await self._link.client.publish(received.reply, b"+WPI")
            except (OSError, nats.errors.Error):
                continue  # without a connection: the next round
            except Exception:
                log.exception("held-not-kept", destination=self.destination.name)

    async def _pull(self) -> None:
        """Ask and be given, until the engine says that the consumer is gone or has no leader."""
        client = self._link.client
        inbox = client.new_inbox()
        refusal = ""
        await self._link.retry(self._make_consumer, f"consumer of {self.destination.name!r}", _CREATE_S)

        async def came(message: nats.aio.msg.Msg) -> None:
            nonlocal refusal
            if message.subject.startswith(inbox):  # a status: this request brings no more
                number = int(message.subject.rpartition(".")[2])
                if number == self._ledger.last_request:
                    refusal = refusal_of(message.headers or {})
                self._ledger.end(number)
                self._room.set()
            else:
                self._pause.succeeded()
                self._deliver(message)

        subscription = await client.subscribe(f"{inbox}.*", cb=came)
        asked_at_s = 0.0
        try:
            while not refusal:
                now_s = time.monotonic()
                if self._ledger.requested and now_s > asked_at_s + _PULL_S + ANSWER_S:
                    # No status came: the node with the request is gone, and the consumer, if new, may be.
                    self._ledger.end(self._ledger.last_request)
                    await self._link.retry(self._make_consumer, "a consumer", _CREATE_S)
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
                    await asyncio.wait_for(self._room.wait(), 1.0)
            log.debug("consumer-refused", destination=self.destination.name, problem=refusal)
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def _make_consumer(self) -> None:
        is_queue = self.destination.kind is DestinationKind.QUEUE
        ack_wait_s, action = self._consumer.ack_wait_s, "create"
        with contextlib.suppress(nats.js.errors.NotFoundError):
            # Others share it, and keep what they hold as often as their own time asks for: never shorten it.
            there = await self._link.stream.consumer_info(self.destination.stream, self._engine_name)
            ack_wait_s, action = max(ack_wait_s, there.config.ack_wait or 0.0), "update"
        config = nats.js.api.ConsumerConfig(
            durable_name=self._engine_name,
            filter_subject=self.destination.subject,
            ack_policy=nats.js.api.AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            max_ack_pending=_SHARED_PENDING if is_queue else 2 * self._consumer.credit,
            max_deliver=-1,
        )
        # Not the library's way, which overwrites: "not found" may come from a node that is behind.
        await self._link.ask(
            f"CONSUMER.DURABLE.CREATE.{self.destination.stream}.{self._engine_name}",
            {"stream_name": self.destination.stream, "config": config.as_dict(), "action": action},
        )
        if not self._is_ready:
            self._is_ready = True
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
        except ClusterError as exc:  # no majority, or _DMQ is full: it stays where it is
            log.warning("dead-message-kept", identity=received.identity, problem=str(exc))
            received.give_back(_PULL_S)
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


def refusal_of(headers: Mapping[str, str]) -> str:
    """What the status that ends a request says, unless it just has no more messages: "". Pure."""
    status = headers.get("Status", "")
    return "" if status in _NO_MORE else f"{status} {headers.get('Description', '')}".strip() or "no status"


def run_handler(consumer: Consumer, received: Received, handler: Callable[[Received], None]) -> None:
    """In a thread of the pool: what returns is acknowledged, what raises comes again.

    What was given back meanwhile, as the consumer was closed, is not handled: it may be with another one.
    """
    if not received.is_held or consumer.remove_if_dead(received):
        return
    again_s = min(AGAIN_S[1], AGAIN_S[0] * 2 ** min(received.deliveries - 1, 16))
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
