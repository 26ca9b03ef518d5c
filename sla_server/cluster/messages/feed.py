"""The part of a consumer for one destination, and a message that it has handed out (C1, C9, C10).

A feed asks the engine for as many messages as its credit leaves (``PullLedger``), so a consumer that does not
acknowledge is sent no more, and no other is kept waiting by it: the engine gives a queue's messages to those
who ask.

*Resuming.* The engine remembers, under the consumer's name, what was acknowledged. What was handed out and
not acknowledged comes again, after ``ack_wait_s`` or when the feed ends; as long as the session lives, it
keeps the engine from that, also over a failover if ``ack_wait_s`` is no less than by default. An
acknowledgement is repeated until it is confirmed. What comes again all the same is recognised by its
identity: handed out already, it is dropped; acknowledged already, it is acknowledged again and dropped
(``Seen``).

*Consumers that are made again.* The primary of a destination may be lost for good, and the engine's consumer
with it (``mirror_promotion``). What a session still holds of the former one cannot be acknowledged
(``NotConfirmed``). It is handed out again, to this session as to others: whoever undid its work must get it.

*Order.* Messages of a destination come in the order in which they are stored, but for those that were under
way to a consumer when a node died: they come again after ``ack_wait_s``, behind what came meanwhile.

*Transactions.* What was sent in one is handed out when that is committed, and removed if it is rolled back;
what is behind it waits with it. What comes again may have been acknowledged in one that was committed, and is
then removed, too. To the consumers of a promoted mirror all comes for the first time: the stream says which
messages are those of the lost primary (``promoted_last``).

Thread: the link's, but for methods that say so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import nats.aio.msg
import nats.errors
import nats.js.api
import nats.js.errors
import structlog

from pmdaemon.runtime.backoff import Backoff
from sla_server.cluster.messages.catalogue import (
    SHARED_PENDING,
    Destination,
    DestinationKind,
    engine_name,
)
from sla_server.cluster.messages.credit import BlockedBy, PullLedger, ReceiveShares, Unit
from sla_server.cluster.messages.errors import MessagesError, NotConfirmed, SessionClosed
from sla_server.cluster.messages.link import ANSWER_S, EngineLink, size_bytes
from sla_server.cluster.messages.mirror_streams import is_served, promoted_last
from sla_server.cluster.messages.producer import IDENTITY
from sla_server.cluster.messages.transaction_records import MARK, Mark

if TYPE_CHECKING:
    from sla_server.cluster.messages.consumer import Consumer

log = structlog.get_logger("messages")
ACK_LIMIT_S: Final = 60.0
SEEN: Final = 10_000
"""Identities that a feed remembers; what comes again after a failover is at most its credit."""
PULL_S: Final = 5.0
KEEP_S: Final = 3.0
_CREATE_S: Final = 60.0
_NO_MORE: Final = ("404", "408")
_COMPLETED: Final = "Batch Completed"
"""So the engine ends a request with a limit of bytes that it has served in full, as if it were refused."""
_TOO_LARGE: Final = "message size exceeds maxbytes"
_MADE_AGAIN: Final = "the engine's consumer was made again, and hands it out again"
StoreDead = Callable[["Received", str], None]


class Visibility(Protocol):
    """What transactions say of a message (``TransactionRegister``); the link's thread."""

    async def is_committed(self, mark: Mark) -> bool:
        """Whether the transaction that sent it was committed; waits for the decision."""

    async def is_taken(self, stream: str, consumer: str, sequence: int) -> bool:
        """Whether a committed transaction has acknowledged it; waits likewise."""


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
        is_lost: it was not acknowledged before the engine's consumer was made again; the feed sets it.
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
        self.size_bytes = size_bytes(self.data, self.headers)
        self.stream = feed.destination.stream
        self.engine_consumer = feed.engine_name
        self.epoch = feed.epoch
        self.is_lost = False
        self._since_s = time.clock_gettime(time.CLOCK_BOOTTIME)

    def held_s(self) -> float:
        """How long ago it came; the time that the machine slept counts."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self._since_s

    def came_by(self, link: EngineLink) -> bool:
        """Whether it came by this connection."""
        return self._feed.link is link

    async def acknowledge_in_link(self, limit_s: float) -> None:
        """``acknowledge`` for what runs in the link's thread."""
        await self._feed.acknowledge(self, limit_s)

    def acknowledge(self, limit_s: float = ACK_LIMIT_S) -> None:
        """It is done with; it does not come again.

        Repeated, it does nothing if it was acknowledged or given back.

        Raises:
            NotConfirmed: it may come again, to this session or another one; each further call says so, too,
                until what came again is acknowledged.
            SessionClosed: the session ends; it may come again, to another one.
        """
        self._feed.run(self._feed.acknowledge(self, limit_s))

    def start_acknowledging(self, limit_s: float = ACK_LIMIT_S) -> concurrent.futures.Future[None]:
        """``acknowledge`` without waiting: the result has its end, or its error."""
        return self._feed.link.start(self._feed.acknowledge(self, limit_s))

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
        self,
        consumer: Consumer,
        link: EngineLink,
        destination: Destination,
        store_dead: StoreDead,
        visibility: Visibility,
        shares: ReceiveShares,
    ) -> None:
        self.destination = destination
        self.engine_name = engine_name(destination, consumer.name)
        self.acknowledged = 0
        self.last_acknowledged = ""
        self.doubles = 0
        self._consumer = consumer
        self.link = link
        self._store_dead = store_dead
        self._ledger = PullLedger(consumer.credit, consumer.credit_bytes)
        self._shares = shares
        shares.add(self._ledger)
        self._held: dict[str, Received] = {}
        self._seen = Seen()
        self._repeats: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._pause = Backoff(0.1, PULL_S)
        self._is_ready = False
        self._is_closed = False
        self.epoch = 0
        self._created = ""
        self._last_delivered = 0
        self._may_be_taken_to = 0
        self._heard_at_s = 0.0
        self._visibility = visibility
        self._undecided: deque[Received] = deque()
        self._deciding: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it in the link's thread, and wait."""
        self.link.run(work)

    def to_dead_messages(self, received: Received, reason: str) -> None:
        """Store a copy in ``_DMQ``, then take the message from its destination."""
        self._store_dead(received, reason)
        self.run(self.acknowledge(received, ACK_LIMIT_S))

    async def acknowledge(self, received: Received, limit_s: float) -> None:
        """Repeat it until the engine confirms; nothing for what is acknowledged or given back."""
        what = f"acknowledgement of {received.identity}"
        if not self.holds(received):
            if received.identity in self._seen:
                return
            if received.is_lost:
                raise NotConfirmed(what, limit_s, _MADE_AGAIN)
            if self._is_closed:
                raise SessionClosed(self._consumer.name)  # it was given back
            return

        async def attempt() -> None:
            try:
                if received.epoch == self.epoch:
                    await self.link.client.request(received.reply, b"+ACK", timeout=ANSWER_S)
                    return
            except (TimeoutError, nats.errors.TimeoutError, nats.errors.NoRespondersError):
                await self._find_another()
                if received.epoch == self.epoch:
                    raise
            # The engine's consumer was lost and made again, and knows nothing of it: it hands it out again.
            # The receiver may undo what it did, so it is not one that was seen.
            if self._release(received):
                received.is_lost = True
            raise NotConfirmed(what, limit_s, _MADE_AGAIN)

        await self.link.retry(attempt, what, limit_s)
        if self._release(received):
            self.acknowledged += 1
            self.last_acknowledged = received.identity
            self._seen.add(received.identity)

    async def give_back(self, received: Received, after_s: float = 0.0) -> None:
        """One attempt: what is lost of it comes again after ``ack_wait_s``."""
        if self._release(received):
            delay = b' {"delay": %d}' % int(after_s * 1e9) if after_s else b""
            with contextlib.suppress(OSError, nats.errors.Error):
                await self.link.client.publish(received.reply, b"-NAK" + delay)

    def holds(self, received: Received) -> bool:
        """Whether it is neither acknowledged nor given back. Any thread."""
        return self._held.get(received.identity) is received

    async def close(self) -> None:
        """Ask for nothing more, and give back what is held."""
        self._is_closed = True
        ending = [task for task in (self._task, self._deciding) if task is not None]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for received in list(self._held.values()):
            await self.give_back(received)
        self._shares.remove(self._ledger)

    @property
    def blocked_by(self) -> BlockedBy | None:
        """Which credit the receiver must free by acknowledgements before more comes. Any thread."""
        unit = self._ledger.full_of
        if unit is None:
            return None
        return BlockedBy.CONSUMER if unit is Unit.MESSAGES else BlockedBy.CONSUMER_BYTES

    def _release(self, received: Received) -> bool:
        if not self.holds(received):
            return False
        del self._held[received.identity]
        self._ledger.release(received.size_bytes)
        self._room.set()
        return True

    async def _run(self) -> None:
        """Go on until the end: a cluster may be without a majority for hours.

        ``wait_for`` loses a cancellation that comes together with what it waits for, so it does not suffice.
        """
        keeper = asyncio.create_task(self._keep_held())
        try:
            while not self._is_closed:
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
            await asyncio.sleep(keep_s(self._consumer.ack_wait_s))
            try:
                for received in list(self._held.values()):
                    await self.link.client.publish(received.reply, b"+WPI")
            except (OSError, nats.errors.Error):
                continue  # without a connection: the next round
            except Exception:
                log.exception("held-not-kept", destination=self.destination.name)

    async def _pull(self) -> None:
        """Ask and be given, until the engine says that the consumer is gone or has no leader."""
        client = self.link.client
        inbox = client.new_inbox()
        refusal = ""
        await self.link.retry(self._make_consumer, f"consumer of {self.destination.name!r}", _CREATE_S)

        async def came(message: nats.aio.msg.Msg) -> None:
            nonlocal refusal
            self._heard_at_s = time.monotonic()
            if message.subject.startswith(inbox):  # a status: this request brings no more
                number, headers = int(message.subject.rpartition(".")[2]), message.headers or {}
                is_too_large = _TOO_LARGE in headers.get("Description", "").lower()
                if number == self._ledger.last_request and not is_too_large:
                    refusal = refusal_of(headers)
                unserved = headers.get("Nats-Pending-Messages", "")
                self._ledger.end(
                    number,
                    unserved=int(unserved) if unserved.isascii() and unserved.isdigit() else None,
                    is_too_large=is_too_large,
                )
                self._room.set()
            else:
                self._pause.succeeded()
                self._deliver(message)

        subscription = await client.subscribe(f"{inbox}.*", cb=came)
        asked_at_s = 0.0
        try:
            while not refusal and not self._is_closed:
                now_s = time.monotonic()
                if self._ledger.requested and now_s > asked_at_s + PULL_S + ANSWER_S:
                    # No status came: the node with the request is gone, and the consumer, if new, may be.
                    self._ledger.end(self._ledger.last_request)
                    await self.link.retry(self._make_consumer, "a consumer", _CREATE_S)
                elif self._ledger.may_request and now_s > self._heard_at_s + PULL_S + ANSWER_S:
                    # In so long a time without a request a mirror may have become the primary.
                    await self.link.retry(self._see_stream, "a stream", _CREATE_S)
                if (request := self._ledger.request()) is not None:
                    asked_at_s = now_s
                    wanted = {"batch": request.messages, "expires": int(PULL_S * 1e9)}
                    if request.bytes:
                        wanted["max_bytes"] = request.bytes
                    await client.publish(
                        f"$JS.API.CONSUMER.MSG.NEXT.{self.destination.stream}.{self.engine_name}",
                        json.dumps(wanted).encode(),
                        reply=f"{inbox}.{request.number}",
                    )
                self._room.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._room.wait(), 1.0)
            log.debug("consumer-refused", destination=self.destination.name, problem=refusal)
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def _make_consumer(self) -> None:
        await self._see_stream()
        is_queue = self.destination.kind is DestinationKind.QUEUE
        ack_wait_s, action = self._consumer.ack_wait_s, "create"
        begin: dict[str, Any] = {}
        with contextlib.suppress(nats.js.errors.NotFoundError):
            # Others share it, and keep what they hold as often as their own time asks for: never shorten it.
            there = await self.link.stream.consumer_info(self.destination.stream, self.engine_name)
            ack_wait_s, action = max(ack_wait_s, there.config.ack_wait or 0.0), "update"
            # Of a topic whose mirror was promoted: where it began, which cannot be changed.
            begin = {
                "deliver_policy": there.config.deliver_policy,
                "opt_start_seq": there.config.opt_start_seq,
            }
        config = nats.js.api.ConsumerConfig(
            durable_name=self.engine_name,
            filter_subject=self.destination.subject,
            ack_policy=nats.js.api.AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            max_ack_pending=SHARED_PENDING if is_queue else 2 * self._consumer.credit,
            max_deliver=-1,
            **begin,
        )
        # Not the library's way, which overwrites: "not found" may come from a node that is behind.
        made = await self.link.ask(
            f"CONSUMER.DURABLE.CREATE.{self.destination.stream}.{self.engine_name}",
            {"stream_name": self.destination.stream, "config": config.as_dict(), "action": action},
        )
        self._see(made)
        if not self._is_ready:
            self._is_ready = True
            self._consumer.add_ready_feed()

    async def _see_stream(self) -> None:
        """Whether it is of a mirror that was promoted; for ``retry``, as long as it is being promoted."""
        info = await self.link.ask(f"STREAM.INFO.{self.destination.stream}", {})
        if not is_served(info):  # its promotion first makes the consumers of subscribers where they were
            raise TimeoutError("its mirror is being promoted")
        self._may_be_taken_to = max(self._may_be_taken_to, promoted_last(info))
        self._heard_at_s = time.monotonic()

    def _see(self, info: Mapping[str, Any]) -> None:
        """What is held of a former consumer (its primary was lost: ``mirror_promotion``) is not its own."""
        created = str((info or {}).get("created", ""))
        if self._created and created and created != self._created:
            self.epoch += 1
            self._may_be_taken_to = max(self._may_be_taken_to, self._last_delivered)
            log.warning("consumer-made-again", destination=self.destination.name, held=len(self._held))
        self._created = created or self._created

    async def _find_another(self) -> None:
        with contextlib.suppress(TimeoutError, nats.errors.Error):
            self._see(await self.link.ask(f"CONSUMER.INFO.{self.destination.stream}.{self.engine_name}", {}))

    def _deliver(self, message: nats.aio.msg.Msg) -> None:
        headers = message.headers or {}
        identity = self.destination.own_identity(headers.get(IDENTITY, ""))
        identity = identity or f"{self.destination.stream}:{message.metadata.sequence.stream}"
        self._ledger.deliver(size := size_bytes(message.data, headers))
        if identity in self._seen or identity in self._held:
            self.doubles += 1
            self._ledger.release(size)
            self._room.set()
            if identity in self._seen:
                self._acknowledge_again(message.reply)
            elif (held := self._held[identity]).epoch != self.epoch:  # this consumer's now
                held.reply, held.epoch = message.reply, self.epoch
            return
        received = Received(self, message, identity)
        self._last_delivered = max(self._last_delivered, received.sequence)
        self._held[identity] = received
        if not self._ledger.requested:
            self._room.set()
        if MARK in received.headers or self._may_be_taken(received) or self._undecided:
            self._undecided.append(received)
            if self._deciding is None:
                self._deciding = asyncio.create_task(self._decide())
            return
        self._consumer.add_ready(received)

    async def _decide(self) -> None:
        """Hand out what transactions let be seen, in order; what is behind an open one waits with it."""
        pause = Backoff(0.1, PULL_S)
        while self._undecided and not self._is_closed:
            received = self._undecided[0]
            try:
                is_visible = await self._is_visible(received)
            except (MessagesError, OSError, nats.errors.Error) as exc:
                log.warning("transaction-not-known", identity=received.identity, problem=str(exc))
                await asyncio.sleep(pause.failed())
                continue
            except Exception:  # without this task nothing more would be handed out
                log.exception("transaction-not-known", identity=received.identity)
                await asyncio.sleep(pause.failed())
                continue
            pause.succeeded()
            self._undecided.popleft()
            if is_visible and self.holds(received):
                self._consumer.add_ready(received)
            elif self._release(received):
                self._seen.add(received.identity)
                self._acknowledge_again(received.reply)
        self._deciding = None

    async def _is_visible(self, received: Received) -> bool:
        mark = received.headers.get(MARK)
        if mark is not None and not await self._visibility.is_committed(Mark.parse(mark)):
            return False
        return not self._may_be_taken(received) or not await self._visibility.is_taken(
            received.stream, received.engine_consumer, received.sequence
        )

    def _may_be_taken(self, received: Received) -> bool:
        """Whether it may have been handed out before, to this consumer or a former one."""
        return received.deliveries > 1 or received.sequence <= self._may_be_taken_to

    def _acknowledge_again(self, reply: str) -> None:
        task = asyncio.create_task(self.link.client.publish(reply, b"+ACK"))
        self._repeats.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._repeats.discard)


def keep_s(ack_wait_s: float) -> float:
    """How often the engine hears of what is held. Pure."""
    return min(KEEP_S, ack_wait_s / 3)


def refusal_of(headers: Mapping[str, str]) -> str:
    """What the status that ends a request says, unless it just has no more messages: "". Pure."""
    status, description = headers.get("Status", ""), headers.get("Description", "")
    if status in _NO_MORE or description == _COMPLETED:
        return ""
    return f"{status} {description}".strip() or "no status"
